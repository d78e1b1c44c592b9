import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import ops
from keras_auxref.ops.reflect import central_coefficient
from tests.support import differences, gradients, orthogonal, reflect, relative, weighted_gradient


@pytest.mark.parametrize("d", [1, 2, 3, 5, 16, 64])
def test_is_the_definition(rng, dtype, d):
    x, w = rng.normal(size=(9, d)), rng.normal(size=(d, d))
    assert relative(ops.reflect(x.astype(dtype), w.astype(dtype)), reflect(x, w)) < (1e-4 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 5), (2, 3, 5), (2, 1, 3, 5), (0, 5)])
def test_acts_on_the_last_axis_of_any_rank(rng, shape):
    x, w = rng.normal(size=shape), rng.normal(size=(5, 5))
    y = ops.reflect(x, w)
    assert y.shape == shape
    if y.shape[0]:
        assert relative(y, reflect(x, w)) < 1e-12


def test_one_dimension_is_minus(rng):
    x = rng.normal(size=(4, 1))
    np.testing.assert_allclose(ops.reflect(x, np.array([[-3.0]])), -x, rtol=1e-14)


def _permutation(d, rng):
    return np.eye(d)[rng.permutation(d)]


def _reflection(d, rng):
    v = rng.normal(size=d)
    return np.eye(d) - 2 * np.outer(v, v) / (v @ v)


@pytest.mark.parametrize(
    "make",
    [orthogonal, _permutation, _reflection, lambda d, rng: -np.eye(d)],
    ids=["random", "permutation", "reflection", "minus"],
)
@pytest.mark.parametrize("d", [2, 3, 8, 65])
def test_theorem_1(rng, dtype, make, d):
    u = make(d, rng)
    x = rng.normal(size=(20, d))
    y = ops.reflect(x.astype(dtype), (np.eye(d) - u).astype(dtype))
    assert relative(y, x @ u.T) < (2e-5 if dtype == "float32" else 1e-13)


@pytest.mark.parametrize("d", [2, 3, 64, 785])
def test_vectors_that_the_orthogonal_map_fixes_stay(rng, dtype, d):
    """W x is rounding noise there; an exact test for zero would reflect x in a random direction."""
    v = rng.normal(size=d)
    u = np.eye(d) - 2 * np.outer(v, v) / (v @ v)
    x = rng.normal(size=(20, d))
    for _ in range(3):  # once leaves a part along v where x was nearly parallel to it
        x = x - np.outer(x @ v, v) / (v @ v)
    x = x.astype(dtype)
    assert relative(ops.reflect(x, (np.eye(d) - u).astype(dtype)), x) < (1e-5 if dtype == "float32" else 1e-13)


def test_real_reflections_are_not_swallowed():
    """At d = 784 a threshold of d·eps would take this W x for zero."""
    diagonal = np.zeros(784, "float32")
    diagonal[:2] = 1, 5e-5
    x = np.eye(784, dtype="float32")[:3]
    np.testing.assert_allclose(ops.reflect(x, np.diag(diagonal)), x * np.array([[-1], [-1], [1]]), atol=1e-6)


def test_the_central_coefficient_is_that_of_every_vector_for_an_orthogonal_map(rng):
    for size in (1e-30, 1.0, 1e30):
        w = size * (np.eye(5) - orthogonal(5, rng))
        np.testing.assert_allclose(central_coefficient(tf.constant(w)) * size, 1, rtol=1e-12)
    w = rng.normal(size=(5, 5))
    np.testing.assert_allclose(central_coefficient(tf.constant(w)), 2 * np.trace(w) / np.sum(w**2), rtol=1e-12)


def test_preserves_norms_and_is_homogeneous(rng):
    x, w = rng.normal(size=(50, 6)), rng.normal(size=(6, 6))
    y = ops.reflect(x, w).numpy()
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-13)
    np.testing.assert_allclose(ops.reflect(-3 * x, w), -3 * y, rtol=1e-10)
    np.testing.assert_allclose(ops.reflect(x, -7 * w), y, rtol=1e-10)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-5, 1e22, 1e30])
@pytest.mark.parametrize("weight", [1.0, 1e-3, 1e3])
def test_float32_from_tiny_to_huge(rng, scale, weight):
    x, w = rng.normal(size=(20, 8)).astype("float32"), rng.normal(size=(8, 8)).astype("float32")
    y = ops.reflect(np.float32(scale) * x, np.float32(weight) * w).numpy()
    assert np.abs(y / np.float32(scale) - ops.reflect(x, w)).max() < 1e-4


def test_zero_stays_zero_with_finite_gradients(rng):
    w = rng.normal(size=(4, 4))
    x = np.array([[0.0] * 4, rng.normal(size=4)])
    value, gx, gw = gradients(ops.reflect, [x, w], np.ones((2, 4)))
    np.testing.assert_array_equal(value[0], 0)
    np.testing.assert_array_equal(gx[0], 1)  # the identity
    _, _, alone = gradients(ops.reflect, [x[1:], w], np.ones((1, 4)))
    np.testing.assert_allclose(gw, alone, rtol=1e-12)  # nothing from the row of zeros


def test_null_space_gives_identity_and_no_gradient_for_w(rng):
    w = np.diag([1.0, 2.0, 0.0])
    x = np.array([[0.0, 0.0, 5.0]])
    value, gx, gw = gradients(ops.reflect, [x, w], rng.normal(size=(1, 3)))
    np.testing.assert_array_equal(value, x)
    assert np.isfinite(gx).all()
    np.testing.assert_array_equal(gw, 0)


def test_zero_matrix_is_the_identity(rng):
    x = rng.normal(size=(3, 4))
    np.testing.assert_array_equal(ops.reflect(x, np.zeros((4, 4))), x)


@pytest.mark.parametrize("d", [1, 2, 5])
def test_gradients_match_finite_differences(rng, d):
    x, w, g = rng.normal(size=(3, d)), rng.normal(size=(d, d)), rng.normal(size=(3, d))
    for computed, expected in zip(gradients(ops.reflect, [x, w], g)[1:], differences(ops.reflect, [x, w], g), strict=True):
        np.testing.assert_allclose(computed, expected, atol=1e-7 * (1 + np.abs(expected).max()))


def test_gradients_have_the_shape_of_higher_rank_inputs(rng):
    x, w, g = rng.normal(size=(2, 3, 4)), rng.normal(size=(4, 4)), rng.normal(size=(2, 3, 4))
    _, gx, gw = gradients(ops.reflect, [x, w], g)
    _, flat_gx, flat_gw = gradients(ops.reflect, [x.reshape(6, 4), w], g.reshape(6, 4))
    np.testing.assert_allclose(gx.reshape(6, 4), flat_gx, rtol=1e-12)
    np.testing.assert_allclose(gw, flat_gw, rtol=1e-12)


@pytest.mark.parametrize("graph", [False, True])
def test_second_derivatives_match_differences_of_the_first(rng, graph):
    x, w, g = rng.normal(size=(2, 3)), rng.normal(size=(3, 3)), rng.normal(size=(2, 3))
    h, k = rng.normal(size=(2, 3)), rng.normal(size=(3, 3))

    first = weighted_gradient(ops.reflect, [h, k])
    computed = gradients(tf.function(first) if graph else first, [x, w, g], 1.0)[1:]
    for a, b in zip(computed, differences(first, [x, w, g], np.ones(())), strict=True):
        assert relative(a, b) < 1e-7


def test_nan_stays_in_its_row(rng):
    x, w = rng.normal(size=(3, 4)), rng.normal(size=(4, 4))
    bad = x.copy()
    bad[1, 2] = np.nan
    y = ops.reflect(bad, w).numpy()
    assert np.isnan(y[1]).all()
    np.testing.assert_allclose(y[[0, 2]], ops.reflect(x, w).numpy()[[0, 2]])


def test_graph_with_unknown_batch_and_xla_agree(rng):
    x, w, g = rng.normal(size=(5, 4)), rng.normal(size=(4, 4)), rng.normal(size=(5, 4))
    expected = gradients(ops.reflect, [x, w], g)
    for jit in (False, True):
        spec = [tf.TensorSpec([5 if jit else None, 4], tf.float64), tf.TensorSpec([4, 4], tf.float64)]
        function = tf.function(ops.reflect, input_signature=spec, jit_compile=jit)
        for a, b in zip(gradients(function, [x, w], g), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


def test_non_finite_matrix_in_a_graph_is_nan_and_no_crash(rng):
    y = tf.function(ops.reflect)(tf.ones([2, 3]), tf.constant([[np.nan, 0, 0], [0, 1, 0], [0, 0, 1]], tf.float32))
    assert np.isnan(y).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(rng, dtype):
    x, w = tf.constant(rng.normal(size=(6, 64)), dtype), tf.constant(rng.normal(size=(64, 64)), dtype)
    value, *_ = gradients(lambda x, w: tf.cast(ops.reflect(x, w), "float32"), [x, w], np.ones((6, 64)))
    exact = ops.reflect(tf.cast(x, "float64"), tf.cast(w, "float64"))
    assert relative(value, exact) < (5e-3 if dtype == "float16" else 4e-2)


def test_symbolic_inputs_make_a_functional_model(rng):
    x, w = rng.normal(size=(3, 4)).astype("float32"), rng.normal(size=(4, 4)).astype("float32")
    inputs = keras.Input((4,))
    model = keras.Model(inputs, ops.reflect(inputs, w))
    np.testing.assert_allclose(model(x), ops.reflect(x, w), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (np.ones((2, 3)), np.ones((3, 4)), r"square matrix.*Expected shape \(d, d\).*Received: \(3, 4\)"),
        (np.ones((2, 3)), np.ones(3), r"square matrix.*Received: \(3,\)"),
        (np.ones((2, 3)), np.eye(4), r"Expected shape \(\.\.\., 4\).*Received: \(2, 3\)"),
        (np.float64(2), np.eye(3), r"at least one axis.*Received: \(\)"),
        (np.ones((2, 3), int), np.eye(3), "floating-point dtype.*Received: int64"),
        (np.ones((2, 3), "float32"), np.eye(3), "share one dtype.*Received: x float32, w float64"),
        (np.ones((2, 3)), np.diag([1, np.nan, np.inf]), "finite.*Received: 2 non-finite"),
    ],
)
@pytest.mark.parametrize("function", [ops.reflect, ops.jacobian, ops.log_det_jacobian])
def test_bad_input(function, x, w, message):
    with pytest.raises(ValueError, match=message):
        function(x, w)
