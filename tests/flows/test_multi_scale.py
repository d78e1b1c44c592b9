"""The multi-scale architecture as one invertible layer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import kernels
from keras_auxref.flows import MIXINGS, MultiScale
from tests.flows.support import disturb
from tests.support import assert_agree


def built(shape, mixing="aux", dtype="float64", **kwargs):
    layer = MultiScale(mixing=mixing, dtype=dtype, seed=3, **{"levels": 2, "steps": 2, "hidden": 4, **kwargs})
    layer.build((None, *shape))
    return layer


CASES = [("aux_factored", "float32", 1e-4), ("aux_factored", "float64", 1e-9), ("conv", "float64", 1e-9)]
EVERY = [(m, d, t) for m in (*MIXINGS, kernels.Spectral(0.99)) for d, t in (("float32", 1e-4), ("float64", 1e-9))]
REST = [pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case not in CASES]


@pytest.mark.parametrize(("mixing", "dtype", "tolerance"), [*CASES, *REST])
def test_inverse_and_log_determinant_are_those_of_the_whole_map(mixing, dtype, tolerance):
    layer = disturb(built((4, 4, 3), mixing, dtype))
    x = np.random.default_rng(1).uniform(size=(2, 4, 4, 3)).astype(dtype)

    @tf.function(autograph=False)
    def everything(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            z = layer(x)
        return z, tape.batch_jacobian(z, x), layer.inverse(tf.identity(z)), *layer.forward_and_log_det(x)

    z, jacobian, back, again, log_det = (t.numpy() for t in everything(tf.constant(x)))
    assert z.shape == (2, 48)
    np.testing.assert_allclose(again, z, rtol=1e-6)
    np.testing.assert_allclose(back, x, atol=tolerance)
    expected = np.linalg.slogdet(jacobian.astype("float64").reshape(2, 48, 48))[1]
    np.testing.assert_allclose(log_det, expected, rtol=tolerance)


@pytest.mark.parametrize(("shape", "levels"), [((2, 2, 1), 1), ((6, 2, 3), 1), ((8, 8, 1), 3), ((4, 12, 2), 2)])
def test_unusual_shapes(shape, levels):
    layer = disturb(built(shape, "conv", levels=levels, steps=1))
    x = np.random.default_rng(1).uniform(size=(1, *shape))
    z = layer(x)
    assert z.shape == (1, np.prod(shape)) == layer.compute_output_shape((1, *shape))
    assert layer.inverse_output_shape(z.shape) == (1, *shape)
    np.testing.assert_allclose(layer.inverse(tf.identity(z)), x, atol=1e-10)


@pytest.mark.parametrize("shape", [(6, 8, 3), (8, 7, 3), (None, 8, 3)])
def test_sizes_must_halve(shape):
    with pytest.raises(ValueError, match=r"divisible by 4.*Received"):
        built(shape)


@pytest.mark.parametrize("argument", ["levels", "steps", "hidden"])
def test_counts_are_positive_integers(argument):
    for value in (0, -1, 2.5):
        with pytest.raises(ValueError, match=argument):
            MultiScale(**{argument: value})


def test_initialize_standardises_what_leaves_every_act_norm():
    layer = built((4, 4, 3), "fixed", levels=1, steps=1)
    assert not layer.initialized
    x = np.random.default_rng(1).uniform(size=(64, 4, 4, 3))
    layer.initialize(x)
    assert layer.initialized
    # With couplings still at the identity and a rotation after ActNorm, z has the variance that ActNorm gave.
    z = layer(x).numpy()
    assert np.abs(z.mean(0)).max() < 1
    assert np.square(z).mean() == pytest.approx(1, abs=1e-6)


def test_seed_fixes_the_mixings_and_survives_the_config():
    first, second = built((4, 4, 3)), built((4, 4, 3))
    again = MultiScale.from_config(first.get_config())
    again.build((None, 4, 4, 3))
    for a, b, c in zip(*(flow.mixing_layers() for flow in (first, second, again)), strict=True):
        assert_agree(a.kernel, b.kernel)
        assert_agree(a.kernel, c.kernel)
    kernel = MultiScale.from_config(MultiScale(mixing=kernels.Spectral(0.7)).get_config()).mixing
    assert isinstance(kernel, kernels.Spectral)
    assert kernel.bound == 0.7


def test_as_a_layer_of_a_keras_model():
    inputs = keras.Input((4, 4, 3))
    model = keras.Model(inputs, MultiScale(levels=1, steps=1, hidden=4, mixing="householder")(inputs))
    assert model.output_shape == (None, 48)
    assert np.isfinite(model.predict(np.full((2, 4, 4, 3), 0.5), verbose=0)).all()
