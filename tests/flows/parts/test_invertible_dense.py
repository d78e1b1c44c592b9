import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref.flows import InvertibleDense
from keras_auxref.ops.log_abs_det import log_abs_det, solve_rows
from tests.support import differences, gradients, orthogonal, relative


def _layer(w, dtype="float32"):
    layer = InvertibleDense(dtype=dtype)
    layer.build((None, len(w)))
    layer.kernel.assign(w)
    return layer


def test_rows_compute_x_times_w_transposed(rng, dtype):
    w, x = rng.normal(size=(3, 3)), rng.normal(size=(2, 4, 3)).astype(dtype)
    y = _layer(w, dtype)(x)
    np.testing.assert_allclose(y, np.einsum("ij,abj->abi", w, x), rtol=1e-5, atol=1e-6)


def test_starts_orthogonal_and_may_stay_fixed(rng):
    layer = InvertibleDense(trainable=False)
    layer.build((None, 5))
    assert layer.trainable_weights == []
    np.testing.assert_allclose(layer.kernel @ tf.transpose(layer.kernel), np.eye(5), atol=1e-6)
    np.testing.assert_allclose(layer.log_det_jacobian(np.ones((2, 5))), 0, atol=1e-6)


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6])
def test_inverse_to_the_rounding_of_float32(rng, condition):
    """‖W x − y‖ ≤ a few ε‖W‖‖x‖, whatever the condition of W, with W as it is in float32."""
    d = 16
    u, v = orthogonal(d, rng), orthogonal(d, rng)
    w = ((u * np.geomspace(1, 1 / condition, d)) @ v).astype("float32")
    y = rng.normal(size=(50, d)).astype("float32")
    x = np.asarray(_layer(w).inverse(y), np.float64)
    residual = np.linalg.norm(x @ w.astype(np.float64).T - y, axis=-1)
    assert (residual <= 4 * 2.0**-23 * np.linalg.norm(x, axis=-1)).all()


@pytest.mark.parametrize("d", [1, 2, 7, 48])
def test_log_abs_det_is_that_of_numpy(rng, dtype, d):
    w = rng.normal(size=(d, d)).astype(dtype)
    value = log_abs_det(w)
    assert value.dtype == dtype
    np.testing.assert_allclose(value, np.linalg.slogdet(w.astype(np.float64))[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e3, 1e30])
def test_log_abs_det_of_tiny_and_huge_matrices(rng, size):
    w = (size * rng.normal(size=(10, 10))).astype("float32")
    expected = np.linalg.slogdet(w.astype(np.float64) / size)[1] + 10 * np.log(size)
    np.testing.assert_allclose(log_abs_det(w), expected, rtol=1e-6)
    # Columns of very different lengths are not a singular matrix.
    np.testing.assert_allclose(log_abs_det(np.diag([1.0, size])), np.log(size), rtol=1e-12)


def test_gradient_of_log_abs_det(rng):
    w = rng.normal(size=(5, 5))
    gradient = gradients(log_abs_det, [w], 1.5)[1]
    np.testing.assert_allclose(gradient, 1.5 * np.linalg.inv(w).T, rtol=1e-9)
    assert relative(gradient, differences(lambda w: np.linalg.slogdet(w)[1], [w], np.array(1.5))[0]) < 1e-6


def test_second_derivative_of_log_abs_det(rng):
    w, direction = tf.constant(rng.normal(size=(4, 4))), rng.normal(size=(4, 4))

    def slope(w):
        w = tf.convert_to_tensor(w)
        with tf.GradientTape() as tape:
            tape.watch(w)
            value = log_abs_det(w)
        return tf.reduce_sum(tape.gradient(value, w) * direction)

    second = gradients(slope, [w], 1.0)[1]
    assert relative(second, differences(slope, [w.numpy()], np.array(1.0))[0]) < 1e-6


@pytest.mark.parametrize("kind", ["zero", "rank one", "repeated row", "repeated column", "rank d - 1"])
def test_a_singular_matrix_has_log_abs_det_minus_infinity(rng, dtype, kind):
    w = rng.normal(size=(6, 6)).astype(dtype)
    if kind == "zero":
        w *= 0
    elif kind == "rank one":
        w = np.outer(np.arange(1, 7), np.arange(2, 8)).astype(dtype)
    elif kind == "repeated row":
        w[3] = w[1]
    elif kind == "repeated column":
        w[:, 3] = w[:, 1]
    else:
        integers = rng.integers(-9, 9, size=(6, 6)).astype(dtype)  # sums of integers are exact
        w = integers
        w[5] = w[:5].sum(axis=0)
    value, gradient = gradients(log_abs_det, [w], 1.0)
    assert value == -np.inf
    assert np.isnan(gradient).all()
    assert np.all(np.asarray(_layer(w, dtype).log_det_jacobian(np.ones((2, 6)))) == -np.inf)


def test_nan_stays_nan():
    w = np.eye(3)
    w[1, 1] = np.nan
    assert np.isnan(log_abs_det(w))


def test_gradients_of_the_solve(rng):
    w, y, cotangent = rng.normal(size=(4, 4)), rng.normal(size=(3, 4)), rng.normal(size=(3, 4))
    x, gw, gy = gradients(solve_rows, [w, y], cotangent)
    np.testing.assert_allclose(x, np.linalg.solve(w, y.T).T, rtol=1e-9)
    expected = differences(lambda w, y: np.linalg.solve(w, y.T).T, [w, y], cotangent)
    assert relative(gw, expected[0]) < 1e-6
    assert relative(gy, expected[1]) < 1e-6


def test_value_and_gradient_compile(rng):
    layer, x = _layer(rng.normal(size=(4, 4))), tf.constant(rng.normal(size=(3, 4)), tf.float32)

    def function(x):
        with tf.GradientTape() as tape:
            y, log_det = layer.forward_and_log_det(x)
            value = tf.reduce_sum(layer.inverse(tf.sin(y))) + tf.reduce_sum(log_det)
        return tape.gradient(value, layer.kernel.value)

    np.testing.assert_allclose(tf.function(function, jit_compile=True)(x), function(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_keeps_the_determinant_of_the_weight(rng, policy):
    layer = InvertibleDense(dtype=policy)
    x = rng.normal(size=(3, 4)).astype("float32")
    assert layer(x).dtype == layer.compute_dtype
    assert layer.kernel.dtype == "float32"
    np.testing.assert_allclose(tf.cast(layer.inverse(layer(x)), tf.float32), x, atol=0.05)


def test_regularizer_and_config():
    layer = InvertibleDense("identity", keras.regularizers.L2(0.5))
    layer.build((None, 3))
    assert float(sum(layer.losses)) == pytest.approx(1.5)
    again = InvertibleDense.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()


def test_built_while_a_step_is_traced(rng):
    model = keras.Sequential([InvertibleDense()])
    model.compile("sgd", "mse")
    x = rng.normal(size=(8, 4)).astype("float32")
    model.fit(x, x, verbose=0)
    assert np.isfinite(model.layers[0].kernel).all()


def test_errors():
    with pytest.raises(ValueError, match=r"Expected shape \(batch, ..., d\). Received: \(None, None\)"):
        InvertibleDense().build((None, None))
    with pytest.raises(ValueError, match="floating-point"):
        InvertibleDense(dtype="int32")
