"""Images that grow in a flow."""

import argparse

import numpy as np
import pytest

from experiments import outliers
from keras_auxref import Glow


@pytest.fixture(scope="module")
def model():
    images = np.random.default_rng(0).integers(0, 256, (16, 8, 8, 3), dtype="uint8")
    model = Glow((8, 8, 3), levels=2, steps=2, mixing="conv", seed=0, coupling=outliers.coupling("norm", 4))
    model.initialize(images)
    return model, images


def test_the_sizes_after_the_last_step_are_those_of_z(model):
    model, images = model
    found = outliers.sizes(model, images)
    assert found.shape == (16, 4)
    top = np.asarray(model.encode(images)[0])[:, -(2 * 2 * 24) :]  # 2 × 2 pixels of 24 channels
    np.testing.assert_allclose(found[:, -1], np.sqrt(np.square(top).mean(axis=1)), rtol=1e-5)


def test_bits_are_those_of_the_model(model, monkeypatch):
    model, images = model
    monkeypatch.setattr(outliers, "BATCH", 8)
    halves = [np.asarray(model.bits_per_dim(half)) for half in (images[:8], images[8:])]
    np.testing.assert_allclose(outliers.bits(model, images), np.concatenate(halves), rtol=1e-6)


def test_names_of_couplings():
    assert outliers.coupling("plain", 4).bound == 2.0
    assert outliers.coupling("bound=0.5", 4).bound == 0.5
    assert outliers.coupling("norm", 4).norm
    for text in ("other", "bound=x", "bound=0"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"expected"):
            outliers.coupling_name(text)


@pytest.mark.slow
def test_writes_a_table_and_a_figure(experiment_here, tmp_path):
    small = ("--train-steps", "2", "--train-size", "64", "--levels", "1", "--steps", "1", "--hidden", "4")
    done = experiment_here("outliers", *small, "--output", "here")
    assert done.returncode == 0, done.stderr
    assert "| norm " in done.stdout
    assert {path.suffix for path in (tmp_path / "here").iterdir()} == {".json", ".png"}
