"""The couplings of a flow: each inverts, trains, saves, loads and is served."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import Glow, export_saved_model
from keras_auxref.flows import COUPLINGS, MultiScale
from keras_auxref.flows.coupling import check_coupling, coupling_template
from tests.flows.support import disturb, images
from tests.support import assert_agree, log_abs_det

SHAPE = (4, 4, 3)
NOT_AFFINE = [name for name in COUPLINGS if name != "affine"]  # which is in every other test


def small(**kwargs):
    # Written out, because TensorFlow vectorises no loop.
    return Glow(SHAPE, **{"levels": 2, "steps": 1, "hidden": 4, "seed": 1, "unroll": True, **kwargs})


@pytest.mark.parametrize("coupling", NOT_AFFINE)
def test_log_prob_is_that_of_a_brute_force_jacobian(coupling):
    shape = (2, 2, 3)
    model = disturb(Glow(shape, levels=1, steps=2, hidden=4, seed=1, coupling=coupling, mixing="permutation", dtype="float64"))
    x = tf.constant(np.random.default_rng(0).uniform(size=(2, *shape)))
    z, log_det = model.encode(x)
    brute = log_abs_det(lambda x: model.encode(x)[0], x, 3)
    np.testing.assert_allclose(log_det, brute, rtol=1e-9)
    np.testing.assert_allclose(model.log_prob(x), brute - 0.5 * np.square(z).sum(-1) - 6 * np.log(2 * np.pi), rtol=1e-9)
    np.testing.assert_allclose(model.decode(tf.identity(z)), x, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("coupling", ["logistic_mixture"])
def test_trains_saves_loads_and_is_served(coupling, tmp_path):
    model, x = small(coupling=coupling), images(8, SHAPE)
    model.fit(x, epochs=2, verbose=0)
    model.save(tmp_path / "flow.keras")
    again = keras.models.load_model(tmp_path / "flow.keras")
    assert again.get_config() == model.get_config()
    assert again.get_config()["coupling"] == coupling
    assert_agree(again.bits_per_dim(x), model.bits_per_dim(x))
    served = tf.saved_model.load(str(export_saved_model(model, tmp_path / "served"))).signatures
    fractions = (x / 255).astype("float32")
    np.testing.assert_allclose(served["log_prob"](images=fractions)["log_prob"], model.log_prob(x), atol=5e-4)
    z = served["encode"](images=fractions)["z"]
    np.testing.assert_allclose(served["decode"](z=z)["images"], fractions, atol=1e-4)
    drawn = served["sample"](n=tf.constant(2), seed=tf.constant(3, "int64"), temperature=tf.constant(1.0))["images"]
    np.testing.assert_allclose(drawn, model.sample(2, seed=3), atol=1e-4)


def test_an_old_configuration_means_affine():
    config = small().get_config()
    del config["coupling"], config["dequantisation"]
    model = Glow.from_config(config)
    assert model.get_config()["coupling"] == "affine"
    assert model.dequantisation == "uniform"
    flow = {key: value for key, value in model.flow.get_config().items() if key != "coupling"}
    assert MultiScale.from_config(flow).coupling == "affine"


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_every_coupling_is_proven_to_be_invertible(coupling):
    layer = coupling_template(coupling, 4, "float32")
    layer.build((None, 4, 4, 3))
    assert layer.certificate().invertible


def test_names_are_checked():
    for wrong in ("nice", None, 3):
        with pytest.raises(
            ValueError, match=r"Expected one of \['additive', 'affine', 'logistic_mixture', 'spline'\], or .* Received: "
        ):
            check_coupling(wrong)
    with pytest.raises(ValueError, match=r"Unknown coupling. .* Received: 'cubic'"):
        small(coupling="cubic")
