"""Images to the real line and back."""

import numpy as np
import pytest
import tensorflow as tf

from keras_auxref.flows.preprocessing import Logit, dequantise


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logit_inverts_from_black_to_white(dtype):
    layer = Logit(dtype=dtype)
    x = np.linspace(0, 1, 101).reshape(1, 101, 1).astype(dtype)
    y = layer(x)
    assert np.isfinite(y).all()
    np.testing.assert_allclose(layer.inverse(tf.identity(y)), x, atol=1e-6 if dtype == "float32" else 1e-14)


def test_logit_log_determinant_is_that_of_autodiff():
    layer = Logit(0.8, dtype="float64")
    x = tf.constant(np.random.default_rng(0).uniform(size=(3, 2, 2, 3)))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(layer(x))
    slopes = np.log(tape.gradient(y, x).numpy()).sum(-1)
    np.testing.assert_allclose(layer.log_det_jacobian(x), slopes, rtol=1e-12)
    np.testing.assert_allclose(layer.forward_and_log_det(x)[1], slopes, rtol=1e-12)


@pytest.mark.parametrize("squash", [0.0, 1.0, -1.0])
def test_logit_refuses_what_would_reach_infinity(squash):
    with pytest.raises(ValueError, match="squash"):
        Logit(squash)


def test_integers_and_fractions_mean_the_same_images():
    whole = np.arange(256, dtype="uint8").reshape(1, 16, 16, 1)
    expected = (whole.astype("float64") + 0.25) / 256
    np.testing.assert_allclose(dequantise(whole, 0.25, 8, "float64"), expected, rtol=1e-14)
    np.testing.assert_allclose(dequantise(whole.astype("float32") / 255, 0.25, 8, "float64"), expected, rtol=1e-14)


def test_fewer_bits_and_values_out_of_range():
    x = np.array([[0.0, 1.0, 1.4, -0.3]])
    np.testing.assert_allclose(dequantise(x, 0.0, 2, "float64"), [[0, 0.75, 0.75, 0]])
