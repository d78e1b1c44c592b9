"""Amortised reflections against matrices, one vector at a time."""

import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import ops
from tests.support import jacobians, relative


def matrix(v):
    """H(v_T)…H(v₁) for v of shape (T, d)."""
    product = np.eye(v.shape[1])
    for row in v:
        if row.any():
            product = (np.eye(len(row)) - 2 * np.outer(row, row) / (row @ row)) @ product
    return product


@pytest.mark.parametrize(("n", "steps", "d"), [(5, 0, 3), (5, 1, 3), (5, 4, 3), (1, 2, 3), (4, 3, 1), (3, 8, 12)])
def test_every_vector_has_directions_of_its_own(rng, dtype, n, steps, d):
    z, v = rng.normal(size=(n, d)), rng.normal(size=(n, steps, d))
    expected = np.array([matrix(v[i]) @ z[i] for i in range(n)])
    y = ops.householder_flow(z.astype(dtype), v.astype(dtype))
    assert y.dtype == dtype
    assert relative(y, expected) < (1e-5 if dtype == "float32" else 1e-13)
    back = ops.householder_flow(y, np.flip(v, -2).astype(dtype))
    assert relative(back, z) < (1e-5 if dtype == "float32" else 1e-13)


def test_the_log_determinant_is_zero(rng):
    z, v = rng.normal(size=(4, 5)), rng.normal(size=(4, 3, 5))
    found = jacobians(lambda z: ops.householder_flow(z, v), z)
    np.testing.assert_allclose(np.linalg.slogdet(found)[1], 0, atol=1e-8)


def test_a_direction_of_zero_is_the_identity_and_has_no_gradient(rng):
    z, v = tf.constant(rng.normal(size=(2, 3))), rng.normal(size=(2, 2, 3))
    v[0] = 0
    v = tf.constant(v)
    with tf.GradientTape() as tape:
        tape.watch([z, v])
        y = ops.householder_flow(z, v)
        loss = tf.reduce_sum(tf.sin(y))
    to_z, to_v = tape.gradient(loss, [z, v])
    np.testing.assert_array_equal(y[0], z[0])
    np.testing.assert_array_equal(to_v[0], 0)
    np.testing.assert_allclose(to_z[0], np.cos(z[0]))
    assert np.abs(to_v[1]).max() > 0


def test_samples_broadcast_against_the_directions_of_an_image(rng):
    z, v = rng.normal(size=(7, 2, 3)), rng.normal(size=(2, 4, 3))
    y = ops.householder_flow(z, v)
    for s in range(7):
        np.testing.assert_allclose(y[s], ops.householder_flow(z[s], v), atol=1e-14)


def test_half_precision_is_computed_in_float32(rng):
    z, v = rng.normal(size=(3, 4)), rng.normal(size=(3, 5, 4))
    y = ops.householder_flow(tf.cast(z, "bfloat16"), tf.cast(v, "float32"))
    assert y.dtype == tf.bfloat16
    assert relative(tf.cast(y, tf.float64), ops.householder_flow(z, v)) < 0.02


@pytest.mark.parametrize(
    ("z", "v", "message"),
    [
        (np.ones((2, 3)), np.ones((2, 1, 4)), r"`v` does not fit `z`. Expected shape \(\.\.\., T, 3\). Received: \(2, 1, 4\)"),
        (np.ones((2, 3)), np.ones(3), r"Expected shape \(\.\.\., T, 3\). Received: \(3,\)"),
        (np.ones(()), np.ones((1, 3)), "at least one axis"),
        (np.ones((2, 3)), np.ones((2, 1, 3), "float32"), "Expected float64. Received: float32"),
        (np.ones((2, 3)), np.ones((2, 1, 3), "int32"), "floating-point"),
    ],
)
def test_bad_input(z, v, message):
    with pytest.raises(ValueError, match=message):
        ops.householder_flow(z, v)
