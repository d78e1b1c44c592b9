import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import ops
from keras_auxref.ops import factors as routes
from tests.support import certified, differences, gradients, orthogonal, quick, reflect, relative, residual, weighted_gradient

LIMIT = {"float32": 1e-5, "float64": 1e-12}


# Every pair of values meets at least once: the five sizes run through the square of conditions and skew norms.
CERTIFIED = [
    ((1, 2, 3, 8, 48)[(i + 2 * j + k) % 5], (1.0, 1.5, 1.9, 1.999)[i], (0, 1, 10, 100)[j], ("float32", "float64")[k])
    for i in range(4)
    for j in range(4)
    for k in range(2)
]


@pytest.mark.parametrize(("d", "condition", "skew", "dtype"), CERTIFIED)
def test_certified_matrices_converge_from_anywhere(rng, dtype, d, condition, skew):
    """Few steps, small residuals, and the x that f came from: it is the only one."""
    w = certified(d, condition, skew, rng).astype(dtype)
    y = rng.normal(size=(200, d)).astype(dtype)
    result = ops.inverse_with_info(y, w)
    assert bool(result.certified)
    assert residual(result.x, y, w).max() < LIMIT[dtype]
    assert result.steps.numpy().max() <= 13
    assert result.steps.numpy().mean() <= (6 if skew or condition < 1.99 else 13)  # a symmetric W takes a fixed number
    np.testing.assert_allclose(result.residual.numpy(), residual(result.x, y, w), atol=LIMIT[dtype] / 2)


@pytest.mark.parametrize("skew", [0, 1])
def test_next_to_the_bound_it_takes_more_steps_and_still_arrives(rng, skew):
    w = certified(2, 1.99999, skew, rng)
    y = rng.normal(size=(2000, 2))
    result = ops.inverse_with_info(y, w)
    assert bool(result.certified)
    assert residual(result.x, y, w).max() < 1e-12
    assert result.steps.numpy().max() <= 30


@pytest.mark.parametrize("d", [2, 5, 24])
def test_undoes_the_forward_map(rng, dtype, d):
    w, x = certified(d, 1.8, 2.0, rng).astype(dtype), rng.normal(size=(50, d)).astype(dtype)
    assert relative(ops.inverse(ops.reflect(x, w), w), x) < (1e-4 if dtype == "float32" else 1e-11)


def test_the_papers_test_case(dtype):
    """Appendix, "Inverse using Newtons Method": W = I + VVᵀ/(2σmax), and the code's own, twice as far from I."""
    rng = np.random.default_rng(42)
    v, x = rng.uniform(size=(4, 4)), rng.uniform(size=(1, 4)).astype(dtype)
    gram = v @ v.T
    for bound in (0.5, 0.999):
        w = (np.eye(4) + bound * gram / np.linalg.svd(gram)[1].max()).astype(dtype)
        y = ops.reflect(x, w)
        np.testing.assert_allclose(ops.inverse(tf.identity(y), w), x, atol=2e-6)
        np.testing.assert_allclose(ops.newton_inverse(y, w), x, atol=1e-5)


def test_agrees_with_the_papers_newton_method(rng):
    w, y = certified(6, 1.4, 0.3, rng), rng.normal(size=(30, 6))
    assert relative(ops.inverse(y, w), ops.newton_inverse(y, w, steps=30)) < 1e-11


@pytest.mark.parametrize("d", [2, 3, 12])
@pytest.mark.parametrize("determinant", [1, -1])
def test_orthogonal_maps_are_inverted_by_their_transpose(rng, dtype, d, determinant):
    """Also those with eigenvalue 1, for which W is singular and nothing is certified."""
    u, y = orthogonal(d, rng, determinant), rng.normal(size=(20, d))
    x = ops.inverse(y.astype(dtype), (np.eye(d) - u).astype(dtype))
    assert relative(x, y @ u) < (1e-5 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize(("seed", "dtype"), [(seed, ("float32", "float64")[seed // 2 % 2]) for seed in range(12)])
def test_any_invertible_matrix_has_a_preimage_and_it_is_found(dtype, seed):
    rng = np.random.default_rng(seed)
    d = int(rng.choice([2, 3, 5, 12]))
    w = rng.normal(size=(d, d))
    w = (w + w.T if seed % 2 else w).astype(dtype)
    y = rng.normal(size=(300, d)).astype(dtype)
    x = ops.inverse(y, w)
    assert np.isfinite(x).all()
    assert residual(x, y, w).max() < (1e-3 if dtype == "float32" else 1e-9)


def test_not_found_is_nan_and_never_a_wrong_number(rng):
    w, y = rng.normal(size=(6, 6)), rng.normal(size=(200, 6))
    x = ops.inverse(y, w, max_steps=2).numpy()
    lost = np.isnan(x).any(axis=-1)
    assert 0 < lost.sum() < len(y)
    assert np.isnan(x[lost]).all()
    assert residual(x[~lost], y[~lost], w).max() < 1e-9


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda rng: certified(3, 1.5, 0.0, rng), routes.SYMMETRIC),
        (lambda rng: certified(3, 1.5, 3.0, rng), routes.PAIRED),
        (lambda rng: np.array([[1.0, 0.05], [0.0, 1.00000001]]), routes.ROWS),
        (lambda rng: np.array([[1.0, 0.05], [0.0, 1.0]]), routes.ROWS),
    ],
)
def test_every_route_gives_value_and_gradients(rng, make, expected):
    w = make(rng)
    assert int(ops.factorize(w).route) == expected
    y, g = rng.normal(size=(3, len(w))), rng.normal(size=(3, len(w)))
    value, *computed = gradients(ops.inverse, [y, w], g)
    assert residual(value, y, w).max() < 1e-12
    for a, b in zip(computed, differences(ops.inverse, [y, w], g, rows=1), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * (1 + np.abs(b).max()))


def test_float32_with_ill_conditioned_eigenvectors_batches_in_float64(rng):
    w = np.array([[1.0, 0.05], [0.0, 1.0001]], "float32")
    assert int(ops.factorize(w).route) == routes.PAIRED_WIDE
    y = rng.normal(size=(50, 2)).astype("float32")
    assert residual(ops.inverse(y, w), y, w).max() < 1e-6


@pytest.mark.parametrize("d", [1, 2, 5])
def test_float32_gradients(rng, d):
    w, y, g = certified(d, 1.7, 1.0, rng), rng.normal(size=(4, d)), rng.normal(size=(4, d))
    exact = gradients(ops.inverse, [y, w], g)
    for a, b in zip(gradients(ops.inverse, [y.astype("float32"), w.astype("float32")], g), exact, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * (1 + np.abs(b).max()))


@pytest.mark.slow
@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_second_derivatives_match_differences_of_the_first(rng, skew):
    y, w, g = rng.normal(size=(2, 3)), certified(3, 1.5, skew, rng), rng.normal(size=(2, 3))
    h, k = rng.normal(size=(2, 3)), rng.normal(size=(3, 3))

    first = weighted_gradient(ops.inverse, [h, k])
    graph = tf.function(first)  # once traced, quick to ask again
    expected = differences(graph, [y, w, g], np.ones(()), step=1e-5)
    for function in (first, graph):
        for a, b in zip(gradients(function, [y, w, g], 1.0)[1:], expected, strict=True):
            assert relative(a, b) < 1e-5


def test_zero_and_null_space_come_back_as_they_are(rng):
    y = np.array([[0.0, 0.0, 0.0], [0.0, 0.0, 5.0], [1.0, 2.0, 0.5]])
    w = np.diag([1.0, 1.2, 0.0])
    value, gy, gw = gradients(ops.inverse, [y, w], np.ones((3, 3)))
    np.testing.assert_array_equal(value[:2], y[:2])
    np.testing.assert_allclose(gy[:2], 1, atol=1e-12)
    assert np.isfinite(gw).all()
    assert residual(value[2:], y[2:], w).max() < 1e-12
    np.testing.assert_array_equal(ops.inverse(y, np.zeros((3, 3))), y)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_lengths_do_not_matter(rng, scale):
    w, y = certified(5, 1.5, 1.0, rng).astype("float32"), rng.normal(size=(6, 5)).astype("float32")
    expected = ops.inverse(y, w).numpy()
    assert relative(ops.inverse(np.float32(scale) * y, w).numpy() / np.float32(scale), expected) < 1e-5
    assert relative(ops.inverse(y, np.float32(scale) * w), expected) < 1e-5
    assert relative(ops.inverse(y, -w), expected) < 1e-5


def test_one_nan_row_does_not_hold_up_the_others(rng):
    w, y = certified(4, 1.9, 1.0, rng), rng.normal(size=(5, 4))
    expected = ops.inverse(y, w).numpy()
    y[2, 1] = np.nan
    result = ops.inverse_with_info(y, w)
    assert np.isnan(result.x[2]).all()
    np.testing.assert_allclose(np.delete(result.x, 2, 0), np.delete(expected, 2, 0), rtol=1e-12)
    assert result.steps.numpy().max() <= 8


def test_graph_unknown_batch_and_ranks(rng):
    w, y = certified(4, 1.6, 1.0, rng), rng.normal(size=(2, 3, 4))
    spec = [tf.TensorSpec([None, None, 4], tf.float64), tf.TensorSpec([4, 4], tf.float64)]
    function = tf.function(ops.inverse, input_signature=spec)
    np.testing.assert_allclose(function(y, w), ops.inverse(y.reshape(6, 4), w).numpy().reshape(2, 3, 4), rtol=1e-12)
    assert ops.inverse(y[0, 0], w).shape == (4,)
    assert function(np.zeros((0, 2, 4)), w).shape == (0, 2, 4)


@pytest.mark.slow
# A symmetric W in float64 goes the way of a general one there: XLA's eigenvalues have six digits.
@pytest.mark.parametrize(
    ("dtype", "skew"), quick([("float32", 0.0), ("float64", 1.0), ("float32", 1.0)], keep=2, exhaustive=True)
)
def test_xla(rng, dtype, skew):
    w, y, g = (t.astype(dtype) for t in (certified(4, 1.6, skew, rng), rng.normal(size=(6, 4)), rng.normal(size=(6, 4))))

    @tf.function(jit_compile=True)
    def compiled(y, w):
        with tf.GradientTape() as tape:
            tape.watch([y, w])
            x = ops.inverse(y, w, symmetric=True if skew == 0 else None)
        return [x, *tape.gradient(x, [y, w], tf.constant(g))]

    exact = gradients(ops.inverse, [y.astype("float64"), w.astype("float64")], g)
    for a, b in zip(compiled(tf.constant(y), tf.constant(w)), exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=(1e-4 if dtype == "float32" else 1e-10) * (1 + np.abs(b).max()))


@pytest.mark.slow
def test_non_finite_matrix_in_a_graph_is_nan_and_no_crash():
    function = tf.function(ops.inverse)
    for value in (np.nan, np.inf):
        assert np.isnan(function(tf.ones([2, 3]), tf.fill([3, 3], tf.constant(value, tf.float32)))).all()


def test_half_precision(rng):
    w, y = tf.constant(certified(4, 1.5, 1.0, rng), tf.bfloat16), tf.constant(rng.normal(size=(5, 4)), tf.bfloat16)
    x = ops.inverse(y, w)
    assert x.dtype == tf.bfloat16
    exact = ops.inverse(tf.cast(y, tf.float64), tf.cast(w, tf.float64))
    np.testing.assert_allclose(tf.cast(x, tf.float64), exact, atol=0.03)


@pytest.mark.parametrize(
    ("matrix", "route"),
    [
        (lambda rng: certified(4, 1.5, 0.0, rng), routes.SYMMETRIC),
        (lambda rng: np.diag([1.0, -2.0, 0.3, 4.0]), routes.SYMMETRIC),  # without certificate
        (lambda rng: certified(4, 1.5, 3.0, rng), routes.PAIRED),
        (lambda rng: rng.normal(size=(4, 4)), routes.PAIRED),
        (lambda rng: np.array([[1.0, 0.05], [0.0, 1.0001]]), routes.PAIRED_WIDE),
        (lambda rng: np.array([[1.0, 0.05], [0.0, 1.0]]), routes.ROWS),
    ],
)
def test_factors_can_be_reused(rng, matrix, route):
    """Value and gradients, where the route is known while tracing, with the branches of every other route left out."""
    w = matrix(rng).astype("float32")
    y, g = (rng.normal(size=(4, len(w))).astype("float32") for _ in range(2))
    factors = ops.factorize(w)
    assert factors.route == route
    assert factors.bracket is not None
    known = tf.function(lambda y, w: ops.inverse(y, w, factors=factors), autograph=False)
    expected = gradients(ops.inverse, [y, w], g)
    for function in (lambda y, w: ops.inverse(y, w, factors=factors), known):
        for a, b in zip(gradients(function, [y, w], g), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
    assert not _operations(known, y, w) & {"Eig", "SelfAdjointEigV2"}


@pytest.mark.slow
def test_without_factors_a_graph_holds_both_eigendecompositions():
    y, w = np.ones((2, 3), "float32"), np.eye(3, dtype="float32")
    assert _operations(tf.function(ops.inverse, autograph=False), y, w) >= {"Eig", "SelfAdjointEigV2"}


def _operations(function, *arguments):
    """The operations of a function and of all that it calls."""
    graph = function.get_concrete_function(*arguments).graph.as_graph_def()
    return {node.op for nodes in (graph.node, *(f.node_def for f in graph.library.function)) for node in nodes}


@pytest.mark.grappler
# The guard depends on the dtype. In graphs a W that is symmetric goes one way whether that is promised or seen.
@pytest.mark.parametrize(
    ("dtype", "symmetric", "jit"),
    [
        ("float32", True, False),
        pytest.param("float64", True, False, marks=pytest.mark.slow),
        *(pytest.param(*case, True, marks=pytest.mark.slow) for case in (("float32", True), ("float64", None))),
    ],
)
def test_a_search_that_lands_on_a_pole_goes_on(dtype, symmetric, jit):
    """The middle of this bracket is an eigenvalue of W⁻¹. Grappler must not optimise the guard against it away."""
    w, y = np.diag([1.0, -2.0, 0.3, 4.0]).astype(dtype), np.array([[-0.5, 1.0, 0.2, 0.1]], dtype)
    inverse = tf.function(lambda y, w: ops.inverse(y, w, symmetric=symmetric), autograph=False, jit_compile=jit)
    x = inverse(y, w).numpy()
    np.testing.assert_allclose(reflect(x.astype("float64"), w.astype("float64")), y, atol=1e-6)


@pytest.mark.parametrize("function", [ops.inverse, ops.inverse_with_info, ops.newton_inverse])
def test_bad_input(function):
    with pytest.raises(ValueError, match=r"Expected shape \(\.\.\., 4\).*Received: \(2, 3\)"):
        function(np.ones((2, 3)), np.eye(4))
    with pytest.raises(ValueError, match="Received: int64"):
        function(np.ones((2, 3), int), np.eye(3))


@pytest.mark.parametrize(
    ("dtype", "graph"), [("float32", False), ("float64", False), pytest.param("float32", True, marks=pytest.mark.slow)]
)
def test_near_finds_the_branch_of_the_data(dtype, graph):
    """Where a vector has three preimages, ψ falls at the outer two: each is found from its own c, whatever the others."""
    w = np.random.default_rng(4).normal(size=(4, 4))
    function = tf.function(ops.inverse) if graph else ops.inverse
    seen = 0
    for y in np.random.default_rng(5).normal(size=(12, 4)):
        found = ops.preimages(y, w) if seen < 6 else ()
        for x in (found[0], found[-1]) if len(found) == 3 else ():
            c = 2 * (w @ x) @ x / np.sum((w @ x) ** 2)
            nearest = function(y.astype(dtype), w.astype(dtype), near=tf.constant(c))
            assert relative(nearest, x) < (1e-3 if dtype == "float32" else 1e-9)
            seen += 1
    assert seen >= 6


def test_near_changes_nothing_for_certified_matrices(rng):
    w, y = certified(6, 1.9, 3.0, rng), rng.normal(size=(40, 6))
    for near in (-5.0, 0.0, 1e-3, 0.7, 1e6):
        assert relative(ops.inverse(y, w, near=near), ops.inverse(y, w)) < 1e-11


def test_near_keeps_the_gradients(rng):
    w = np.eye(3) - orthogonal(3, rng, determinant=-1) + 0.3 * rng.normal(size=(3, 3))
    x = rng.normal(size=(7, 3))
    y = ops.reflect(x, w).numpy()
    c = np.mean(2 * np.sum((x @ w.T) * x, -1) / np.sum((x @ w.T) ** 2, -1))
    cotangent = rng.normal(size=y.shape)

    def nearest(y, w):
        return ops.inverse(y, w, near=c)

    value, *ours = gradients(nearest, (y, w), cotangent)
    assert residual(value, y, w).max() < 1e-12
    for mine, theirs in zip(ours, differences(nearest, (y, w), cotangent, rows=1), strict=True):
        assert relative(mine, theirs) < 1e-5


@pytest.mark.slow
def test_layers_of_one_size_share_one_graph(rng):
    """Twenty layers in a graph add calls, not branches."""

    def nodes(layers):
        def chain(y):
            for _ in range(layers):
                y = ops.inverse(y, tf.constant(certified(3, 1.5, 1.0, rng)))
            return y

        graph = tf.function(chain).get_concrete_function(tf.TensorSpec([None, 3], tf.float64)).graph.as_graph_def()
        return len(graph.library.function)

    assert nodes(6) <= nodes(2)


@pytest.mark.parametrize("near", [None, 1.0])
def test_no_row_is_lost_where_branches_meet(dtype, near):
    """Rows near folds take many steps, alone, and are found all the same."""
    most = 0
    for seed in range(2):
        generator = np.random.default_rng(seed)
        w, y = (generator.normal(size=(n, 4)).astype(dtype) for n in (4, 2000))
        result = ops.inverse_with_info(y, w, near=near)
        assert not bool(result.certified)
        assert residual(result.x, y, w).max() < LIMIT[dtype]
        most = max(most, result.steps.numpy().max())
    assert most > 12
