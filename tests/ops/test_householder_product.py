"""ops.householder_product against reflections applied one after another in NumPy."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import ops
from keras_auxref.ops.householder_product import householder_matrix, householder_vectors

module = sys.modules[householder_matrix.__module__]
TOLERANCE = {"float32": 5e-6, "float64": 1e-13}


def sequential(v: np.ndarray, x: np.ndarray) -> np.ndarray:
    """H(v₁)…H(v_k) x, the last reflection first."""
    v, y = v.astype(np.float64), x.astype(np.float64)
    for column in v.T[::-1]:
        if np.abs(column).max() > 0:
            column = column / np.abs(column).max()
            y = y - 2 * (y @ column)[..., None] * column / (column @ column)
    return y


def random(*shape: int, dtype: str = "float64", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def random_orthogonal(d: int, determinant: int, seed: int = 0) -> np.ndarray:
    q = np.linalg.qr(random(d, d, seed=seed))[0]
    if np.linalg.slogdet(q)[0] != determinant:
        q[:, 0] *= -1
    return q


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("k", range(1, 8))
def test_matches_sequential_reflections(k: int, dtype: str) -> None:
    v, x = random(7, k, dtype=dtype), random(5, 7, dtype=dtype, seed=1)
    y = ops.householder_product(v, x)
    assert y.dtype == dtype
    np.testing.assert_allclose(y, sequential(v, x), atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("d", "k"), [(1, 1), (300, 300), (300, 129), (40, 90)])
def test_sizes_beyond_one_block_and_d_of_one(d: int, k: int) -> None:
    v, x = random(d, k), random(3, d, seed=1)
    np.testing.assert_allclose(ops.householder_product(v, x), sequential(v, x), atol=1e-12)


@pytest.mark.parametrize("shape", [(6,), (1, 6), (4, 6), (2, 3, 6), (2, 4, 5, 6)])
def test_acts_on_the_last_axis_of_any_rank(shape: tuple[int, ...]) -> None:
    v, x = random(6, 4), random(*shape, seed=1)
    y = ops.householder_product(v, x)
    assert tuple(y.shape) == shape
    np.testing.assert_allclose(y, sequential(v, x), atol=1e-13)


def test_many_rows_form_the_matrix_with_the_same_value_and_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    v, x, g = tf.constant(random(6, 6)), tf.constant(random(2, 20, 6, seed=1)), tf.constant(random(2, 20, 6, seed=2))

    def run() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch([v, x])
            y = ops.householder_product(v, x)
        return [y, *tape.gradient(y, [v, x], g)]

    formed = run()
    monkeypatch.setattr(module, "_MANY_ROWS", 1e9)
    for a, b in zip(formed, run(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_zero_columns_are_the_identity_with_zero_gradient() -> None:
    v = random(6, 5)
    v[:, [0, 3]] = 0
    v, x = tf.constant(v), tf.constant(random(4, 6, seed=1))
    with tf.GradientTape() as tape:
        tape.watch([v, x])
        y = ops.householder_product(v, x)
    gv, gx = tape.gradient(y, [v, x], tf.constant(random(4, 6, seed=2)))
    np.testing.assert_allclose(y, sequential(v.numpy(), x.numpy()), atol=1e-13)
    assert np.isfinite(gv).all()
    assert np.isfinite(gx).all()
    assert (gv.numpy()[:, [0, 3]] == 0).all()
    np.testing.assert_array_equal(ops.householder_product(tf.zeros_like(v), x), x)


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
def test_the_length_of_a_column_does_not_matter(scale: float) -> None:
    v, x = random(6, 5, dtype="float32"), random(4, 6, dtype="float32", seed=1)
    scaled = v * np.array([scale, 1, 1 / scale, 1, scale], "float32")
    with tf.GradientTape() as tape:
        t = tf.constant(scaled)
        tape.watch(t)
        y = ops.householder_product(t, x)
    np.testing.assert_allclose(y, sequential(v, x), atol=TOLERANCE["float32"])
    assert np.isfinite(tape.gradient(y, t)).all()


def test_equal_columns_stay_orthogonal() -> None:
    v = np.repeat(random(50, 1, dtype="float32"), 50, axis=1)
    np.testing.assert_allclose(householder_matrix(v), np.eye(50), atol=2e-5)


@pytest.mark.parametrize("shape", [(6, 4), (6, 6), (150, 140)])
def test_gradient_matches_finite_differences(shape: tuple[int, int]) -> None:
    v, x, g = random(*shape), random(3, shape[0], seed=1), random(3, shape[0], seed=2)
    tv, tx = tf.constant(v), tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch([tv, tx])
        y = ops.householder_product(tv, tx)
    gradients = tape.gradient(y, [tv, tx], tf.constant(g))
    for index, (value, gradient) in enumerate(zip((v, x), gradients, strict=True)):
        direction = random(*value.shape, seed=3 + index)
        step = 1e-6 * direction
        plus, minus = ([v + step, x], [v - step, x]) if index == 0 else ([v, x + step], [v, x - step])
        slope = np.sum(g * (sequential(*plus) - sequential(*minus))) / 2e-6
        np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=1e-6, atol=1e-6)


def test_second_derivative_matches_finite_differences() -> None:
    v, x, direction = tf.constant(random(5, 4)), tf.constant(random(3, 5, seed=1)), tf.constant(random(5, 4, seed=2))

    def gradient(v: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(v)
            loss = tf.reduce_sum(ops.householder_product(v, x) ** 3)
        return tape.gradient(loss, v)

    with tf.GradientTape() as tape:
        tape.watch(v)
        first = gradient(v)
    second = tape.gradient(first, v, direction)
    difference = (gradient(v + 1e-6 * direction) - gradient(v - 1e-6 * direction)) / 2e-6
    np.testing.assert_allclose(second, difference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("jit", [False, True])
def test_compiled_forward_and_gradient_match_eager(jit: bool) -> None:
    v, x = tf.constant(random(140, 135)), tf.constant(random(4, 140, seed=1))

    def run(v: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch([v, x])
            loss = tf.reduce_sum(ops.householder_product(v, x) ** 3)
        return loss, *tape.gradient(loss, [v, x])

    for compiled, eager in zip(tf.function(run, jit_compile=jit)(v, x), run(v, x), strict=True):
        np.testing.assert_allclose(compiled, eager, rtol=1e-9, atol=1e-9)


def test_other_backends_differentiate_the_same_function() -> None:
    v, x, g = tf.constant(random(6, 4)), tf.constant(random(3, 6, seed=1)), tf.constant(random(3, 6, seed=2))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([v, x])
        scale, dead = module._scale(v)
        portable = module._forward(v * scale, dead, x)[-1].y
        closed = ops.householder_product(v, x)
    for a, b in zip(tape.gradient(portable, [v, x], g), tape.gradient(closed, [v, x], g), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_symbolic_and_unknown_batch() -> None:
    inputs = keras.Input((6,), dtype="float64")
    assert ops.householder_product(random(6, 3), inputs).shape == (None, 6)
    function = tf.function(
        lambda x: ops.householder_product(random(6, 3), x), input_signature=[tf.TensorSpec([None, None, 6], "float64")]
    )
    x = random(2, 3, 6, seed=1)
    np.testing.assert_allclose(function(x), sequential(random(6, 3), x), atol=1e-13)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_works_in_float32(dtype: str) -> None:
    v, x = random(6, 5, dtype="float32"), tf.cast(random(4, 6, seed=1), dtype)
    y = ops.householder_product(v, x)
    assert y.dtype == dtype
    np.testing.assert_allclose(tf.cast(y, "float64"), sequential(v, tf.cast(x, "float64").numpy()), atol=0.05)


def test_matrix_is_orthogonal_and_acts_as_the_product() -> None:
    v, x = random(200, 200, dtype="float32"), random(3, 200, dtype="float32", seed=1)
    u = householder_matrix(v).numpy()
    assert np.linalg.norm(u.T @ u - np.eye(200)) < 1e-5 * np.sqrt(200)
    np.testing.assert_allclose(x @ u.T, ops.householder_product(v, x), atol=1e-5)


@pytest.mark.parametrize("determinant", [-1, 1])
@pytest.mark.parametrize("d", [1, 2, 3, 8, 33])
def test_vectors_reproduce_an_orthogonal_matrix(d: int, determinant: int) -> None:
    q = random_orthogonal(d, determinant)
    v = householder_vectors(q)
    assert v.shape == (d, d)
    np.testing.assert_allclose(sequential(v, np.eye(d)).T, q, atol=1e-13)
    # k reflections have determinant (−1)ᵏ: exactly one has to be missing where U has the other one.
    assert (np.abs(v).max(axis=0) == 0).sum() == (determinant != (-1) ** d)


@pytest.mark.parametrize("d", [4, 5])
def test_vectors_of_the_identity_can_be_trained(d: int) -> None:
    v = householder_vectors(np.eye(d))
    np.testing.assert_allclose(sequential(v, np.eye(d)), np.eye(d), atol=1e-15)
    t, x = tf.constant(v), tf.constant(random(3, d))
    with tf.GradientTape() as tape:
        tape.watch(t)
        y = ops.householder_product(t, x)
    moved = np.abs(tape.gradient(y, t, tf.constant(random(3, d, seed=1)))).max(axis=0) > 0
    assert moved.sum() == d - d % 2


def test_fewer_vectors_where_the_rank_allows() -> None:
    q = householder_matrix(random(9, 3)).numpy()
    for k in (3, 4, 7, 9):
        v = householder_vectors(q, k)
        assert v.shape == (9, k)
        np.testing.assert_allclose(sequential(v, np.eye(9)).T, q, atol=1e-12)
    with pytest.raises(ValueError, match=r"Expected at least rank\(I − U\) = 3 reflections. Received: 2"):
        householder_vectors(q, 2)


@pytest.mark.parametrize(
    ("v", "x", "message"),
    [
        (np.zeros(3), np.zeros(3), r"Expected shape \(d, k\), k ≥ 1. Received: \(3,\)"),
        (np.zeros((3, 0)), np.zeros(3), r"Received: \(3, 0\)"),
        (np.zeros((3, 2)), np.zeros(4), r"Expected shape \(..., 3\)"),
        (np.zeros((3, 2)), np.zeros(()), "at least one axis"),
        (np.zeros((3, 2), int), np.zeros(3), "floating-point dtype"),
        (np.zeros((3, 2)), np.zeros(3, "float32"), "share one dtype"),
    ],
)
def test_errors(v: np.ndarray, x: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.householder_product(v, x)


def test_vectors_refuse_a_matrix_that_is_not_orthogonal() -> None:
    with pytest.raises(ValueError, match="Expected an orthogonal matrix"):
        householder_vectors(2 * np.eye(3))
