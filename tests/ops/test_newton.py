import numpy as np
import pytest

from keras_auxref import ops
from tests.support import certified, gradients, residual


def test_solves_the_equation_and_keeps_zero(rng, dtype):
    w, y = certified(5, 1.4, 0.2, rng).astype(dtype), rng.normal(size=(2, 7, 5)).astype(dtype)
    y[0, 0] = 0
    x = ops.newton_inverse(y, w, steps=20).numpy()
    np.testing.assert_array_equal(x[0, 0], 0)
    assert residual(x.reshape(-1, 5)[1:], y.reshape(-1, 5)[1:], w).max() < (1e-5 if dtype == "float32" else 1e-12)


def test_differentiates_through_its_steps_to_the_implicit_gradient(rng):
    w, y, g = certified(3, 1.3, 0.1, rng), rng.normal(size=(4, 3)), rng.normal(size=(4, 3))
    unrolled = gradients(lambda y, w: ops.newton_inverse(y, w, steps=15), [y, w], g)
    for a, b in zip(unrolled, gradients(ops.inverse, [y, w], g), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-8)


def test_tiny_and_huge(rng):
    w, y = certified(3, 1.3, 0.1, rng).astype("float32"), rng.normal(size=(4, 3)).astype("float32")
    expected = ops.newton_inverse(y, w).numpy()
    for scale in np.float32([1e-30, 1e30]):
        np.testing.assert_allclose(ops.newton_inverse(scale * y, w) / scale, expected, rtol=1e-3, atol=1e-5)


def test_needs_a_step():
    with pytest.raises(ValueError, match="positive integer"):
        ops.newton_inverse(np.ones((1, 2)), np.eye(2), steps=0)
