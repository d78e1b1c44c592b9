"""One factorisation of W: it gives W back, says which way is accurate enough, and proves only what holds."""

import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import ops
from keras_auxref.ops.factors import PAIRED, PAIRED_WIDE, ROUTES, ROWS, SYMMETRIC, dispatch, factors_of, routes_of
from tests.support import orthogonal, pairwise


def _similar(d, rng, spread):
    """A matrix with real eigenvalues and eigenvectors of condition `spread`."""
    basis = orthogonal(d, rng) * np.geomspace(1, spread, d) @ orthogonal(d, rng)
    return basis @ np.diag(np.linspace(1, 2, d)) @ np.linalg.inv(basis)


def _symmetric(d, rng):
    q = orthogonal(d, rng)
    return q * np.linspace(-1, 2, d) @ q.T


def _normal(d, rng):
    """I − Q for a rotation Q; a reflection of the plane would be symmetric."""
    q = orthogonal(d, rng)
    q[:, 0] *= np.linalg.det(q)
    return np.eye(d) - q


KINDS = {
    "symmetric": (_symmetric, SYMMETRIC),
    "repeated": (lambda d, rng: np.eye(d), SYMMETRIC),
    "normal": (_normal, PAIRED),
    "real": (lambda d, rng: _similar(d, rng, 1.5), PAIRED),
    "random": (lambda d, rng: rng.normal(size=(d, d)), None),
}


def _product(factors):
    """B M B⁻¹ in NumPy, and B⁻¹B."""
    a, b, right, left = (np.asarray(t) for t in (factors.a, factors.b, factors.right, factors.left))
    m = np.block([[np.diag(a[0]), np.diag(b)], [-np.diag(b), np.diag(a[1])]])
    return right.T @ m @ left, right.T @ left


@pytest.mark.parametrize(("kind", "d", "size", "dtype"), pairwise(KINDS, [2, 5, 8], [1.0, 1e-30, 3e20], ["float32", "float64"]))
def test_gives_w_back(rng, dtype, kind, d, size):
    make, route = KINDS[kind]
    w = (size * make(d, rng)).astype(dtype)
    factors = ops.factorize(w)
    scale = float(factors.scale)
    assert np.log2(scale) == round(np.log2(scale))
    assert 0.5 <= np.abs(w).max() / scale <= 2
    product, identity = _product(factors)
    exact = w.astype("float64") / scale
    # A W that is symmetric to the rounding of its dtype is taken for symmetric.
    tolerance = 1e-6 if factors.route == SYMMETRIC and dtype == "float32" else 1e-10
    assert np.abs(product - exact).max() < tolerance
    assert np.abs(identity - np.eye(d)).max() < 1e-9
    if route is not None:
        assert factors.route == route


def test_one_dimension(dtype):
    factors = ops.factorize(np.array([[-3.0]], dtype))
    assert factors.route == SYMMETRIC
    assert _product(factors)[0] * float(factors.scale) == pytest.approx(-3)


@pytest.mark.parametrize(
    ("spread", "dtype", "route"),
    [(1.5, "float32", PAIRED), (1e4, "float32", PAIRED_WIDE), (1e4, "float64", PAIRED), (1e8, "float64", ROWS)],
)
def test_the_way_follows_the_condition_of_the_basis(rng, spread, dtype, route):
    assert ops.factorize(_similar(6, rng, spread).astype(dtype)).route == route


def test_a_defective_matrix_has_no_basis(dtype):
    assert ops.factorize((2 * np.eye(4) + np.eye(4, k=1)).astype(dtype)).route == ROWS


@pytest.mark.parametrize(("kappa", "certified"), [(1.9, True), (2.1, False)])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("skew", [0.0, 0.7])
def test_the_bracket_has_the_extreme_eigenvalues_of_the_symmetric_part(rng, kappa, certified, sign, skew):
    q, k = orthogonal(6, rng), rng.normal(size=(6, 6))
    eigenvalues = sign * np.linspace(1, kappa, 6)
    factors = ops.factorize(np.linalg.inv(q * eigenvalues @ q.T + skew * (k - k.T)))
    bounds = 2 * np.sort(eigenvalues)[[0, -1]] * float(factors.scale)  # of W/scale
    found = np.array([float(factors.bracket.low), float(factors.bracket.high)])
    np.testing.assert_allclose(found, bounds, rtol=1e-9)
    assert found[0] <= bounds[0]
    assert found[1] >= bounds[1]
    assert bool(factors.bracket.certified) == certified


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_nothing_is_proven_of_what_has_no_inverse(value):
    factors = factors_of(tf.fill((3, 3), tf.constant(value, tf.float64)), None, bracket=True)
    assert not bool(factors.bracket.certified)
    assert np.isnan(float(factors.scale)) == (not np.isfinite(value))
    assert np.isfinite(factors.w).all()


@pytest.mark.parametrize("kind", ["symmetric", "normal", "random"])
def test_dispatch_takes_the_way_that_eager_code_knows(rng, kind):
    w = KINDS[kind][0](5, rng)
    expected = ops.factorize(w)
    possible = (SYMMETRIC, PAIRED, ROWS)

    def name(route):
        return tf.constant(route.basis)

    @tf.function
    def in_a_graph(w):
        factors = factors_of(w, None)
        assert routes_of(factors, w, None) == possible
        assert routes_of(expected, w, None) == (int(expected.route),)
        return dispatch(factors.route, possible, name)

    assert in_a_graph(w).numpy() == ROUTES[int(expected.route)].basis.encode()
