import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref import bijectors


def test_is_the_product_of_the_reflections_of_tfp(rng, dtype):
    v, x = rng.normal(size=(5, 3)), tf.constant(rng.normal(size=(4, 5)), dtype)
    stock = [tfp.bijectors.Householder(tf.constant(c / np.linalg.norm(c), dtype)) for c in v.T]
    expected = tfp.bijectors.Chain(stock).forward(x)
    bijector = bijectors.Householder(v.astype(dtype))
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(bijector.forward(x), expected, atol=tolerance)
    np.testing.assert_allclose(bijector.inverse(tf.identity(expected)), x, atol=tolerance)
    assert bijector.is_constant_jacobian
    np.testing.assert_array_equal(bijector.forward_log_det_jacobian(x), np.zeros(4))


def test_zero_columns_are_the_identity(rng):
    x = tf.constant(rng.normal(size=(2, 4)))
    np.testing.assert_array_equal(bijectors.Householder(np.zeros((4, 2))).forward(x), x)


def test_parameters():
    assert bijectors.Householder.parameter_properties()["v"].event_ndims == 2
    v = tf.Variable(tf.ones((3, 2)))
    assert bijectors.Householder(v).v is v
    with pytest.raises(ValueError, match=r"`v` must have 2 axes or more. Expected shape \(..., d, k\). Received: \(3,\)"):
        bijectors.Householder([1.0, 2.0, 3.0])
