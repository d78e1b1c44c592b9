import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref.flows import LogisticMixtureCoupling
from tests.flows.parts.two_bumps import trained_on_two_bumps


def moved(rng, shape, size=0.3, **arguments):
    layer = LogisticMixtureCoupling(hidden=4, **arguments)
    layer.build((None, *shape[1:]))
    for weight in layer.weights:
        weight.assign_add(size * rng.normal(size=weight.shape))
    return layer


@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 4, 3)])
def test_is_the_formula(rng, shape):
    """σ⁻¹(F)·eᵃ + t, from the output of the network as the docstring lays it out, one entry after the other."""
    x = rng.normal(size=shape)
    layer = moved(rng, shape, components=3, bound=1.3, scale_bound=0.8, dtype="float64")
    y, log_det = layer.forward_and_log_det(x)
    size, count = shape[-1] // 2, shape[-1] - shape[-1] // 2
    output = layer.network(x[..., :size]).numpy()
    assert output.shape[-1] == 11 * count
    expected, log_slopes = np.zeros((*shape[:-1], count)), np.zeros((*shape[:-1], count))
    for index in np.ndindex(expected.shape):
        said, channel = output[index[:-1]], index[-1]
        shift, a = said[channel], 1.3 * np.tanh(said[count + channel] / 1.3)
        weights, means, scales = said[2 * count + 9 * channel : 2 * count + 9 * (channel + 1)].reshape(3, 3)
        weights, s = np.exp(weights) / np.exp(weights).sum(), np.exp(0.8 * np.tanh(scales / 0.8))
        sigma = 1 / (1 + np.exp(-(x[..., size:][index] - means - [-1, 0, 1]) / s))
        f, slope = (weights * sigma).sum(), (weights * sigma * (1 - sigma) / s).sum()
        expected[index] = np.log(f / (1 - f)) * np.exp(a) + shift
        log_slopes[index] = a + np.log(slope / f / (1 - f))
    np.testing.assert_array_equal(y[..., :size], x[..., :size])
    np.testing.assert_allclose(y[..., size:], expected, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(log_det, log_slopes.reshape(shape[0], -1).sum(axis=1), rtol=1e-10)
    assert np.abs(expected - x[..., size:]).max() > 0.3


@pytest.mark.parametrize("components", [1, 2, 8])
def test_starts_close_to_the_identity_with_components_that_differ(rng, components):
    layer = LogisticMixtureCoupling(hidden=4, components=components)
    x = np.stack([np.zeros(101), np.linspace(-5, 5, 101)], axis=1).astype("float32")
    y, log_det = (t.numpy() for t in layer.forward_and_log_det(x))
    assert np.abs(y - x).max() < (0.6 if components > 1 else 1e-5)
    assert np.abs(log_det).max() < (0.25 if components > 1 else 1e-5)
    with tf.GradientTape() as tape:
        y, log_det = layer.forward_and_log_det(x)
        loss = tf.reduce_sum(tf.sin(y)) - tf.reduce_sum(log_det)
    gradient = tape.gradient(loss, layer.network.weights[-1].value).numpy()[2:].reshape(3, components)
    assert all(len(np.unique(row)) == components for row in gradient)


def test_the_slope_of_the_start_is_what_the_docstring_says():
    layer = LogisticMixtureCoupling(hidden=4)
    log_det = layer.forward_and_log_det(np.array([[0.0, 0.0], [0.0, 50.0]], "float32"))[1]
    np.testing.assert_allclose(np.exp(log_det), [0.90, 1], atol=0.005)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_round_trip_at_any_size(rng, dtype, size):
    layer = moved(rng, (50, 4), dtype=dtype)
    x = (rng.normal(size=(50, 4)) * [1, 1, size, size]).astype(dtype)
    back = layer.inverse(layer(x))
    assert (np.abs(back - x) < (2e-5 if dtype == "float32" else 1e-13) * (1 + np.abs(x))).all()


def test_learns_two_bumps(rng):
    """x_b is at ±2 whatever x_a: an affine map of it stays bimodal, a mixture of two components does not."""
    layer = LogisticMixtureCoupling(hidden=8, components=2)
    x, loss, entropy, best_affine = trained_on_two_bumps(layer, rng)
    assert loss < entropy + 0.25 < best_affine - 1
    np.testing.assert_allclose(layer.inverse(layer(x)), x, atol=1e-4)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(rng, policy):
    layer, x = LogisticMixtureCoupling(hidden=4, dtype=policy), rng.normal(size=(2, 4, 4, 2)).astype("float32")
    y = layer(x)
    assert y.dtype == layer.compute_dtype
    back = np.asarray(tf.cast(layer.inverse(y), "float32"))
    assert np.abs(back - x).max() < 0.1
    assert {weight.dtype for weight in layer.weights} == {"float32"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"network": lambda x: x}, "Expected a `keras.layers.Layer`"),
        ({"components": 0}, "`components` must be a positive integer. Expected 1, 2, 3, … Received: 0"),
        ({"components": 2.0}, "Received: 2.0"),
        ({"bound": 0}, "Expected 0 < bound < ∞. Received: 0"),
        ({"scale_bound": float("inf")}, "Expected 0 < scale_bound < ∞. Received: inf"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        LogisticMixtureCoupling(**arguments)
    with pytest.raises(ValueError, match=r"Expected \(None, 24\) for an input of shape \(None, 2\). Received: \(None, 4\)"):
        LogisticMixtureCoupling(keras.layers.Dense(4), components=2).build((None, 5))
