"""Images to the real line and back."""

import numpy as np
import pytest
import tensorflow as tf

from keras_auxref.flows.preprocessing import Logit, as_fractions, dequantise


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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_impossible_pixels_have_no_density_and_no_nan(dtype):
    layer = Logit(0.8, dtype=dtype)  # possible are |x − ½| < 0.625
    x = tf.constant([[0.5, 1.1], [0.5, 1.2], [-7.0, 0.5], [0.5, np.inf], [np.nan, 0.5]], dtype)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y, log_det = layer.forward_and_log_det(x)
    np.testing.assert_array_equal(np.isneginf(log_det), [False, True, True, True, False])
    assert np.isfinite(y[:4]).all()
    assert np.isnan(log_det[4])
    assert np.isfinite(tape.gradient([y, log_det], x)[:3]).all()
    np.testing.assert_array_equal(layer.impossible(x, axis=-1), np.isneginf(log_det))


@pytest.mark.parametrize("bits", [1, 5, 8, 16])
def test_integers_and_fractions_mean_the_same_images(bits):
    peak = 2**bits - 1
    whole = np.unique(np.linspace(0, peak, 256).astype("int64"))
    expected = (whole - 0.25) / peak
    np.testing.assert_allclose(dequantise(whole, 0.25, bits, "float64"), expected, rtol=1e-14)
    np.testing.assert_allclose(dequantise(whole.astype("float32") / peak, 0.25, bits, "float64"), expected, rtol=1e-14)
    np.testing.assert_allclose(as_fractions(whole, bits, "float64"), dequantise(whole, 0.5, bits, "float64"), rtol=1e-14)


def test_values_out_of_range_are_impossible_and_others_become_the_nearest():
    x = np.array([[0.0, 1.0, 0.4, 1.4, -0.3, np.nan]])
    np.testing.assert_allclose(dequantise(x, 0.5, 2, "float64"), [[0, 1, 1 / 3, np.inf, np.inf, np.nan]])
    np.testing.assert_allclose(dequantise(np.array([-1, 0, 3, 4]), 0.5, 2, "float32"), [np.inf, 0, 1, np.inf])
