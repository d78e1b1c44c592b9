import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import ops
from keras_auxref.ops import factors as routes
from tests.support import certified, differences, gradients, orthogonal, pairwise, relative, weighted_gradient


def _by_slogdet(x, w):
    return tf.linalg.slogdet(ops.jacobian(x, w))[1]


def _jordan(d):
    """One eigenvalue, one eigenvector: no eigenbasis at all."""
    return 2 * np.eye(d) + np.eye(d, k=1)


def _close_to_jordan(d):
    """An eigenbasis of condition about 1e6: too bad for float32, good enough for a float64 batch."""
    return _jordan(d) + np.diag(np.arange(d) * 1e-3) if d == 3 else _jordan(d) + np.diag(np.linspace(0, 1, d))


MATRICES = {
    "random": lambda d, rng: rng.normal(size=(d, d)),
    "symmetric": lambda d, rng: (lambda a: a + a.T)(rng.normal(size=(d, d))),
    "rotation": lambda d, rng: np.eye(d) - orthogonal(d, rng, determinant=(-1) ** d),
    "certified": lambda d, rng: certified(d, 1.9, 3.0, rng),
    "jordan": lambda d, rng: _jordan(d),
    "close to jordan": lambda d, rng: _close_to_jordan(d),
    "repeated": lambda d, rng: np.kron(np.eye(d // 2 + 1), [[1, -2], [2, 1]])[:d, :d] + 0.0,
}


# For larger Jordan blocks det A spans hundreds of orders of magnitude, and slogdet has no digits left to compare with.
@pytest.mark.parametrize(
    ("kind", "d", "dtype"),
    [c for c in pairwise(MATRICES, (1, 2, 3, 6, 24, 64), ("float32", "float64")) if c[0] != "jordan" or c[1] <= 6],
)
def test_value_and_gradients_against_slogdet_of_the_jacobian(rng, dtype, kind, d):
    x, w, g = rng.normal(size=(7, d)), MATRICES[kind](d, rng), rng.normal(size=7)
    expected = gradients(_by_slogdet, [x, w], g)
    computed = gradients(ops.log_det_jacobian, [x.astype(dtype), w.astype(dtype)], g)
    tolerance = 2e-4 if dtype == "float32" else 1e-8
    for a, b in zip(computed, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * (1 + np.abs(b).max()))


def test_lemma_4(rng):
    """−det(A)(1 + 2vᵀA⁻¹u/‖u‖²), as the paper writes it."""
    x, w = rng.normal(size=5), rng.normal(size=(5, 5))
    u, v = w @ x, x @ w
    a = np.eye(5) - 2 * (x @ w.T @ x) / (u @ u) * w
    expected = np.log(np.abs(-np.linalg.det(a) * (1 + 2 * v @ np.linalg.solve(a, u) / (u @ u))))
    np.testing.assert_allclose(ops.log_det_jacobian(x, w), expected, rtol=1e-12)


@pytest.mark.parametrize("w", [np.eye(3), np.eye(3) + np.eye(3) / 2, -np.eye(3)], ids=["I", "I + I/2", "-I"])
def test_repeated_eigenvalues_are_ordinary(rng, dtype, w):
    """f = −identity there: the log-determinant is 0, and its gradients are those of the formula."""
    x, g = rng.normal(size=(4, 3)), rng.normal(size=4)
    value, gx, gw = gradients(ops.log_det_jacobian, [x.astype(dtype), w.astype(dtype)], g)
    np.testing.assert_allclose(value, 0, atol=1e-6)
    expected_gx, expected_gw = differences(ops.log_det_jacobian, [x, w], g, rows=1)
    np.testing.assert_allclose(gx, expected_gx, atol=1e-5)
    np.testing.assert_allclose(gw, expected_gw, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "dtype", "expected"),
    [
        (lambda rng: certified(4, 1.5, 0.0, rng), "float64", routes.SYMMETRIC),
        (lambda rng: rng.normal(size=(4, 4)), "float32", routes.PAIRED),
        (lambda rng: _jordan(2) + np.diag([0, 1e-4]), "float32", routes.PAIRED_WIDE),
        (lambda rng: _jordan(2) + np.diag([0, 1e-7]), "float64", routes.ROWS),
        (lambda rng: _jordan(3), "float32", routes.ROWS),
    ],
)
def test_every_route_is_taken_and_right(rng, make, dtype, expected):
    w = make(rng).astype(dtype)
    assert int(ops.factorize(w).route) == expected
    x, g = rng.normal(size=(5, len(w))).astype(dtype), rng.normal(size=5)
    computed = gradients(ops.log_det_jacobian, [x, w], g)
    exact = gradients(_by_slogdet, [x.astype("float64"), w.astype("float64")], g)
    for a, b in zip(computed, exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=(1e-5 if dtype == "float32" else 1e-10) * (1 + np.abs(b).max()))


def test_zero_where_w_x_is_zero(rng):
    w = np.diag([1.0, 2.0, 0.0])
    x = np.array([[0.0, 0.0, 0.0], [0.0, 0.0, 5.0], [1.0, 2.0, 3.0]])
    value, gx, gw = gradients(ops.log_det_jacobian, [x, w], np.ones(3))
    np.testing.assert_array_equal(value[:2], 0)
    np.testing.assert_array_equal(gx[:2], 0)
    np.testing.assert_allclose(gw, gradients(ops.log_det_jacobian, [x[2:], w], np.ones(1))[2], rtol=1e-12)
    np.testing.assert_array_equal(ops.log_det_jacobian(x, np.zeros((3, 3))), 0)


def test_zero_is_judged_in_the_precision_of_the_input(rng):
    """A float32 W with ill-conditioned eigenvectors is batched in float64, where the rounding noise in W x is far from zero."""
    w = np.zeros((4, 4), "float32")
    w[:2, :2] = _jordan(2) + np.diag([0, 1e-4])
    u = orthogonal(4, rng)
    w = (u @ w @ u.T).astype("float32")
    assert int(ops.factorize(w).route) == routes.PAIRED_WIDE
    x = u[:, 3:].T.astype("float32")  # W x = 0 up to the rounding of both
    assert 0 < np.abs(w @ x[0]).max() < 1e-6
    np.testing.assert_array_equal(ops.log_det_jacobian(x, w), 0)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_lengths_do_not_matter(rng, scale):
    x, w = rng.normal(size=(6, 5)).astype("float32"), rng.normal(size=(5, 5)).astype("float32")
    expected = ops.log_det_jacobian(x, w)
    np.testing.assert_allclose(ops.log_det_jacobian(np.float32(scale) * x, w), expected, atol=1e-4)
    np.testing.assert_allclose(ops.log_det_jacobian(x, np.float32(scale) * w), expected, atol=1e-4)


def test_singular_jacobian_is_minus_infinity_or_very_small():
    """W = diag(1, 1/2): at x = e₁, c = 2 and A = diag(−1, 0)."""
    assert float(ops.log_det_jacobian(np.array([1.0, 0.0]), np.diag([1.0, 0.5]))) < -20


@pytest.mark.parametrize("kind", ["random", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("symmetric", "jordan"))])
def test_second_derivatives_match_differences_of_the_first(rng, kind):
    x, w, g = rng.normal(size=(2, 3)), MATRICES[kind](3, rng), rng.normal(size=2)
    h, k = rng.normal(size=(2, 3)), rng.normal(size=(3, 3))
    k = k + k.T if kind == "symmetric" else k

    first = weighted_gradient(ops.log_det_jacobian, [h, k])
    graph = tf.function(first)  # once traced, quick to ask again
    expected = differences(graph, [x, w, g], np.ones(()), step=1e-5)
    for function in (first, graph):
        for a, b in zip(gradients(function, [x, w, g], 1.0)[1:], expected, strict=True):
            assert relative(a, b) < 1e-5


def test_rank_one_to_four(rng):
    w = rng.normal(size=(4, 4))
    x = rng.normal(size=(2, 3, 5, 4))
    flat = ops.log_det_jacobian(x.reshape(-1, 4), w).numpy()
    assert ops.log_det_jacobian(x, w).shape == (2, 3, 5)
    np.testing.assert_allclose(np.ravel(ops.log_det_jacobian(x, w)), flat)
    assert ops.log_det_jacobian(x[0, 0, 0], w).shape == ()


def test_unknown_batch_in_a_graph(rng):
    x, w = rng.normal(size=(5, 4)), rng.normal(size=(4, 4))
    spec = [tf.TensorSpec([None, None, 4], tf.float64), tf.TensorSpec([4, 4], tf.float64)]
    function = tf.function(ops.log_det_jacobian, input_signature=spec)
    np.testing.assert_allclose(function(x[None], w)[0], ops.log_det_jacobian(x, w), rtol=1e-12)
    assert function(np.zeros((0, 2, 4)), w).shape == (0, 2)


# A symmetric W in float64 goes the way of a general one there: XLA's eigenvalues have six digits.
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("float32", "symmetric"), pytest.param("float32", "random", marks=pytest.mark.slow), ("float64", "random")],
)
def test_xla(rng, dtype, kind):
    x, w, g = rng.normal(size=(5, 4)).astype(dtype), MATRICES[kind](4, rng).astype(dtype), rng.normal(size=5).astype(dtype)
    symmetric = True if kind == "symmetric" else None

    @tf.function(jit_compile=True)
    def value_and_gradients(x, w):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = ops.log_det_jacobian(x, w, symmetric=symmetric)
        return [y, *tape.gradient(y, [x, w], tf.constant(g))]

    expected = gradients(ops.log_det_jacobian, [x.astype("float64"), w.astype("float64")], g)
    for a, b in zip(value_and_gradients(tf.constant(x), tf.constant(w)), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=(1e-4 if dtype == "float32" else 1e-10) * (1 + np.abs(b).max()))


def test_factors_can_be_reused(rng):
    w = rng.normal(size=(5, 5))
    factors = ops.factorize(w)
    for _ in range(2):
        x = rng.normal(size=(4, 5))
        np.testing.assert_allclose(ops.log_det_jacobian(x, w, factors=factors), ops.log_det_jacobian(x, w), rtol=1e-12)


def test_nan_stays_in_its_row_and_a_bad_matrix_in_a_graph_is_nan(rng):
    x, w = rng.normal(size=(3, 4)), rng.normal(size=(4, 4))
    x[1, 0] = np.nan
    value = ops.log_det_jacobian(x, w).numpy()
    assert np.isnan(value).tolist() == [False, True, False]
    bad = tf.constant(np.full((4, 4), np.inf))
    assert np.isnan(tf.function(ops.log_det_jacobian)(tf.constant(x), bad)).all()


def test_half_precision_is_computed_in_float32(rng):
    x, w = tf.constant(rng.normal(size=(3, 4)), tf.bfloat16), tf.constant(rng.normal(size=(4, 4)), tf.bfloat16)
    exact = ops.log_det_jacobian(tf.cast(x, tf.float64), tf.cast(w, tf.float64))
    value = ops.log_det_jacobian(x, w)
    assert value.dtype == tf.bfloat16
    np.testing.assert_allclose(tf.cast(value, tf.float64), exact, atol=0.05)
