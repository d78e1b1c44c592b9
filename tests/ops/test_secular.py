"""The scalar equation ‖(I − cW)⁻¹y‖ = ‖y‖ against roots that are known, or found by looking everywhere."""

import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import ops
from keras_auxref.ops.factors import PAIRED, ROUTES, ROWS, SYMMETRIC
from keras_auxref.ops.reflect import central_coefficient
from keras_auxref.ops.resolvent import Paired, Rows
from keras_auxref.ops.secular import solve_secular
from tests.support import orthogonal

WAYS = [("symmetric", SYMMETRIC), ("symmetric", PAIRED), ("general", PAIRED), ("general", ROWS)]


def _certified(kind, d, rng):
    q, k = orthogonal(d, rng), rng.normal(size=(d, d))
    return np.linalg.inv(q * np.linspace(1, 1.9, d) @ q.T + (0.5 * (k - k.T) if kind == "general" else 0))


def _search(w, y, route, dtype, null=None, start=None, **options):
    """The roots for the normal W of `factorize`, and that W."""
    factors = ops.factorize(w)
    dtype = "float64" if ROUTES[route].wide else dtype
    normal, rows = factors.w.numpy(), tf.constant(y, dtype)
    null = np.zeros((len(y), 1), bool) if null is None else null
    resolvent = (Rows if route == ROWS else Paired)(factors, dtype)
    start = central_coefficient(factors.w) if start is None else tf.constant(start, tf.float64)
    wy = rows @ tf.constant(normal.T, dtype)
    options = {"max_steps": 100, **options}
    return solve_secular(rows, wy, tf.constant(null), resolvent, factors.bracket, start, **options), normal


def _solve(normal, c, y):
    return np.linalg.solve(np.eye(len(normal)) - c[..., None] * normal, y[..., None])[..., 0]


@pytest.mark.parametrize(("kind", "route"), WAYS)
@pytest.mark.parametrize("d", [1, 3, 8])
def test_the_root_is_the_c_of_the_preimage(rng, dtype, kind, route, d):
    w = _certified(kind, d, rng).astype(dtype)
    x = rng.normal(size=(20, d))
    normal = ops.factorize(w).w.numpy()
    u = x @ normal.T
    c = 2 * np.sum(u * x, -1, keepdims=True) / np.sum(u * u, -1, keepdims=True)
    y = x - c * u
    root, _ = _search(w, y, route, dtype)
    assert np.asarray(root.done).all()
    assert int(np.max(root.steps)) <= 12
    np.testing.assert_allclose(root.c, c, rtol=1e-4 if root.c.dtype == "float32" else 1e-9)


@pytest.mark.parametrize("nearest", [False, True])
def test_a_root_without_certificate_is_one_of_those_that_there_are(rng, nearest):
    """With several roots: each that is returned has the residual of a root, and `nearest` returns the one about its start."""
    d = 6
    w = np.eye(d) - orthogonal(d, rng) + 0.4 * rng.normal(size=(d, d))
    y = rng.normal(size=(30, d))
    root, normal = _search(w, y, PAIRED, "float64", nearest=nearest)
    c, done = np.asarray(root.c), np.asarray(root.done)
    assert done.all()
    norms = np.linalg.norm(_solve(normal, c, y), axis=-1) / np.linalg.norm(y, axis=-1)
    np.testing.assert_allclose(norms, 1, atol=1e-8)
    assert (np.abs(c) > 1e-3).all()  # c = 0 solves the equation too, and is no preimage
    if not nearest:
        return
    again, _ = _search(w, y[:1], PAIRED, "float64", nearest=True, start=c[0, 0] * 1.001)
    np.testing.assert_allclose(again.c[0, 0], c[0, 0], rtol=1e-9)


@pytest.mark.parametrize(("kind", "route"), WAYS)
def test_rows_without_a_root_are_done_before_the_start(rng, kind, route):
    y = rng.normal(size=(4, 3))
    y[1] = np.nan
    null = np.array([[False], [False], [True], [False]])
    root, _ = _search(_certified(kind, 3, rng), y, route, "float64", null=null)
    assert np.asarray(root.done).all()
    assert np.asarray(root.c)[[1, 2], 0].tolist() == [0, 0]
    assert np.asarray(root.steps)[[1, 2], 0].tolist() == [0, 0]
    assert (np.asarray(root.steps)[[0, 3]] > 0).all()


def test_ends_where_it_is_told_to(rng):
    w, y = _certified("general", 8, rng), rng.normal(size=(64, 8))
    whole, _ = _search(w, y, PAIRED, "float64")
    few, _ = _search(w, y, PAIRED, "float64", leave=0.5)
    one, _ = _search(w, y, PAIRED, "float64", max_steps=1)
    assert np.asarray(whole.done).all()
    assert 0.5 <= np.mean(few.done) <= 1
    assert int(np.max(few.steps)) <= int(np.max(whole.steps))
    assert int(np.max(one.steps)) == 1
