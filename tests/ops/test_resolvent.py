"""Two resolvents, the same questions; three kinds of points, the same answers."""

import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import ops
from keras_auxref.ops.factors import PAIRED, ROUTES, ROWS, SYMMETRIC
from keras_auxref.ops.point import jacobian_solve, jacobian_solve_transposed
from keras_auxref.ops.point_basis import DiagonalPoint, PairedPoint
from keras_auxref.ops.point_rows import RowPoint
from keras_auxref.ops.reflect import reflection
from keras_auxref.ops.resolvent import Paired, Rows
from tests.support import orthogonal, pairwise, relative


def _matrix(kind, d, rng):
    if kind == "symmetric":
        q = orthogonal(d, rng)
        return q * np.linspace(1, 1.9, d) @ q.T
    return np.eye(d) - orthogonal(d, rng) * 0.9


CASES = [("symmetric", SYMMETRIC), ("symmetric", PAIRED), ("symmetric", ROWS), ("general", PAIRED), ("general", ROWS)]


@pytest.mark.parametrize(("case", "d", "dtype"), pairwise(CASES, [1, 2, 5, 6], ["float32", "float64"]))
def test_resolvents(rng, dtype, case, d):
    kind, route = case
    w = _matrix(kind, d, rng).astype(dtype)
    factors = ops.factorize(w)
    normal = factors.w.numpy()
    wide = "float64" if ROUTES[route].wide else dtype
    resolvent = (Rows if route == ROWS else Paired)(factors, wide)
    y, c = rng.normal(size=(7, d)), rng.uniform(0.5, 0.9, (7, 1))
    a = np.eye(d) - c[..., None] * normal
    tolerance = 1e-4 if wide == "float32" else 1e-10
    assert relative(resolvent.solve(c.astype(wide), y.astype(wide)), np.linalg.solve(a, y[..., None])[..., 0]) < tolerance
    x = np.linalg.solve(a, y[..., None])[..., 0]
    u = x @ normal.T
    derivative = np.linalg.solve(a, u[..., None])[..., 0]
    secular = resolvent.secular(c.astype(wide), resolvent.coordinates(y.astype(wide)))
    for computed, expected in (
        (secular.x_squared, np.sum(x * x, -1)),
        (secular.u_squared, np.sum(u * u, -1)),
        (secular.slope, np.sum(x * derivative, -1)),
        (secular.psi, 2 * np.sum(u * x, -1) - c[:, 0] * np.sum(u * u, -1)),
    ):
        assert relative(computed[:, 0], expected) < 10 * tolerance


@pytest.mark.parametrize(("kind", "route"), CASES)
@pytest.mark.parametrize("d", [2, 5, 6])
def test_points(rng, kind, route, d):
    """Every question about N against NumPy."""
    w = _matrix(kind, d, rng)
    factors = ops.factorize(w)
    w = factors.w.numpy()
    x, z, g = rng.normal(size=(6, d)), rng.normal(size=(6, d)), rng.normal(size=(6, 1))
    x /= np.abs(x).max(-1, keepdims=True)
    forward = reflection(x, w)
    if route == ROWS:
        point = RowPoint(tf.constant(x), tf.ones((6, 1), "bool"), tf.constant(w))
    else:
        point = (DiagonalPoint if route == SYMMETRIC else PairedPoint)(forward, tf.constant(w), factors, most=1e6)
        assert not np.any(point.hard)
    u, v = x @ w.T, x @ w
    beta = 2 / np.sum(u * u, -1)[:, None, None]
    c = beta * np.sum(u * x, -1)[:, None, None]
    n = np.eye(d) - c * w + beta * u[:, :, None] * v[:, None, :]
    inverse = np.linalg.inv(n)
    j = np.asarray(ops.jacobian(x, w))

    def apply(matrices, rows):
        return np.einsum("nij,nj->ni", matrices, rows)

    quantities = point.quantities()
    transposed = inverse.transpose(0, 2, 1)
    for computed, expected in (
        (point.log_abs_det[:, 0], np.linalg.slogdet(n)[1]),
        (quantities.p, apply(inverse, u)),
        (quantities.t, apply(transposed, v)),
        (quantities.wp, apply(inverse, u) @ w.T),
        (quantities.q[:, 0], np.sum(v * apply(inverse, u), -1)),
        (quantities.trace[:, 0], np.einsum("nij,ji->n", inverse, w)),
        (point.solve(z), apply(inverse, z)),
        (point.solve_transposed(z), apply(transposed, z)),
        (point.pull_back(g), np.sum(g[..., None] * transposed, axis=0)),
        (jacobian_solve(point, z), apply(np.linalg.inv(j), z)),
        (jacobian_solve_transposed(point, z), apply(np.linalg.inv(j).transpose(0, 2, 1), z)),
    ):
        assert relative(computed, expected) < 1e-9
