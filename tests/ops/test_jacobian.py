import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import ops
from tests.support import gradients, orthogonal, relative


def _by_autodiff(x, w):
    x = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        # The definition, so that neither the closed-form gradient nor the code of the package takes part.
        u = tf.matmul(x, w, transpose_b=True)
        y = x - 2 * u * tf.reduce_sum(u * x, -1, keepdims=True) / tf.reduce_sum(u * u, -1, keepdims=True)
    return tape.batch_jacobian(y, x).numpy()


@pytest.mark.parametrize("d", [1, 2, 3, 8, 33, 64])
def test_theorem_3_against_autodiff(rng, dtype, d):
    x, w = rng.normal(size=(6, d)).astype(dtype), rng.normal(size=(d, d)).astype(dtype)
    assert relative(ops.jacobian(x, w), _by_autodiff(x, w)) < (2e-4 if dtype == "float32" else 1e-12)


def test_the_papers_test_case():
    """Appendix, "Jacobian and Autograd": W and x uniform in (−1, 1), d = 4."""
    rng = np.random.default_rng(42)
    w, x = rng.uniform(-1, 1, (4, 4)).astype("float32"), rng.uniform(-1, 1, (1, 4)).astype("float32")
    np.testing.assert_allclose(ops.jacobian(x, w), _by_autodiff(x, w), atol=1e-5)


def test_is_orthogonal_for_an_orthogonal_map_and_not_in_general(rng):
    u = orthogonal(6, rng)
    x = rng.normal(size=(3, 6))
    np.testing.assert_allclose(ops.jacobian(x, np.eye(6) - u), np.broadcast_to(u, (3, 6, 6)), atol=1e-12)
    j = ops.jacobian(x, rng.normal(size=(6, 6))).numpy()
    assert np.abs(j @ j.transpose(0, 2, 1) - np.eye(6)).max() > 0.1


def test_identity_where_w_x_is_zero(rng):
    j = ops.jacobian(np.array([[0.0, 0.0], [0.0, 3.0], [1.0, 1.0]]), np.diag([2.0, 0.0])).numpy()
    np.testing.assert_array_equal(j[:2], np.broadcast_to(np.eye(2), (2, 2, 2)))
    assert np.abs(j[2] - np.eye(2)).max() > 0.5
    np.testing.assert_array_equal(ops.jacobian(rng.normal(size=3), np.zeros((3, 3))), np.eye(3))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_float32_from_tiny_to_huge(rng, scale):
    x, w = rng.normal(size=(6, 5)).astype("float32"), rng.normal(size=(5, 5)).astype("float32")
    expected = ops.jacobian(x, w)
    assert relative(ops.jacobian(np.float32(scale) * x, w), expected) < 1e-4
    assert relative(ops.jacobian(x, np.float32(scale) * w), expected) < 1e-4


def test_any_rank_and_gradients_are_finite_at_zero(rng):
    assert ops.jacobian(rng.normal(size=(2, 3, 4)), rng.normal(size=(4, 4))).shape == (2, 3, 4, 4)
    _, gx, gw = gradients(ops.jacobian, [np.zeros((2, 3)), rng.normal(size=(3, 3))], np.ones((2, 3, 3)))
    assert np.isfinite(gx).all()
    assert np.isfinite(gw).all()
