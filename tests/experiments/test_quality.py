"""Kernel distance, precision and recall, and the command that measures samples of flows by them."""

import json

import numpy as np
import pytest

from experiments.harness import features
from keras_auxref import Glow


def test_the_kernel_distance_is_its_formula(rng):
    x, y = rng.normal(size=(5, 3)), rng.normal(size=(4, 3))

    def k(a, b):
        return (a @ b / 3 + 1) ** 3

    within_x = np.mean([k(x[i], x[j]) for i in range(5) for j in range(5) if i != j])
    within_y = np.mean([k(y[i], y[j]) for i in range(4) for j in range(4) if i != j])
    between = np.mean([k(a, b) for a in x for b in y])
    assert features.kernel_distance(x, y) == pytest.approx(within_x + within_y - 2 * between, rel=1e-12)


def test_the_kernel_distance_has_mean_zero_for_one_distribution(rng):
    found = [features.kernel_distance(*rng.normal(size=(2, 40, 4))) for _ in range(200)]
    assert abs(np.mean(found)) < 5 * np.std(found) / 200**0.5
    assert features.kernel_distance(rng.normal(size=(40, 4)), 1 + rng.normal(size=(40, 4))) > 10 * np.std(found)


def test_precision_and_recall_tell_what_is_missing(rng):
    left, right, far = (rng.normal((shift, 0), size=(50, 2)) for shift in (-20, 20, 90))
    both = np.concatenate([left, right])
    assert features.precision_and_recall(both, left) == (1, 0.5)  # half of what is real has no sample like it
    assert features.precision_and_recall(left, both) == (0.5, 1)
    assert features.precision_and_recall(left, far) == (0, 0)


@pytest.mark.slow
def test_measures_the_samples_of_flows(experiment_here, tmp_path):
    flow = Glow((8, 8, 1), levels=1, steps=1, hidden=4, mixing="conv", bits=4, seed=0)
    flow.initialize(np.random.default_rng(0).integers(0, 16, (64, 8, 8, 1)))
    flow.save(tmp_path / "noise.keras")
    done = experiment_here(
        "quality", "noise.keras", "--dataset", "digits", "--samples", "300", "--epochs", "8", "--output", "here"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "here" / "quality-digits.json").read_text())
    assert found["classifier"]["accuracy"] > 0.8
    images, noise = found["measurements"]["images"], found["measurements"]["noise"]
    assert abs(images["kernel_distance"]) < 0.1 * noise["kernel_distance"]
    assert images["precision"] > 0.8
    assert images["recall"] > 0.8
    assert noise["precision"] < images["precision"] - 0.2
    assert "| noise" in done.stdout


def test_a_file_that_is_missing_is_refused(experiment):
    done = experiment("quality", "no.keras")
    assert done.returncode == 2
    assert "expected a file, received no.keras" in done.stderr
