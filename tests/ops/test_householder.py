import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import ops
from tests.support import differences, gradients, relative


def test_is_the_matrix_of_the_definition(rng, dtype):
    v, x = rng.normal(size=(5, 7)), rng.normal(size=(5, 7))
    expected = [x_ - 2 * v_ * (v_ @ x_) / (v_ @ v_) for v_, x_ in zip(v, x, strict=True)]
    assert relative(ops.householder(v.astype(dtype), x.astype(dtype)), expected) < (1e-6 if dtype == "float32" else 1e-14)


def test_broadcasts_and_is_an_involution(rng):
    v, x = rng.normal(size=7), rng.normal(size=(2, 3, 7))
    once = ops.householder(v, x)
    assert once.shape == (2, 3, 7)
    assert relative(ops.householder(v, once), x) < 1e-14


def test_zero_direction_is_the_identity_with_finite_gradients(rng):
    x = rng.normal(size=(2, 4))
    v = np.array([[0.0] * 4, [1.0, 2.0, 3.0, 4.0]])
    value, gv, gx = gradients(ops.householder, [v, x], np.ones((2, 4)))
    np.testing.assert_array_equal(value[0], x[0])
    np.testing.assert_array_equal(gx[0], np.ones(4))
    np.testing.assert_array_equal(gv[0], np.zeros(4))
    assert np.isfinite(gv).all()


def test_gradients_match_finite_differences(rng):
    v, x, g = rng.normal(size=(3, 4)), rng.normal(size=(3, 4)), rng.normal(size=(3, 4))
    for computed, expected in zip(
        gradients(ops.householder, [v, x], g)[1:], differences(ops.householder, [v, x], g), strict=True
    ):
        assert relative(computed, expected) < 1e-8


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
def test_length_of_the_direction_does_not_matter(rng, scale):
    v, x = rng.normal(size=(5, 7)).astype("float32"), rng.normal(size=(5, 7)).astype("float32")
    assert relative(ops.householder(np.float32(scale) * v, x), ops.householder(v, x)) < 1e-6


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_reduces_in_float32(rng, dtype):
    v, x = (tf.constant(100 * rng.normal(size=(5, 64)), dtype) for _ in range(2))
    y = ops.householder(v, x)
    assert y.dtype == dtype
    exact = ops.householder(tf.cast(v, "float64"), tf.cast(x, "float64"))
    assert relative(tf.cast(y, "float64"), exact) < (1e-3 if dtype == "float16" else 1e-2)


@pytest.mark.parametrize(
    ("v", "x", "message"),
    [
        (np.ones(3), np.ones(4), r"Expected shape \(\.\.\., 4\).*Received: v \(3,\)"),
        (np.ones(3, int), np.ones(3), "floating-point dtype.*Received: int64"),
        (np.float64(1), np.ones(3), "at least one axis"),
    ],
)
def test_bad_input(v, x, message):
    with pytest.raises(ValueError, match=message):
        ops.householder(v, x)
