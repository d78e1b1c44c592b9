"""How far a step of Adam turns U and V."""

import json

import keras
import numpy as np
import pytest

from experiments import fcnn, turning

D, CLASSES, BATCH = 8, 3, 16


def model_of(map: str, rate: float) -> keras.Sequential:
    keras.utils.set_random_seed(0)
    model = fcnn.build_model(map, D, CLASSES)
    fcnn.compile_model(model, rate, jit=False)
    return model


def matrices(model: keras.Sequential) -> np.ndarray:
    return np.stack([keras.ops.convert_to_numpy(part.matrix) for layer in model.layers[:3] for part in (layer.u, layer.v)])


@pytest.fixture
def data(rng):
    return rng.uniform(size=(64, D)).astype("float32"), rng.integers(CLASSES, size=64)


@pytest.mark.parametrize("map", ["cayley"])
def test_the_step_is_that_of_the_matrices(map, data, monkeypatch):
    monkeypatch.setattr(turning, "STEPS", (1,))
    model = model_of(map, 1e-3)
    before = matrices(model)
    found = turning.turning(model, *data, BATCH)["1"]
    change = matrices(model) - before
    # For Gaussian x the mean square of ‖Δx‖/‖x‖ is ‖Δ‖²_F/d; the mean is a little below its root.
    root = np.sqrt(np.square(change).sum(axis=(1, 2)) / D).mean()
    assert 0.75 * root < found["turned"] < 1.05 * root
    assert 0.5 < found["loss"] < 2.5


@pytest.mark.parametrize("map", ["aux"])
def test_the_first_step_is_proportional_to_the_rate_of_u_and_v(map, data, monkeypatch):
    monkeypatch.setattr(turning, "STEPS", (1,))
    turned = [turning.turning(model_of(map, rate), *data, BATCH)["1"]["turned"] for rate in (1e-5, 2e-5)]
    assert turned[1] / turned[0] == pytest.approx(2, rel=0.02)


@pytest.mark.slow
def test_writes_and_adds_to_its_file(experiment_here, tmp_path):
    arguments = ("--train-size", "64", "--output", "here")
    first = experiment_here("turning", "--map", "aux", *arguments)
    assert first.returncode == 0, first.stderr
    assert "| aux |" in first.stdout
    path = tmp_path / "here" / "turning-digits.json"
    before = json.loads(path.read_text())
    assert list(before["maps"]["aux"]) == ["1", "10", "100"]
    assert all(0 < entry["turned"] < 0.1 for entry in before["maps"]["aux"].values())

    second = experiment_here("turning", "--map", "aux", "--map", "cayley", "--resume", *arguments)
    assert second.returncode == 0, second.stderr
    after = json.loads(path.read_text())
    assert list(after["maps"]) == ["aux", "cayley"]
    assert after["maps"]["aux"] == before["maps"]["aux"]
    assert len(after["commands"]) == 2

    other = experiment_here("turning", "--map", "aux", "--seed", "1", "--resume", *arguments)
    assert other.returncode == 1
    assert "other data or settings" in other.stderr
    assert json.loads(path.read_text()) == after


def test_a_map_without_u_and_v_is_refused(experiment_here):
    done = experiment_here("turning", "--map", "dense")
    assert done.returncode == 2
    assert "expected one of aux, householder, cayley, exp, received dense" in done.stderr
