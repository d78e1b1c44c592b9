import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import bijectors, flows


def test_is_the_formula(rng, dtype):
    shift, log_scale, x = (rng.normal(size=shape).astype(dtype) for shape in ((3,), (3,), (2, 4, 3)))
    bijector = bijectors.ActNorm(shift, log_scale)
    np.testing.assert_allclose(bijector.forward(x), (x + shift) * np.exp(log_scale), rtol=1e-5)
    np.testing.assert_allclose(bijector.forward_log_det_jacobian(x), np.full((2, 4), log_scale.sum()), rtol=1e-5)
    assert bijector.is_constant_jacobian


def test_starts_from_data_as_the_layer_does(rng, dtype):
    x = (rng.normal(size=(50, 3)) * [1e-3, 1, 1e4] + [5, -1, 0]).astype(dtype)
    layer = flows.ActNorm(dtype=dtype)
    layer.initialize(x)
    bijector = bijectors.ActNorm.from_data(x, name="norm")
    assert len(bijector.trainable_variables) == 2
    np.testing.assert_array_equal(bijector.shift, layer.shift)
    np.testing.assert_array_equal(bijector.log_scale, layer.log_scale)
    y = bijector.forward(x).numpy()
    np.testing.assert_allclose(y.mean(axis=0), 0, atol=5e-3 if dtype == "float32" else 1e-10)
    np.testing.assert_allclose(y.std(axis=0), 1, rtol=1e-3)


def test_initialize_assigns_to_the_variables(rng):
    bijector = bijectors.ActNorm(tf.Variable(tf.zeros(2)), tf.Variable(tf.zeros(2)))
    x = rng.normal(size=(100, 2)).astype("float32") * 3 + 1
    before = bijector.forward(x)
    bijector.initialize(x)
    after = bijector.forward(x).numpy()
    np.testing.assert_array_equal(before, x)
    np.testing.assert_allclose(after.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(after.std(axis=0), 1, atol=1e-5)


def test_errors():
    with pytest.raises(ValueError, match=r"Expected two `tf.Variable`s"):
        bijectors.ActNorm([0.0], [0.0]).initialize([[1.0]])
    with pytest.raises(ValueError, match=r"Expected \(..., 2\) for both. Received: log_scale \(3,\)"):
        bijectors.ActNorm([0.0, 0.0], [0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match=r"`shift` must have 1 axes or more. Expected shape \(..., d\). Received: \(\)"):
        bijectors.ActNorm(0.0, [0.0])
    with pytest.raises(ValueError, match="must be finite"):
        bijectors.ActNorm.from_data([[1.0], [np.nan]])
