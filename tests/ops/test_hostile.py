"""W that are well conditioned and still hard: defective, with poles of A, singular to one digit, of extreme size."""

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import hostile
from keras_auxref import kernels, ops
from tests.support import certified, gradients, orthogonal, reflect, relative, residual


def _by_slogdet(x, w):
    """Autodiff of slogdet of the Jacobian, written down here."""
    u, v = tf.matmul(x, w, transpose_b=True), tf.matmul(x, w)
    n2 = tf.reduce_sum(u * u, -1)[:, None, None]
    c = 2 * tf.reduce_sum(u * x, -1)[:, None, None] / n2
    eye = tf.eye(w.shape[0], dtype=x.dtype)
    n = eye - c * w + 2 * u[:, :, None] * v[:, None, :] / n2  # J = H(u) N
    return tf.linalg.slogdet(n)[1]


@pytest.mark.parametrize("d", [12, 24])
def test_defective_matrices_have_right_gradients(rng, d):
    """W = I + shift: A is nearly singular where J is not."""
    w, x, g = np.eye(d) + np.eye(d, k=1), rng.normal(size=(40, d)), rng.normal(size=40)
    for a, b in zip(gradients(ops.log_det_jacobian, [x, w], g), gradients(_by_slogdet, [x, w], g), strict=True):
        assert relative(a, b) < 1e-7


def test_random_matrices_in_float32_have_right_gradients_row_by_row():
    """Of 3,000 rows next to no pole and next to some, none is more than 1 % off."""
    worst = 0.0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        d = int(rng.integers(2, 7))
        w, x = rng.normal(size=(d, d)).astype("float32"), rng.normal(size=(500, d)).astype("float32")
        wide = [t.astype("float64") for t in (x, w)]
        computed = gradients(ops.log_det_jacobian, [x, w], np.ones(500))[1]
        expected = gradients(_by_slogdet, wide, np.ones(500))[1]
        # A gradient of size 1/δ is known to ε/δ: rows where J is nearly singular are not asked for more.
        error = np.linalg.norm(computed - expected, axis=-1) / (1 + np.linalg.norm(expected, axis=-1)) ** 2
        worst = max(worst, error.max())
    assert worst < 1e-2


@pytest.mark.parametrize(
    ("w", "x", "expected"),
    [
        ([[2.0, 1.0], [0.0, -1.0]], [0.0, 1.0], np.log(3)),
        ([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0], [0.0, 0.0, 1.0]], [1.0, 0.0, 0.0], 0.0),
    ],
)
def test_exact_poles(dtype, w, x, expected):
    """1 − cλ = 0: det(A) κ is 0 · ∞, and det J an ordinary number."""
    w, x = np.array(w, dtype), np.array([x], dtype)
    value, *computed = gradients(ops.log_det_jacobian, [x, w], np.ones(1))
    np.testing.assert_allclose(value, expected, atol=1e-6)
    exact = gradients(_by_slogdet, [x.astype("float64"), w.astype("float64")], np.ones(1))
    for a, b in zip(computed, exact[1:], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * (1 + np.abs(b).max()))


@pytest.mark.parametrize("symmetric", [False, True])
def test_every_distance_from_a_pole(rng, dtype, symmetric):
    """W scaled about a vector until 1 − cλ goes through zero; value and gradients against QR of N in float64."""
    d = 5
    w = rng.normal(size=(d, d))
    w = w + w.T if symmetric else w
    real = np.linalg.eigvals(w)
    target = 1 / real.real[np.argmin(np.abs(real.imag))]
    a, b = rng.normal(size=(2, d))
    c = lambda x: 2 * (w @ x) @ x / np.sum((w @ x) ** 2)  # noqa: E731
    grid = np.linspace(0, np.pi, 4001)
    values = np.array([c(np.cos(t) * a + np.sin(t) * b) for t in grid]) - target
    crossing = np.flatnonzero(np.sign(values[1:]) != np.sign(values[:-1]))
    assert len(crossing)  # this plane has a pole
    low, high = grid[crossing[0]], grid[crossing[0] + 1]
    for _ in range(60):
        middle = (low + high) / 2
        at = c(np.cos(middle) * a + np.sin(middle) * b) - target
        low, high = (middle, high) if np.sign(at) == np.sign(values[crossing[0]]) else (low, middle)
    angles = low + np.array([0, 1e-15, 1e-12, 1e-9, 1e-6, 1e-3, 1e-2, 0.1])
    x = np.cos(angles)[:, None] * a + np.sin(angles)[:, None] * b
    g = rng.normal(size=len(x))
    x, w = x.astype(dtype), w.astype(dtype)
    expected = gradients(_by_slogdet, [x.astype("float64"), w.astype("float64")], g)
    for computed, exact in zip(gradients(ops.log_det_jacobian, [x, w], g), expected, strict=True):
        assert relative(computed, exact) < (2e-3 if dtype == "float32" else 1e-6)


def test_a_start_at_a_pole_moves_on(rng, dtype):
    """2 tr W/‖W‖²_F is a pole of this W, and not a reason to give up."""
    w, y = np.triu(np.ones((3, 3))).astype(dtype), rng.normal(size=(1000, 3)).astype(dtype)
    x = ops.inverse(y, w).numpy()
    assert np.isfinite(x).all()
    assert residual(x, y, w).max() < (1e-4 if dtype == "float32" else 1e-9)


@pytest.mark.parametrize(
    "make",
    [
        lambda rng: np.array([[1.0, 1.0], [1.0, 1.00001]]),
        lambda rng: rng.normal(size=(4, 4)) * 10.0 ** rng.uniform(-2, 2, (4, 1)),
        lambda rng: np.eye(3) + 30 * np.triu(rng.normal(size=(3, 3)), 1),
    ],
    ids=["nearly singular", "scaled rows", "far from normal"],
)
def test_what_is_returned_in_float32_is_verified_after_rounding(rng, make):
    """The residual of the rounded x, computed here in float64, is what is reported; and no x over 1e-4 is returned."""
    for _ in range(2):
        w = make(rng).astype("float32")
        y = rng.normal(size=(500, len(w))).astype("float32")
        result = ops.inverse_with_info(y, w)
        found = np.isfinite(result.x).all(axis=-1)
        true = residual(result.x.numpy()[found], y[found], w)
        assert (true <= 1.1e-4).all()
        np.testing.assert_allclose(result.residual.numpy()[found], true, atol=2e-6)


@pytest.mark.parametrize(
    ("w", "proven"),
    [
        ([[-1.0, 1.0], [-1.0, -2.0]], False),  # κ = 2 exactly
        ([[0.0, 0.0], [0.0, 0.0]], False),
        ([[1.0, 0.0], [0.0, 2.0]], False),
        ([[1.0, 0.0], [0.0, 1.9]], True),
        ([[-1.0, 5.0], [-5.0, -1.1]], True),
    ],
)
@pytest.mark.parametrize("graph", [False, True])
def test_one_proof_wherever_it_is_asked_for(w, proven, graph):
    w = np.array(w)
    assert kernels.certify(w).invertible is proven
    certified_by = tf.function(ops.is_certified) if graph else ops.is_certified
    assert bool(certified_by(w)) is proven
    assert bool(ops.inverse_with_info(np.ones((1, 2)), w).certified) is proven


def test_the_proof_in_a_graph_agrees_with_the_certificate():
    function = tf.function(ops.is_certified)
    for seed in range(60):
        rng = np.random.default_rng(seed)
        w = certified(3, rng.uniform(1.9, 2.1), rng.choice([0.0, 1.0, 30.0]), rng)
        assert bool(function(w)) == kernels.certify(w).invertible


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e20, 1e30])
def test_tiny_and_huge_vectors_and_matrices_together(rng, size):
    x, w = rng.normal(size=(20, 5)).astype("float32"), rng.normal(size=(5, 5)).astype("float32")
    g = rng.normal(size=(20, 5)).astype("float32")
    small = np.float32(size)
    value, gx, gw = gradients(ops.reflect, [small * x, small * w], g)
    exact, exact_gx, exact_gw = gradients(ops.reflect, [x, w], g)
    np.testing.assert_allclose(value / small, exact, atol=1e-4)
    np.testing.assert_allclose(gx, exact_gx, atol=1e-3 * np.abs(exact_gx).max())
    np.testing.assert_allclose(gw, exact_gw, atol=1e-3 * np.abs(exact_gw).max())
    np.testing.assert_allclose(ops.log_det_jacobian(small * x, small * w), ops.log_det_jacobian(x, w), atol=1e-3)


def _forward_mode(function, x, direction):
    x = tf.constant(x)
    with tf.autodiff.ForwardAccumulator(x, tf.constant(direction)) as accumulator:
        y = function(x)
    return accumulator.jvp(y).numpy()


@pytest.mark.parametrize("function", [ops.reflect, ops.log_det_jacobian])
def test_forward_mode(rng, function):
    x, w, direction = (rng.normal(size=s) for s in ((4, 3), (3, 3), (4, 3)))
    expected = (function(x + 1e-6 * direction, w).numpy() - function(x - 1e-6 * direction, w).numpy()) / 2e-6
    computed = _forward_mode(lambda x: function(x, w), x, direction)
    np.testing.assert_allclose(computed, expected, atol=1e-5 * (1 + np.abs(expected).max()))


@pytest.mark.parametrize("function", [lambda x: ops.inverse(x, np.eye(3)), ops.matrix_exp], ids=["inverse", "exp"])
def test_forward_mode_is_refused_where_it_would_be_wrong(rng, function):
    with pytest.raises(NotImplementedError, match=r"Forward-mode.*Expected reverse mode"):
        _forward_mode(function, rng.normal(size=(3, 3)), rng.normal(size=(3, 3)))


def test_certified_matrices_have_one_preimage_in_every_direction():
    for seed in range(40):
        rng = np.random.default_rng(seed)
        d = int(rng.integers(2, 9))
        w = certified(d, rng.uniform(1.9, 1.99999), rng.choice([0.0, 1.0, 100.0]), rng)
        y = rng.normal(size=d) * 10.0 ** rng.uniform(-8, 8, d)
        x = ops.preimages(y, w)
        assert x.shape == (1, d)
        assert np.linalg.norm(reflect(x, w)[0] - y) < 1e-7 * np.linalg.norm(y)


def test_every_invertible_matrix_has_a_preimage():
    for seed in range(40):
        rng = np.random.default_rng(seed)
        w = np.linalg.matrix_power(np.triu(rng.integers(-1, 2, (4, 4))) + np.eye(4) * 2, 2)
        assert len(ops.preimages(rng.integers(-2, 3, 4).astype(float), w)) >= 1


@pytest.mark.parametrize("function", [ops.reflect, ops.log_det_jacobian, ops.inverse, ops.jacobian])
def test_unknown_shapes_are_named(function):
    def call(x_shape, w_shape):
        spec = [tf.TensorSpec(x_shape, tf.float32), tf.TensorSpec(w_shape, tf.float32)]
        tf.function(function, input_signature=spec).get_concrete_function()

    with pytest.raises(ValueError, match=r"at least one axis.*Received: unknown rank"):
        call(None, [3, 3])
    with pytest.raises(ValueError, match=r"known size.*Expected shape \(d, d\).*Received: unknown rank"):
        call([2, 3], None)
    with pytest.raises(ValueError, match=r"known size.*Received: \(None, None\)"):
        call([2, 3], [None, None])


def _families(dtype, families, matrices=6, rows=48, sizes=(2, 5)):
    for family, w, x in hostile.cases(families, matrices, rows, seed=3, sizes=sizes):
        yield family, w.astype(dtype), x.astype(dtype)


LOG_DETS = ["edge", "almost symmetric", "rank deficient", "integer", "companion", "triangular", "rotation", "block diagonal"]


@pytest.mark.slow
@pytest.mark.grappler
def test_a_log_determinant_is_right_or_nan(dtype):
    """Against extended precision: small determinants, rows next to poles, W x next to zero."""
    function = tf.function(ops.log_det_jacobian)  # a graph, whose optimiser must not touch what guards against NaN
    lost = live = 0
    for family, w, x in _families(dtype, LOG_DETS, sizes=(3,)):
        value, expected = function(x, w).numpy(), hostile.log_det(x, w)
        rows = ~hostile.is_null(x, w, hostile.LIVE) & (expected > -30)
        found = rows & np.isfinite(value)
        np.testing.assert_allclose(value[found], expected[found], rtol=1e-3, atol=1e-3, err_msg=family)
        lost, live = lost + int((rows & (expected > -8) & ~np.isfinite(value)).sum()), live + int(rows.sum())
    assert lost <= 0.01 * live


def test_gradients_are_finite_where_the_log_determinant_is(dtype):
    for family, w, x in _families(dtype, ["edge", "almost symmetric", "symmetric"]):
        value, gx, gw = gradients(ops.log_det_jacobian, [x, w], np.ones(len(x)))
        assert np.isfinite(gx[np.isfinite(value)]).all(), family
        assert np.isfinite(gw).all() or not np.isfinite(value).all(), family


def test_certified_matrices_are_inverted_to_the_last_digits(dtype):
    """Next to κ = 2 and with large skew parts: nothing is lost, and nothing is off by more than rounding explains."""
    found = [(ops.inverse_with_info(y, w), w, y) for _, w, y in _families(dtype, ["certified", "proven"], matrices=8)]
    certified = [hostile.residual(result.x.numpy(), y, w).max() for result, w, y in found if bool(result.certified)]
    assert len(certified) > len(found) / 2  # so close to κ = 2 rounding may take a proof away
    assert max(certified) < (1e-5 if dtype == "float32" else 1e-11)


@pytest.mark.slow
def test_the_residual_is_that_of_what_is_returned(dtype):
    """Also where y comes back as it is because W y is zero up to rounding: f(y) is another vector in exact arithmetic."""
    threshold, masked = 1e-5 if dtype == "float32" else 1e-10, 0
    for family, w, y in _families(dtype, ["rank deficient", "rotation", "integer"], matrices=3):
        found = ops.inverse_with_info(y, w)
        kept = np.isfinite(found.x).all(-1)
        true = hostile.residual(found.x.numpy()[kept], y[kept], w)
        np.testing.assert_allclose(found.residual.numpy()[kept], true, rtol=0.05, atol=threshold, err_msg=family)
        masked += int((true > 0.1).sum())
    assert masked > 0


@pytest.mark.parametrize("noise", [0.0, 1e-17, 1e-9])
def test_a_root_at_a_pole_is_found(rng, dtype, noise):
    """y has nothing along an eigenvector of W, and every preimage something: c is the pole itself, or a rounding away from it."""
    values = np.array([1.0, 0.45, -0.7])
    for q in (np.eye(3), orthogonal(3, rng)):
        w = (q * values @ q.T).astype(dtype)
        y = ((np.array([[1.0, 0.0, 0.2], [0.3, 0.0, 1.0], [1.0, 0.0, 0.0]]) + noise) @ q.T).astype(dtype)
        x = ops.inverse(y, w).numpy()
        assert hostile.residual(x, y, w).max() < (1e-5 if dtype == "float32" else 1e-10)


@pytest.mark.slow
def test_next_to_nothing_is_lost_without_a_certificate(dtype):
    lost = rows = 0
    for _, w, y in _families(dtype, ["ill conditioned", "scaled", "symmetric", "almost symmetric", "companion"]):
        if np.linalg.cond(w.astype("float64")) < 1e-2 / np.finfo(dtype).eps:
            lost, rows = lost + int(np.isnan(ops.inverse(y, w).numpy()).any(-1).sum()), rows + len(y)
    assert lost <= 0.01 * rows


def test_a_preimage_that_rounding_spoils_gives_way_to_another_one():
    """In float32 the falling roots of this W lie so far out that rounding x takes f(x) away from y. A rising one does not."""
    w = np.diag([1.0, 3e-5]).astype("float32") @ orthogonal(2, np.random.default_rng(1)).astype("float32")
    y = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")
    found = ops.inverse_with_info(y, w)
    assert np.isfinite(found.x).all()
    assert hostile.residual(found.x.numpy(), y, w).max() < 1e-4


def test_a_search_around_zero_moves(rng, dtype):
    """tr W = 0 puts the start of the search at c = 0."""
    w = np.array([[1.0, 2.0, 0.0], [0.5, -1.0, 1.0], [1.0, 0.0, 0.0]], dtype)
    y = rng.normal(size=(50, 3)).astype(dtype)
    x = ops.inverse(y, w, near=0.0).numpy()
    assert residual(x, y, w).max() < (1e-4 if dtype == "float32" else 1e-9)
