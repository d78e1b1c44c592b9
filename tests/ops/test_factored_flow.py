"""Amortised auxiliary reflections against their definition, and their determinants against differences."""

import numpy as np
import pytest

from keras_auxref import ops
from tests.support import gradients, jacobians, relative


def reflection(v):
    return np.eye(len(v)) - 2 * np.outer(v, v) / (v @ v)


def by_hand(z, v, eigenvalues):
    """−H(v) H(Wz) z with W = H(v) diag(λ) H(v), one step and one vector after another."""
    z = z.copy()
    for i in range(len(z)):
        for direction, scales in zip(v[i], eigenvalues[i], strict=True):
            h = reflection(direction) if direction.any() else np.eye(len(direction))
            w = h @ np.diag(scales) @ h
            z[i] = -h @ reflection(w @ z[i]) @ z[i]
    return z


def parameters(rng, n, steps, d, dtype="float64"):
    values = rng.normal(size=(n, d)), rng.normal(size=(n, steps, d)), 3 * 1.9 ** rng.uniform(size=(n, steps, d))
    return tuple(value.astype(dtype) for value in values)


SIZES = [(5, 0, 3), (5, 1, 3), (5, 4, 3), (1, 2, 3), (4, 3, 1), (3, 8, 12)]


@pytest.mark.parametrize(("n", "steps", "d"), SIZES)
def test_value_determinant_and_inverse(rng, dtype, n, steps, d):
    z, v, eigenvalues = parameters(rng, n, steps, d)
    narrow = [t.astype(dtype) for t in (z, v, eigenvalues)]
    y, log_det = ops.factored_flow_and_log_det(*narrow)
    assert (y.dtype, log_det.dtype, log_det.shape) == (dtype, dtype, (n,))
    tolerance = 3e-5 if dtype == "float32" else 1e-12
    assert relative(y, by_hand(z, v, eigenvalues)) < tolerance
    np.testing.assert_allclose(ops.factored_flow(*narrow), y, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(z, axis=-1), rtol=1e-5)
    expected = np.linalg.slogdet(jacobians(lambda z: ops.factored_flow(z, v, eigenvalues), z))[1]
    np.testing.assert_allclose(log_det, expected, atol=1e-3 if dtype == "float32" else 1e-7)
    assert relative(ops.factored_flow_inverse(y, *narrow[1:]), z) < 10 * tolerance


def test_with_equal_eigenvalues_it_is_the_householder_flow(rng):
    z, v, _ = parameters(rng, 4, 3, 5)
    y, log_det = ops.factored_flow_and_log_det(z, v, np.full((4, 3, 5), 7.0))
    np.testing.assert_allclose(y, ops.householder_flow(z, v), atol=1e-13)
    np.testing.assert_allclose(log_det, 0, atol=1e-13)


def test_the_eigenvalues_of_one_vector_do_not_touch_another(rng):
    z, v, eigenvalues = parameters(rng, 3, 1, 4)
    far = eigenvalues * np.array([1e-20, 1, 1e20])[:, None, None]  # only ratios within a vector matter
    far[2, 0, 0] *= 3  # κ > 2: no inverse for the last vector
    y = ops.factored_flow(z, v, eigenvalues)
    np.testing.assert_allclose(ops.factored_flow(z, v, far)[:2], y[:2], rtol=1e-10)
    back = ops.factored_flow_inverse(y, v, far).numpy()
    np.testing.assert_allclose(back[:2], z[:2], rtol=1e-9)
    assert np.isnan(back[2]).all()


def test_zero_directions_and_zero_vectors(rng):
    z, v, eigenvalues = parameters(rng, 3, 2, 4)
    v[0], z[1] = 0, 0
    y, log_det = ops.factored_flow_and_log_det(z, v, eigenvalues)
    np.testing.assert_allclose(y[0], by_hand(z[:1], v[:1], eigenvalues[:1])[0])
    np.testing.assert_array_equal(y[1], 0)
    assert log_det[1] == 0
    for function in (ops.factored_flow, ops.factored_flow_inverse):
        found = gradients(function, (z, v, eigenvalues), np.ones_like(z))
        assert all(np.isfinite(g).all() for g in found)


@pytest.mark.parametrize("function", [ops.factored_flow_inverse, lambda *a: ops.factored_flow_and_log_det(*a)[1]])
def test_gradients_are_those_of_differences(rng, function):
    arguments = parameters(rng, 3, 2, 4)
    value = function(*arguments)
    cotangent = rng.normal(size=value.shape)
    found = gradients(function, arguments, cotangent)[1:]
    directions = [rng.normal(size=a.shape) for a in arguments]
    slope = sum(np.sum(g * d) for g, d in zip(found, directions, strict=True))
    step = 1e-6
    sides = [
        np.sum(cotangent * function(*(a + sign * step * d for a, d in zip(arguments, directions, strict=True))))
        for sign in (1, -1)
    ]
    assert slope == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-6)


def test_samples_broadcast_against_the_parameters_of_an_image(rng):
    z, v, eigenvalues = parameters(rng, 2, 3, 4)
    several = np.stack([z, 2 * z, -z])
    y, log_det = ops.factored_flow_and_log_det(several, v, eigenvalues)
    one, expected = ops.factored_flow_and_log_det(z, v, eigenvalues)
    np.testing.assert_allclose(y, np.stack([one, 2 * one, -one]), atol=1e-12)
    np.testing.assert_allclose(log_det, np.stack([expected] * 3), atol=1e-12)
    np.testing.assert_allclose(ops.factored_flow_inverse(y, v, eigenvalues), several, atol=1e-10)


def test_bad_input():
    with pytest.raises(ValueError, match=r"`eigenvalues` does not fit `z`. Expected shape \(\.\.\., 2, 3\). Received: \(1, 3\)"):
        ops.factored_flow(np.ones((2, 3)), np.ones((2, 3)), np.ones((1, 3)))
