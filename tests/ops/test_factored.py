"""The factored reflection against brute force, and its inverse against hostile vectors."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import ops
from keras_auxref.ops.diagonal import _STEPS, LARGEST_CONDITION, newton_steps
from tests.support import assert_agree, differences, gradients, orthogonal, pairwise, reflect, relative

CONDITIONS = (1.0, 1.3, 1.65, 1.88, 1.99, 1.999, LARGEST_CONDITION)
ROOT = Path(__file__).parents[2]


def parts(d, condition, rng, dtype="float64"):
    """U, V and λ with exactly this κ for d > 1, and with an arbitrary scale."""
    exponents = rng.uniform(-0.5, 0.5, d)
    exponents[0], exponents[-1] = -0.5, 0.5
    scales = 1.7 * condition**exponents
    if d > 1 and condition > 1:
        scales[-1] = scales[0] * condition * (1 - 1e-7)  # below the bound in float32 too
    return tuple(t.astype(dtype) for t in (orthogonal(d, rng), orthogonal(d, rng), scales))


def hostile(n, d, rng):
    """Vectors with entries over many decades, sparse ones, and some near eigenvectors."""
    decades = rng.choice([0.0, 1.0, 4.0, 12.0], size=(n, 1))
    b = rng.normal(size=(n, d)) * 10.0 ** (-decades * rng.random((n, d)))
    b *= rng.random((n, d)) < rng.choice([0.2, 0.6, 1.0], size=(n, 1))
    b[np.abs(b).max(axis=1) == 0, 0] = 1
    return b / np.abs(b).max(axis=1, keepdims=True) * 10.0 ** rng.uniform(-25, 25, size=(n, 1))


def exact_inverse(y, u, v, scales):
    """V g⁻¹(Uᵀy) by bisection in extended precision: slow, and sure."""
    lam = scales.astype(np.longdouble) / scales.max()
    b = (y @ u).astype(np.longdouble)
    b2 = np.square(b / np.abs(b).max(axis=-1, keepdims=True))
    low, high = np.full((len(b), 1), 2.0, np.longdouble), np.full((len(b), 1), 2 / lam.min())
    for _ in range(70):
        middle = (low + high) / 2
        right = np.sum(b2 / (middle * lam - 1) ** 2, axis=-1, keepdims=True) < b2.sum(axis=-1, keepdims=True)
        low, high = np.where(right, low, middle), np.where(right, middle, high)
    return (b / ((low + high) / 2 * lam - 1)).astype(np.float64) @ v.T


@pytest.mark.parametrize("d", [1, 2, 5, 12])
@pytest.mark.parametrize("condition", [1.0, 1.5, 1.99])
def test_is_the_auxiliary_reflection_followed_by_an_orthogonal_map(rng, dtype, d, condition):
    u, v, scales = parts(d, condition, rng)
    x = rng.normal(size=(3, 4, d))
    expected = -reflect(x, v * scales @ v.T) @ (u @ v.T).T
    y = ops.factored_reflect(*(t.astype(dtype) for t in (x, u, v, scales)))
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert relative(y, expected) < (2e-6 if dtype == "float32" else 1e-14)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


def test_contains_every_orthogonal_map_and_ignores_the_scale_of_eigenvalues(rng):
    u, v, scales = parts(6, 1.7, rng)
    x = rng.normal(size=(5, 6))
    np.testing.assert_allclose(ops.factored_reflect(x, u, v, np.full(6, 3.0)), x @ (u @ v.T).T, atol=1e-14)
    one = ops.factored_reflect_and_log_det(x, u, v, scales)
    for factor in (1e-30, 1e30):
        for a, b in zip(ops.factored_reflect_and_log_det(x, u, v, factor * scales), one, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)
    np.testing.assert_allclose(ops.factored_inverse(one[0], u, v, 1e30 * scales), x, atol=1e-12)


@pytest.mark.parametrize(("d", "condition"), [(1, 1.0), (2, 1.9), (7, 1.0), (7, 1.6), (7, 1.99)])
def test_log_det_is_that_of_automatic_differentiation(rng, dtype, d, condition):
    u, v, scales = parts(d, condition, rng)
    x = tf.constant(rng.normal(size=(9, d)))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = ops.factored_reflect(x, u, v, scales)
    expected = np.linalg.slogdet(tape.batch_jacobian(y, x))[1]
    value, log_det = ops.factored_reflect_and_log_det(*(tf.cast(t, dtype) for t in (x, u, v, scales)))
    assert log_det.dtype == dtype
    np.testing.assert_allclose(log_det, expected, **({"atol": 2e-5} if dtype == "float32" else {"rtol": 1e-10, "atol": 1e-12}))
    np.testing.assert_allclose(value, y, rtol=1e-4, atol=1e-5)


def test_density_integrates_to_one_on_the_circle():
    """For a bijection of the circle the Jacobians of all angles add up to one turn, up to κ near 2."""
    angles = np.linspace(0, 2 * np.pi, 20001)[:-1]
    x = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    for condition in (1.3, 1.9):
        log_det = ops.factored_reflect_and_log_det(x, np.eye(2), np.eye(2), np.array([1.0, condition]))[1]
        assert np.exp(log_det).mean() == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize(("condition", "d", "dtype"), pairwise(CONDITIONS, [2, 3, 12, 48], ["float32", "float64"]))
def test_inverse_of_hostile_vectors(rng, dtype, d, condition):
    check_inverse(2000, d, condition, rng, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("d", [2, 5, 24])
def test_inverse_of_many_hostile_vectors(rng, dtype, d):
    for condition in CONDITIONS:
        check_inverse(6_000, d, condition, rng, dtype)


def check_inverse(n, d, condition, rng, dtype):
    """Against bisection, to the last digit: what is left is what rounding y and cλ − 1 ≥ 2/κ − 1 alone make of it."""
    u, v, scales = parts(d, condition, rng, dtype)
    y = (hostile(n, d, rng) @ orthogonal(d, rng).T if d > 3 else hostile(n, d, rng)).astype(dtype)
    x = np.asarray(ops.factored_inverse(y, u, v, scales, condition=max(condition, 1.0)), np.float64)
    assert np.isfinite(x).all()
    wide = [np.asarray(t, np.float64) for t in (y, u, v, scales)]
    expected = exact_inverse(*wide)
    error = np.linalg.norm(x - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    epsilon = np.finfo(dtype).eps
    assert error.max() < 4 * d**0.5 * epsilon / (2 / condition - 1)
    # The residual is not amplified by the condition: x is the exact preimage of something within rounding of y.
    back = np.asarray(ops.factored_reflect(x, *wide[1:]))
    assert (np.linalg.norm(back - wide[0], axis=-1) / np.linalg.norm(wide[0], axis=-1)).max() < 12 * d**0.5 * epsilon


@pytest.mark.parametrize(("bound", "steps"), _STEPS.items())
def test_number_of_steps(bound, steps):
    """The table: with so many steps what is left to do is below ε/4, and with one less it is not, for κ at the bound.

    In extended precision, over all ratios of two entries of b and over random vectors with more. Two distinct eigenvalues are
    the worst case seen.
    """
    rng = np.random.default_rng(0)
    log_ratio = np.linspace(-24, 24, 3001)
    pairs = 10.0 ** np.stack([np.minimum(log_ratio, 0), np.minimum(-log_ratio, 0)], axis=-1)
    several = 10.0 ** -np.abs(rng.normal(size=(3000, 5)) * rng.choice([0.5, 2, 6], size=(3000, 1)))
    low = np.longdouble(1) / np.longdouble(bound)
    cases = [([low, 1], pairs)] + [
        ([low, *(low + (1 - low) * t for t in mid), 1], several) for mid in ((0.1, 0.5, 0.9), (0, 0, 1))
    ]
    left = {
        dtype: max(left_after(np.array(lam, np.longdouble), b2, count) for lam, b2 in cases)
        for dtype, count in (("float32", steps), ("float64", steps + 1))
    }
    for dtype, error in left.items():
        assert error < np.finfo(dtype).eps / 4
        assert newton_steps(bound, dtype) == steps + (dtype == "float64")
        assert newton_steps(bound * 0.9999999, dtype) <= newton_steps(bound, dtype)
    assert max(left_after(np.array(lam, np.longdouble), b2, steps - 1) for lam, b2 in cases) > np.finfo("float32").eps / 4


def left_after(lam, b2, steps):
    """The largest relative error of x after some steps, without rounding."""
    b2 = b2.astype(np.longdouble)
    weighted, total = lam * b2, b2.sum(-1, keepdims=True)
    c = 2 * weighted.sum(-1, keepdims=True) / (lam * weighted).sum(-1, keepdims=True)
    for step in range(steps + 8):
        if step == steps:
            x = np.sqrt(b2) / (c * lam - 1)
        p = 1 / (c * lam - 1)
        n, m = (b2 * p**2).sum(-1, keepdims=True), (lam * b2 * p**3).sum(-1, keepdims=True)
        c = c + (np.sqrt(n / total) - 1) * n / m
        c = np.maximum(c, 2) if step == 0 else c
    exact = np.sqrt(b2) / (c * lam - 1)
    return float((np.linalg.norm((x - exact).astype(float), axis=-1) / np.linalg.norm(exact.astype(float), axis=-1)).max())


def test_newton_rises_to_the_root_without_bracket(rng):
    """What the proof says: after one step every iterate is left of the root, and none goes back."""
    lam = np.array([0.505, 0.7, 1.0])
    b2 = 10.0 ** -np.abs(3 * rng.normal(size=(4000, 3)))
    c, total = np.full((4000, 1), 2 / 0.505), b2.sum(-1, keepdims=True)
    path = []
    for _ in range(14):
        p = 1 / (c * lam - 1)
        n, m = (b2 * p**2).sum(-1, keepdims=True), (lam * b2 * p**3).sum(-1, keepdims=True)
        c = np.maximum(c + (np.sqrt(n / total) - 1) * n / m, 2)
        path.append(c)
    steps = np.diff(np.concatenate(path, axis=1), axis=1)
    assert steps.min() > -1e-13
    assert np.abs(steps[:, -1]).max() < 1e-13


FUNCTIONS = {
    "reflect": ops.factored_reflect,
    "log_det": lambda x, u, v, scales: ops.factored_reflect_and_log_det(x, u, v, scales)[1] + 0 * tf.reduce_sum(u),
    "inverse": lambda *arguments: ops.factored_inverse(*arguments, condition=1.88),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("condition", [1.0, 1.8])
def test_gradients(rng, name, condition):
    arguments = [rng.normal(size=(3, 4)), *parts(4, condition, rng)]
    cotangent = rng.normal(size=(3, 4) if name != "log_det" else (3,))
    _, *found = gradients(FUNCTIONS[name], arguments, cotangent)
    expected = differences(FUNCTIONS[name], arguments, cotangent)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives(rng, name):
    u, v, scales = parts(3, 1.7, rng)
    x, directions = rng.normal(size=(2, 3)), [rng.normal(size=shape) for shape in ((2, 3), (3,))]

    def slope(x, scales):
        x, scales = tf.convert_to_tensor(x), tf.convert_to_tensor(scales)
        with tf.GradientTape() as tape:
            tape.watch([x, scales])
            value = tf.reduce_sum(tf.sin(FUNCTIONS[name](x, u, v, scales)))
        gx, gs = tape.gradient(value, [x, scales])
        return tf.reduce_sum(gx * directions[0]) + tf.reduce_sum(gs * directions[1])

    _, *found = gradients(slope, [x, scales], 1.0)
    for a, b in zip(found, differences(slope, [x, scales], np.ones(())), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_float32_gradients_of_the_inverse_are_those_of_float64(rng):
    """Also near the bound, where few steps are left: the derivative is that of the root, not of the iteration."""
    u, v, scales = parts(12, 1.87, rng)
    y, cotangent = rng.normal(size=(200, 12)), rng.normal(size=(200, 12))
    wide = gradients(FUNCTIONS["inverse"], [y, u, v, scales], cotangent)
    narrow = gradients(FUNCTIONS["inverse"], [t.astype("float32") for t in (y, u, v, scales)], cotangent)
    for a, b in zip(narrow, wide, strict=True):
        assert relative(a, b) < 1e-4


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_sizes(rng, size):
    u, v, scales = parts(5, 1.8, rng, "float32")
    x = rng.normal(size=(20, 5)).astype("float32")
    y, log_det = ops.factored_reflect_and_log_det(x, u, v, scales)
    big, big_log_det = ops.factored_reflect_and_log_det((size * x).astype("float32"), u, v, scales)
    np.testing.assert_allclose(big / np.float32(size), y, rtol=2e-4, atol=2e-6)
    np.testing.assert_allclose(big_log_det, log_det, atol=2e-4)
    np.testing.assert_allclose(ops.factored_inverse(big, u, v, scales) / np.float32(size), x, rtol=2e-3, atol=1e-5)
    _, *found = gradients(FUNCTIONS["log_det"], [(size * x).astype("float32"), u, v, scales], np.ones(20, "float32"))
    assert all(np.isfinite(g).all() for g in found)


def test_zero_and_nan_rows_and_their_gradients(rng, dtype):
    u, v, scales = parts(4, 1.8, rng, dtype)
    x = rng.normal(size=(5, 4)).astype(dtype)
    x[1], x[3, 2] = 0, np.nan
    for function in FUNCTIONS.values():
        value = function(x, u, v, scales)
        cotangent = np.ones(value.shape)
        cotangent[3] = 0
        _, gx, gu, gv, gs = gradients(function, [x[:3], u, v, scales], cotangent[:3])
        assert all(np.isfinite(g).all() for g in (gx, gu, gv, gs))
        assert np.isnan(value[3]).all()
        assert np.isfinite(np.delete(np.asarray(value), 3, axis=0)).all()
        np.testing.assert_array_equal(value[1], 0)
    # At zero the Jacobian is taken to be that of the orthogonal map, and λ gets nothing.
    _, gx, _, _, gs = gradients(ops.factored_reflect, [x[1:2], u, v, scales], np.ones((1, 4)))
    np.testing.assert_allclose(gx[0], v @ u.T @ np.ones(4), rtol=1e-5)
    np.testing.assert_array_equal(gs, 0)


@pytest.mark.parametrize("shape", [(4,), (1, 4), (0, 4), (2, 0, 4), (1, 2, 3, 4)])
def test_shapes(rng, shape):
    u, v, scales = parts(4, 1.5, rng)
    x = rng.normal(size=shape)
    y, log_det = ops.factored_reflect_and_log_det(x, u, v, scales)
    assert y.shape == shape
    assert log_det.shape == shape[:-1]
    np.testing.assert_allclose(ops.factored_inverse(y, u, v, scales), x, atol=1e-13)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_half_precision_is_computed_in_float32(rng, half):
    u, v, scales = parts(6, 1.8, rng, "float32")
    x = tf.cast(rng.normal(size=(40, 6)), half)
    y, log_det = ops.factored_reflect_and_log_det(x, u, v, scales)
    assert y.dtype == log_det.dtype == half
    expected = ops.factored_reflect_and_log_det(tf.cast(x, "float32"), u, v, scales)
    assert_agree(y, tf.cast(expected[0], half))
    assert_agree(log_det, tf.cast(expected[1], half))
    back = ops.factored_inverse(y, u, v, scales)
    assert relative(tf.cast(back, "float32"), tf.cast(x, "float32")) < (5e-3 if half == "float16" else 5e-2)


@pytest.mark.parametrize("jit", [False, True])
def test_compiles_with_an_unknown_batch(rng, jit):
    u, v, scales = parts(4, 1.8, rng)
    x = rng.normal(size=(3, 4))

    def both(x):
        y, log_det = ops.factored_reflect_and_log_det(x, u, v, scales)
        return ops.factored_inverse(y, u, v, scales), log_det

    traced = tf.function(both, jit_compile=jit, input_signature=[tf.TensorSpec([None, 4], tf.float64)])
    for a, b in zip(traced(x), both(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)


def test_one_sided_is_the_identity_on_the_other_side(rng):
    u, v, scales = parts(4, 1.8, rng)
    x = rng.normal(size=(3, 4))
    for sides, full in (((u, None), (u, np.eye(4))), ((None, v), (np.eye(4), v))):
        y = ops.factored_reflect(x, *sides, scales)
        np.testing.assert_allclose(y, ops.factored_reflect(x, *full, scales), rtol=1e-12)
        np.testing.assert_allclose(ops.factored_inverse(y, *sides, scales), x, rtol=1e-12)


def test_beyond_the_promise_there_is_no_answer(rng):
    u, v, x = orthogonal(3, rng), orthogonal(3, rng), rng.normal(size=(2, 3))
    for scales in ([1.0, 1.0, 2.0], [1.0, 1.0, 3.0], [1.0, -1.0, 1.0], [0.0, 1.0, 1.0]):
        assert np.isnan(ops.factored_inverse(x, u, v, np.array(scales))).all()
    assert np.isnan(ops.factored_inverse(x, u, v, np.array([1.0, 1.2, 1.4]), condition=1.3)).all()
    assert np.isfinite(ops.factored_inverse(x, u, v, np.array([1.0, 1.2, 1.3]), condition=1.3)).all()


EYE = np.eye(3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.float64(1.0), EYE, EYE, np.ones(3)), "at least one axis"),
        ((np.ones((2, 4)), EYE, EYE, np.ones(3)), r"Expected shape \(4,\)"),
        ((np.ones((2, 3)), np.eye(4), EYE, np.ones(3)), r"`u` must be a square matrix.*\(3, 3\).*Received: \(4, 4\)"),
        ((np.ones((2, 3)), EYE, EYE[:2], np.ones(3)), r"`v` must be a square matrix"),
        ((np.ones((2, 3)), EYE, EYE, np.ones((3, 1))), r"`eigenvalues`.*Received: \(3, 1\)"),
        ((np.ones((2, 3), "float32"), EYE, EYE, np.ones(3)), "Expected float32. Received: float64"),
        ((np.ones((2, 3), "int32"), EYE, EYE, np.ones(3)), "floating-point"),
        ((np.ones((2, 3)), EYE * np.nan, EYE, np.ones(3)), "`u` must be finite"),
        ((np.ones((2, 3)), EYE, EYE, np.full(3, np.inf)), "`eigenvalues` must be finite"),
    ],
)
def test_bad_arguments_say_what_was_expected(arguments, message):
    for function in (ops.factored_reflect, ops.factored_reflect_and_log_det, ops.factored_inverse):
        with pytest.raises(ValueError, match=message):
            function(*arguments)


@pytest.mark.parametrize("condition", [0.9, 2.0, float("nan")])
def test_bad_condition(condition):
    with pytest.raises(ValueError, match=r"`condition`.*Received"):
        ops.factored_inverse(np.ones((2, 3)), EYE, EYE, np.ones(3), condition=condition)


OTHER_BACKEND = """
import os, sys
os.environ["KERAS_BACKEND"] = backend = sys.argv[1]
import numpy as np
from keras import ops as k
if backend == "jax":
    import jax
    jax.config.update("jax_enable_x64", True)
    jacobian, compiled = jax.jacobian, jax.jit
else:
    import torch
    jacobian = lambda f: lambda x: torch.autograd.functional.jacobian(f, k.convert_to_tensor(x), create_graph=True)
    compiled = lambda f: f
from keras_auxref import ops
rng = np.random.default_rng(0)
d = 4
u, v = (np.linalg.qr(rng.normal(size=(d, d)))[0] for _ in range(2))
scales = np.array([1.0, 1.2, 1.5, 1.85])
x = rng.normal(size=d)
host = lambda t: np.asarray(k.convert_to_numpy(t))
arguments = [k.convert_to_tensor(t, dtype="float64") for t in (u, v, scales)]
f = lambda x: ops.factored_reflect(x, *arguments)
back = lambda y: ops.factored_inverse(y, *arguments, condition=1.88)
j = host(jacobian(f)(x))
y, log_det = compiled(lambda x: ops.factored_reflect_and_log_det(x, *arguments))(k.convert_to_tensor(x))
assert abs(float(log_det) - np.linalg.slogdet(j)[1]) < 1e-10
assert np.abs(j @ x - host(y)).max() < 1e-10  # homogeneous of degree one
assert np.abs(host(compiled(back)(y)) - x).max() < 1e-13
assert np.abs(host(jacobian(back)(host(y))) @ j - np.eye(d)).max() < 1e-10
# Second derivatives of f⁻¹(f(x)) = x vanish.
second = host(jacobian(lambda x: jacobian(lambda x: back(f(x)))(x))(x))
assert second.shape == (d, d, d) and np.abs(second).max() < 1e-8
hard = rng.normal(size=(500, d)) * 10.0 ** rng.uniform(-12, 0, size=(500, d)) * 10.0 ** rng.uniform(-20, 20, size=(500, 1))
hard[7], hard[8, 1] = 0, np.nan
for dtype, tolerance in (("float32", 2e-5), ("float64", 1e-13)):
    some = [t.astype(dtype) for t in (hard, u, v, scales)]
    again = host(ops.factored_inverse(ops.factored_reflect(*some), *some[1:]))
    assert again.dtype == dtype
    assert (again[7] == 0).all() and np.isnan(again[8]).all()
    keep = np.delete(np.arange(500), [7, 8])
    error = np.linalg.norm((again - some[0])[keep].astype("float64"), axis=1) / np.linalg.norm(hard[keep], axis=1)
    assert error.max() < tolerance, error.max()
assert np.isfinite(host(jacobian(lambda x: ops.factored_reflect_and_log_det(x, *arguments)[1])(np.zeros(d)))).all()
print("right")
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_other_backends(backend):
    pytest.importorskip(backend)
    done = subprocess.run([sys.executable, "-c", OTHER_BACKEND, backend], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["right"], done.stderr[-3000:]
