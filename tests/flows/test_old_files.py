"""Files of version 0.2, whose flows had weights for every step: `files/` holds some, with what their models answered."""

import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_auxref import Flow, Glow

FILES = Path(__file__).parent / "files"


@pytest.fixture(scope="module")
def reference():
    return np.load(FILES / "reference.npz")


@pytest.mark.parametrize("mixing", ["aux_factored", "conv", "aux_factored_qr", pytest.param("aux", marks=pytest.mark.slow)])
def test_a_file_loads_with_weights_and_optimizer(mixing, reference):
    model = keras.models.load_model(FILES / f"{mixing}.keras")
    assert model.initialized
    assert model.mixing == mixing
    x = reference["images"]
    np.testing.assert_allclose(model.log_prob(x), reference[f"{mixing}_log_prob"], rtol=1e-4, atol=1e-4)
    if mixing != "aux":  # of an inverse that is not proven, last digits decide
        np.testing.assert_allclose(model.sample(2, seed=1), reference[f"{mixing}_sample"], atol=1e-4)
    assert int(model.optimizer.iterations) == 6
    moments = model.optimizer.variables[1:]
    assert len(moments) == 2 * len(model.trainable_variables)
    assert all(np.abs(np.asarray(moment)).reshape(2, -1).max(axis=1).min() > 0 for moment in moments)


def test_a_checkpoint_loads(reference, tmp_path):
    mixing = "aux_factored"
    with zipfile.ZipFile(FILES / f"{mixing}.keras") as file:
        (tmp_path / "old.weights.h5").write_bytes(file.read("model.weights.h5"))
    expected = reference[f"{mixing}_log_prob"]
    model = Glow((8, 8, 1), levels=2, steps=2, hidden=4, mixing=mixing)
    model.load_weights(tmp_path / "old.weights.h5")
    np.testing.assert_allclose(model.log_prob(reference["images"]), expected, rtol=1e-4, atol=1e-4)
    model.save_weights(tmp_path / "new.weights.h5")
    again = Glow((8, 8, 1), levels=2, steps=2, hidden=4, mixing=mixing)
    again.load_weights(tmp_path / "new.weights.h5")
    np.testing.assert_allclose(again.log_prob(reference["images"]), expected, rtol=1e-4, atol=1e-4)


def _glow():
    return Glow((2, 2, 1), levels=1, steps=1, hidden=4, mixing="permutation", coupling="spline")


def _flow():
    return Flow(2, steps=1, hidden=4, mixing="permutation")


@pytest.mark.parametrize("make", [_flow, pytest.param(_glow, marks=pytest.mark.slow)])
def test_splines_of_old_files_keep_their_bound(make):
    """By their name alone, without `spline_bound`, they had tails from 4 on."""
    model = make()
    config = model.get_config()
    assert config["coupling"] == "spline"
    assert _coupling(type(model).from_config(config)).bound == config.pop("spline_bound") == 3
    old = type(model).from_config(config)
    assert (_coupling(old).bound, _coupling(old).hidden) == (4, 4)
    assert _coupling(type(model).from_config(old.get_config())).bound == 4


def _coupling(model):
    steps = model.flow if isinstance(model, Flow) else model.flow.steps_of_levels[0]
    return steps.template().layers[-1]
