"""ops.cayley and ops.matrix_exp against float64 NumPy, and their inverses."""

import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import ops
from keras_auxref.ops.cayley import cayley_inverse
from keras_auxref.ops.matrix_exp import _exp_static, matrix_exp_inverse
from tests.support import pairwise

MAPS = {"cayley": ops.cayley, "exp": ops.matrix_exp, "exp_static": _exp_static}
EPSILON = {"float32": 2.0**-23, "float64": 2.0**-52}


def skew(a: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) - a.astype(np.float64).T) / 2


def reference(name: str, a: np.ndarray) -> np.ndarray:
    k = skew(a)
    if name == "cayley":
        return np.linalg.solve(np.eye(len(k)) + k / 2, np.eye(len(k)) - k / 2)
    values, vectors = np.linalg.eigh(1j * k)
    return np.real((vectors * np.exp(-1j * values)) @ vectors.conj().T)


def random(d: int, norm: float = 1.0, dtype: str = "float64", seed: int = 0) -> np.ndarray:
    """A square matrix whose skew part has the given 2-norm, and with a symmetric part that must not matter."""
    a = np.random.default_rng(seed).standard_normal((d, d))
    k = (a - a.T) / 2
    k *= norm / max(np.linalg.norm(k, 2), 1e-12)
    return (k + max(norm, 1e-3) * (a + a.T) / 50).astype(dtype)


def random_rotation(d: int, seed: int = 0) -> np.ndarray:
    q = np.linalg.qr(np.random.default_rng(seed).standard_normal((d, d)))[0]
    q[:, 0] *= np.linalg.slogdet(q)[0]
    return q


def rotation_of(angles: list[float], signs: list[float], seed: int = 0) -> np.ndarray:
    """A rotation by the given angles in planes of a random basis, and with the given eigenvalues ±1."""
    d = 2 * len(angles) + len(signs)
    blocks = np.diag([1.0] * (2 * len(angles)) + signs)
    for i, t in enumerate(angles):
        blocks[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[np.cos(t), -np.sin(t)], [np.sin(t), np.cos(t)]]
    q = np.linalg.qr(np.random.default_rng(seed).standard_normal((d, d)))[0]
    return q @ blocks @ q.T


def orthogonality(u: np.ndarray) -> float:
    """‖UᵀU − I‖_F/√d."""
    u = np.asarray(u, np.float64)
    return float(np.linalg.norm(u.T @ u - np.eye(len(u))) / np.sqrt(len(u)))


@pytest.mark.parametrize(
    ("name", "norm", "d", "dtype"),
    pairwise(MAPS, [0.0, 1e-30, 1e-4, 0.5, 1.0, 2.3, 3.0, 10.0, 30.0], [1, 2, 5, 60], EPSILON),
)
def test_exact_to_precision_and_orthogonal(name: str, d: int, norm: float, dtype: str) -> None:
    a = random(d, norm, dtype)
    u = MAPS[name](a)
    assert u.dtype == dtype
    # The conditioning of exp: an entry of K known to ε turns U by ε‖K‖.
    np.testing.assert_allclose(u, reference(name, a), atol=EPSILON[dtype] * (10 + 2 * norm))
    assert orthogonality(u) < 20 * EPSILON[dtype]


@pytest.mark.parametrize("name", MAPS)
def test_zero_is_the_identity_exactly(name: str) -> None:
    np.testing.assert_array_equal(MAPS[name](np.zeros((4, 4), "float32")), np.eye(4))
    symmetric = random(4) + random(4).T
    np.testing.assert_array_equal(MAPS[name](symmetric), np.eye(4))


@pytest.mark.parametrize(("name", "norm", "d", "dtype"), pairwise(MAPS, [1e3, 1e6, 1e12, 1e30], [5, 40], EPSILON))
def test_orthogonal_with_a_finite_gradient_however_large(name: str, d: int, norm: float, dtype: str) -> None:
    a = tf.constant(random(d, norm, dtype))
    with tf.GradientTape() as tape:
        tape.watch(a)
        u = MAPS[name](a)
    assert orthogonality(u) < 1e-6
    assert np.isfinite(tape.gradient(u, a, tf.constant(random(d, dtype=dtype, seed=1)))).all()


def test_exp_keeps_the_digits_that_a_large_norm_leaves() -> None:
    a = random(40, 1e3)
    np.testing.assert_allclose(ops.matrix_exp(a), reference("exp", a), atol=1e-11)
    np.testing.assert_allclose(ops.matrix_exp(a.astype("float32")), reference("exp", a.astype("float32")), atol=1e-3)


@pytest.mark.parametrize("norm", [0.0, 0.7, 3.0, 12.0])
@pytest.mark.parametrize("name", MAPS)
def test_gradient_matches_finite_differences(name: str, norm: float) -> None:
    a, g = random(7, norm), random(7, seed=1) + random(7, seed=2).T
    t = tf.constant(a)
    with tf.GradientTape() as tape:
        tape.watch(t)
        u = MAPS[name](t)
    gradient = tape.gradient(u, t, tf.constant(g)).numpy()
    np.testing.assert_allclose(gradient, -gradient.T, atol=1e-12)
    for seed in range(3):
        direction = np.random.default_rng(seed).standard_normal((7, 7))
        slope = np.sum(g * (reference(name, a + 1e-6 * direction) - reference(name, a - 1e-6 * direction))) / 2e-6
        np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", ["cayley", "exp"])
def test_second_derivative_matches_finite_differences(name: str, graph: bool) -> None:
    a, direction = tf.constant(random(5, 3.0)), tf.constant(random(5, seed=1) + random(5, seed=2).T)

    def gradient(a: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(a)
            loss = tf.reduce_sum(MAPS[name](a) ** 3)
        return tape.gradient(loss, a)

    def second(a: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(a)
            first = gradient(a)
        return tape.gradient(first, a, direction)

    difference = (gradient(a + 1e-6 * direction) - gradient(a - 1e-6 * direction)) / 2e-6
    np.testing.assert_allclose((tf.function(second) if graph else second)(a), difference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_compiled_forward_and_gradient_match_eager_at_every_norm(name: str, jit: bool) -> None:
    def run(a: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(a)
            u = MAPS[name](a)
            loss = tf.reduce_sum(u**3)
        return u, tape.gradient(loss, a)

    compiled = tf.function(run, jit_compile=jit)
    for norm in (0.5, 4.0, 30.0):  # one graph, different numbers of squarings
        a = tf.constant(random(6, norm))
        for x, y in zip(compiled(a), run(a), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-11)


@pytest.mark.parametrize("name", MAPS)
def test_nan_flows_through(name: str) -> None:
    a = random(3, dtype="float32")
    a[0, 1] = np.nan
    for function in (MAPS[name], tf.function(MAPS[name])):
        assert np.isnan(function(tf.constant(a))).any()


@pytest.mark.parametrize("name", ["cayley", "exp"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_computed_in_float32(name: str, dtype: str) -> None:
    a = tf.cast(random(5), dtype)
    u = MAPS[name](a)
    assert u.dtype == dtype
    np.testing.assert_allclose(tf.cast(u, "float64"), reference(name, tf.cast(a, "float64").numpy()), atol=0.01)


@pytest.mark.parametrize(("d", "dtype"), [(1, "float64"), (2, "float32"), (3, "float64"), (10, "float32"), (31, "float64")])
def test_inverses_reproduce_a_rotation(d: int, dtype: str) -> None:
    u = random_rotation(d).astype(dtype)
    for inverse, name in ((cayley_inverse, "cayley"), (matrix_exp_inverse, "exp")):
        k = inverse(u)
        np.testing.assert_array_equal(k, -k.T)
        np.testing.assert_allclose(reference(name, k), u, atol=1e-6 if dtype == "float32" else 1e-11)
    assert np.linalg.norm(matrix_exp_inverse(u), 2) <= np.pi + 1e-9


@pytest.mark.parametrize(
    ("angles", "signs"),
    [
        ([], [-1.0, -1.0]),
        ([], [-1.0] * 6),
        ([0.3], [-1.0, -1.0, 1.0]),
        ([0.3, 0.3, 2.0], [-1.0] * 4),
        ([np.pi - 1e-8, 1.0], [1.0]),
        ([np.pi - 1e-8, np.pi - 1e-5, np.pi - 1e-3], [-1.0, -1.0]),
        ([np.pi - 0.9e-3, np.pi - 0.9e-3, np.pi - 1.1e-3, 1e-9, 0.0], []),
    ],
)
def test_logarithm_with_eigenvalues_at_and_near_minus_one(angles: list[float], signs: list[float]) -> None:
    u = rotation_of(angles, signs)
    np.testing.assert_allclose(reference("exp", matrix_exp_inverse(u)), u, atol=1e-8)
    rounded = u.astype("float32")
    np.testing.assert_allclose(reference("exp", matrix_exp_inverse(rounded)), u, atol=1e-6)


def test_inverses_name_what_they_cannot_reach() -> None:
    reflection = np.diag([1.0, 1.0, -1.0])
    with pytest.raises(ValueError, match=r"det U = \+1. Received: det U = -1"):
        matrix_exp_inverse(reflection)
    with pytest.raises(ValueError, match=r"eigenvalue −1.*Received: distance 0.0e[+]00, det U = -1"):
        cayley_inverse(reflection)
    with pytest.raises(ValueError, match=r"eigenvalue −1.*det U = \+1"):
        cayley_inverse(-np.eye(2))
    for inverse in (cayley_inverse, matrix_exp_inverse):
        with pytest.raises(ValueError, match="Expected an orthogonal matrix"):
            inverse(np.ones((2, 2)))


@pytest.mark.parametrize("function", [ops.cayley, ops.matrix_exp])
def test_errors(function) -> None:
    with pytest.raises(ValueError, match=r"Expected shape \(d, d\). Received: \(2, 3\)"):
        function(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="floating-point dtype"):
        function(np.zeros((2, 2), int))
