import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref.flows import SplineCoupling
from keras_auxref.flows.parts.spline_coupling import OWN_RATE
from keras_auxref.ops.spline import spline, spline_of
from tests.flows.parts.two_bumps import trained_on_two_bumps


@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 4, 3)])
def test_every_entry_has_its_own_spline(rng, shape):
    """From weights and the output of the network as the docstring lays it out, one entry after the other."""
    x = rng.normal(size=shape)
    layer = SplineCoupling(hidden=4, bins=3, bound=2.0, slope_bound=1.0, dtype="float64")
    layer.build((None, *shape[1:]))
    for weight in layer.weights:
        weight.assign_add(0.5 * rng.normal(size=weight.shape))
    y, log_det = layer.forward_and_log_det(x)
    size, count = shape[-1] // 2, shape[-1] - shape[-1] // 2
    said, own = layer.network(y[..., :size]).numpy(), OWN_RATE * layer.own.numpy()
    assert said.shape[-1] == 8 * count
    assert own.shape == (8 * size,)
    moved, log_slopes = np.zeros(shape), np.zeros(shape)
    for index in np.ndindex(shape):
        *pixel, channel = index
        numbers = np.concatenate([own, said[tuple(pixel)]])[8 * channel : 8 * (channel + 1)]
        moved[index], log_slopes[index] = spline(tf.constant(x[index]), spline_of(tf.constant(numbers), 3, 2.0, 1.0), 2.0)
    np.testing.assert_allclose(y, moved, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(log_det, log_slopes.reshape(shape[0], -1).sum(axis=1), rtol=1e-10)
    assert np.abs(moved - x)[..., :size].max() > 0.02
    assert np.abs(moved - x)[..., size:].max() > 0.02


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_round_trip_whatever_the_network_says(rng, dtype, size):
    layer = SplineCoupling(keras.layers.Dense(46, dtype=dtype), dtype=dtype)
    layer.build((None, 4))
    for weight in layer.weights:
        weight.assign(size * rng.normal(size=weight.shape))
    x = rng.normal(size=(500, 4)).astype(dtype) * 3
    back = layer.inverse(layer(x)).numpy()
    assert np.abs(back - x).max() < (1e-5 if dtype == "float32" else 1e-13)


@pytest.mark.slow
def test_learns_two_bumps(rng):
    """x_b is at ±2 whatever x_a: an affine map of it stays bimodal, a spline need not."""
    _, loss, entropy, best_affine = trained_on_two_bumps(SplineCoupling(hidden=8), rng)
    assert loss < entropy + 0.35 < best_affine - 0.9


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(rng, policy):
    layer, x = SplineCoupling(hidden=4, dtype=policy), rng.normal(size=(2, 4, 4, 2)).astype("float32")
    y = layer(x)
    assert y.dtype == layer.compute_dtype
    assert np.abs(np.asarray(tf.cast(layer.inverse(y), "float32")) - x).max() < 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bins": 1}, "`bins` must be a whole number. Expected 2, 3, 4, … Received: 1"),
        ({"bins": 8.0}, "Received: 8.0"),
        ({"bound": 0}, "Expected 0 < bound < ∞. Received: 0"),
        ({"slope_bound": float("inf")}, "Expected 0 < slope_bound < ∞. Received: inf"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        SplineCoupling(**arguments)
