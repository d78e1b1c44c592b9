import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import bijectors, flows


class Counting(keras.layers.Dense):
    """Counts its own calls."""

    calls = 0

    def call(self, inputs):
        Counting.calls += 1
        return super().call(inputs)


def test_is_the_layer(rng):
    x = rng.normal(size=(3, 4, 4, 3)).astype("float32")
    layer = flows.AffineCoupling(hidden=8, bound=0.7)
    layer(x)
    for weight in layer.weights:
        weight.assign_add(rng.normal(size=weight.shape))
    y, log_det = layer.forward_and_log_det(x)
    bijector = bijectors.AffineCoupling(layer.network, bound=0.7)
    assert bijector.forward_min_event_ndims == 3
    np.testing.assert_allclose(bijector.forward(x), y, rtol=1e-6)
    np.testing.assert_allclose(bijector.forward_log_det_jacobian(x), log_det, rtol=1e-5)
    assert bijector.network is layer.network


def test_a_network_is_built_at_the_first_use(rng):
    bijector = bijectors.AffineCoupling(keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(6)]))
    assert bijector.trainable_variables == ()
    x = tf.constant(rng.normal(size=(2, 5)), tf.float32)
    y = bijector.forward(x)
    assert len(bijector.trainable_variables) == 4
    np.testing.assert_allclose(bijector.inverse(tf.identity(y)), x, atol=1e-5)
    np.testing.assert_array_equal(y[:, :2], x[:, :2])
    assert np.abs(y[:, 2:] - x[:, 2:]).max() > 1e-3


@pytest.mark.parametrize("direction", ["forward", "inverse"])
def test_one_pass_of_the_network_for_value_and_log_det(rng, direction):
    bijector = bijectors.AffineCoupling(Counting(4))
    x = tf.constant(rng.normal(size=(2, 4)), tf.float32)
    bijector.forward(tf.identity(x))
    Counting.calls = 0
    getattr(bijector, direction)(x)
    log_det = getattr(bijector, f"{direction}_log_det_jacobian")(x)
    assert Counting.calls == 1
    again = getattr(bijector, f"{direction}_log_det_jacobian")(tf.identity(x))
    np.testing.assert_allclose(log_det, again, rtol=1e-6)


def test_bound_holds_for_any_network():
    network = keras.layers.Dense(2, kernel_initializer="zeros", bias_initializer=keras.initializers.Constant(1e30))
    bijector = bijectors.AffineCoupling(network, bound=1.5)
    assert float(bijector.forward_log_det_jacobian(tf.zeros((1, 2)))[0]) == pytest.approx(1.5)


def test_event_ndims_of_a_network_that_is_not_built():
    network = keras.layers.Conv2D(4, 3, padding="same")
    assert bijectors.AffineCoupling(network).forward_min_event_ndims == 1
    bijector = bijectors.AffineCoupling(network, event_ndims=3)
    assert bijector.forward_log_det_jacobian(tf.zeros((2, 5, 4, 4, 4))).shape == (2, 5)


def test_errors():
    with pytest.raises(ValueError, match=r"Expected a `keras.layers.Layer`"):
        bijectors.AffineCoupling(lambda x: x)
    with pytest.raises(ValueError, match=r"Expected 0 < bound < ∞. Received: 0"):
        bijectors.AffineCoupling(keras.layers.Dense(2), bound=0)
    with pytest.raises(ValueError, match=r"Expected \(None, 4\) for an input of shape \(None, 2\). Received: \(None, 5\)"):
        bijectors.AffineCoupling(keras.layers.Dense(5)).forward(tf.zeros((2, 4)))
    with pytest.raises(ValueError, match=r"Expected a last axis of size ≥ 2. Received: 1"):
        bijectors.AffineCoupling(keras.layers.Dense(2)).forward(tf.zeros((2, 1)))
