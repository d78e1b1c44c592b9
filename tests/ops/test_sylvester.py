"""Sylvester flows against brute force, and their inverse where it is hardest."""

import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import ops
from tests.support import assert_agree, gradients, jacobians, relative


def parameters(rng, n, d, m, dtype="float64", identity=False):
    """z, R, R̃, b, Q: with noise below the diagonals, which has to be ignored."""
    r, r_tilde = rng.normal(size=(2, n, m, m))
    i = np.arange(m)
    r[:, i, i], r_tilde[:, i, i] = np.tanh(rng.normal(size=(2, n, m)))
    q = None if identity else np.linalg.qr(rng.normal(size=(n, d, m)))[0]
    values = rng.normal(size=(n, d)), r, r_tilde, rng.normal(size=(n, m)), q
    return tuple(None if value is None else value.astype(dtype) for value in values)


def by_hand(z, r, r_tilde, b, q):
    q = np.eye(z.shape[1])[None].repeat(len(z), 0) if q is None else q
    return np.array([z[i] + q[i] @ np.triu(r[i]) @ np.tanh(np.triu(r_tilde[i]) @ q[i].T @ z[i] + b[i]) for i in range(len(z))])


@pytest.mark.parametrize(
    ("n", "d", "m", "identity"), [(4, 5, 5, True), (4, 5, 5, False), (4, 5, 2, False), (1, 3, 1, False), (3, 1, 1, True)]
)
def test_value_determinant_and_inverse(rng, dtype, n, d, m, identity):
    z, *rest = parameters(rng, n, d, m, identity=identity)
    narrow = [None if t is None else t.astype(dtype) for t in (z, *rest)]
    y, log_det = ops.sylvester_and_log_det(*narrow)
    assert (y.dtype, log_det.dtype, log_det.shape) == (dtype, dtype, (n,))
    tolerance = 1e-5 if dtype == "float32" else 1e-13
    assert relative(y, by_hand(z, *rest)) < tolerance
    assert_agree(ops.sylvester(*narrow), y)
    sign, expected = np.linalg.slogdet(jacobians(lambda z: ops.sylvester(z, *rest), z))
    np.testing.assert_array_equal(sign, 1)
    np.testing.assert_allclose(log_det, expected, atol=1e-4 if dtype == "float32" else 1e-8)
    back = ops.sylvester_inverse(y, *narrow[1:])
    assert back.dtype == dtype
    assert relative(back, z) < 100 * tolerance


@pytest.mark.parametrize("s", [-0.9999, -0.5, 0.0, 0.5, 1.0, 50.0])
def test_the_scalar_equation_of_the_inverse(dtype, s):
    """z + s tanh(z), with roots near zero where the slope is nearly zero, and with large ones."""
    sizes = np.concatenate([[0.0], 10.0 ** np.linspace(-9, 4, 40)])
    z = np.concatenate([-sizes, sizes])[:, None].astype(dtype)
    r, one, zero = (np.array(value, dtype) for value in ([[s]], [[1.0]], [0.0]))
    back = ops.sylvester_inverse(ops.sylvester(z, r, one, zero), r, one, zero)
    # What rounding of z′ alone makes of z: the slope is at least 1 + s.
    rounding = 8 * np.finfo(dtype).eps * (np.abs(z) + np.abs(s * np.tanh(z)))
    assert np.all(np.abs(back - z) <= rounding / min(1, 1 + s) + 1e-30)


@pytest.mark.parametrize("function", [ops.sylvester_inverse, lambda *a: ops.sylvester_and_log_det(*a)[1]])
def test_gradients_are_those_of_differences(rng, function):
    arguments = parameters(rng, 3, 4, 3)
    value = function(*arguments)
    cotangent = rng.normal(size=value.shape)
    found = gradients(function, arguments, cotangent)[1:]
    # Not along Q, which the formula is only right for while its columns are orthogonal.
    directions = [rng.normal(size=a.shape) for a in arguments[:-1]] + [0 * arguments[-1]]
    slope = sum(np.sum(g * d) for g, d in zip(found, directions, strict=True))
    step = 1e-6
    sides = [
        np.sum(cotangent * function(*(a + sign * step * d for a, d in zip(arguments, directions, strict=True))))
        for sign in (1, -1)
    ]
    assert slope == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-6)


def test_columns_of_zero_are_the_identity(rng):
    z, r, r_tilde, b, q = parameters(rng, 2, 4, 3)
    q[0] = 0
    y, log_det = ops.sylvester_and_log_det(z, r, r_tilde, b, q)
    np.testing.assert_array_equal(y[0], z[0])
    assert log_det[0] == 0
    assert log_det[1] != 0
    np.testing.assert_allclose(ops.sylvester_inverse(y, r, r_tilde, b, q), z, atol=1e-12)


def test_samples_broadcast_against_the_parameters_of_an_image(rng):
    z, *rest = parameters(rng, 2, 4, 3)
    several = np.stack([z, z + 1, -z])
    y, log_det = ops.sylvester_and_log_det(several, *rest)
    for s in range(3):
        one, expected = ops.sylvester_and_log_det(several[s], *rest)
        np.testing.assert_allclose(y[s], one, atol=1e-13)
        np.testing.assert_allclose(log_det[s], expected, atol=1e-13)
    np.testing.assert_allclose(ops.sylvester_inverse(y, *rest), several, atol=1e-11)


@pytest.mark.parametrize(("d", "m"), [(1, 1), (4, 4), (6, 2)])
def test_orthonormal_columns_are_the_polar_factor(rng, dtype, d, m):
    a = rng.normal(size=(3, d, m)) * np.array([1e-15, 1, 1e15])[:, None, None]
    q = ops.orthonormal_columns(a.astype(dtype))
    u, _, vt = np.linalg.svd(a, full_matrices=False)
    assert q.dtype == dtype
    np.testing.assert_allclose(q, u @ vt, atol=2e-5 if dtype == "float32" else 1e-12)


def test_dependent_columns_give_zeros_and_never_a_wrong_determinant(rng):
    a = rng.normal(size=(4, 3, 2))
    a[0], a[1, :, 1] = 0, 2 * a[1, :, 0]
    a[2, 0, 0] = np.nan
    tensor = tf.constant(a)
    with tf.GradientTape() as tape:
        tape.watch(tensor)
        q = ops.orthonormal_columns(tensor)
    np.testing.assert_array_equal(q[:2], 0)
    assert np.isnan(q[2]).all()
    np.testing.assert_allclose(q[3].numpy().T @ q[3].numpy(), np.eye(2), atol=1e-12)
    gradient = tape.gradient(q, tensor)
    assert np.isfinite(gradient.numpy()[[0, 1, 3]]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": np.ones((2, 3, 2))}, r"`r` does not fit `z`. Expected shape \(\.\.\., 3, 3\). Received: \(2, 3, 2\)"),
        ({"b": np.ones(())}, "`b` must have at least one axis"),
        ({"q": np.ones((5, 3))}, r"`q` does not fit `z`. Expected shape \(\.\.\., 4, 3\). Received: \(5, 3\)"),
        ({"q": None}, r"`b` does not fit `z`. Expected shape \(\.\.\., 4\). Received: \(2, 3\)"),
        ({"r_tilde": np.ones((2, 3, 3), "float32")}, "Expected float64. Received: float32"),
    ],
)
def test_bad_input(rng, change, message):
    arguments = dict(zip(("z", "r", "r_tilde", "b", "q"), parameters(rng, 2, 4, 3), strict=True))
    with pytest.raises(ValueError, match=message):
        ops.sylvester(**{**arguments, **change})


@pytest.mark.parametrize(
    ("a", "steps", "message"),
    [(np.ones((2, 3)), 4, r"M ≤ d. Received: \(2, 3\)"), (np.ones(3), 4, "M ≤ d"), (np.ones((3, 2)), 0, "positive integer")],
)
def test_bad_columns(a, steps, message):
    with pytest.raises(ValueError, match=message):
        ops.orthonormal_columns(a, steps)
