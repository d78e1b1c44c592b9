"""A Keras layer seen as a TFP bijector."""

from typing import Any

import tensorflow as tf
import tensorflow_probability as tfp


class LayerBijector(tfp.bijectors.Bijector):
    """The view of an invertible Keras layer as a TFP bijector: it computes with the weights of the layer and owns none.

    Keras variables are not `tf.Variable`s, so TFP would freeze their values; this bijector calls the layer instead, and lists
    the variables behind its weights, so that `trainable_variables` is what an optimiser needs. Make a new one with
    `layer.bijector()` rather than keeping one through training: TFP caches values per bijector object.

    Args:
        layer: A built layer with `inverse` and `log_det_jacobian`, a map of the last axis.
        validate_args: Raise where the inverse did not find a preimage, instead of returning NaN.
        name: Name of the bijector.
    """

    def __init__(self, layer: Any, validate_args: bool = False, name: str | None = None) -> None:
        super().__init__(
            forward_min_event_ndims=1,
            inverse_min_event_ndims=1,
            dtype=tf.as_dtype(layer.compute_dtype),
            validate_args=validate_args,
            name=name or layer.name,
        )
        # Outside of TensorFlow's tracking: a Keras layer is not a tf.Module.
        self._layer = self._no_dependency(layer)
        self._layer_variables = [variable.value for variable in layer.weights]

    def _forward(self, x: tf.Tensor) -> tf.Tensor:
        return self._layer(x)

    def _inverse(self, y: tf.Tensor) -> tf.Tensor:
        x = self._layer.inverse(y)
        if not self.validate_args:
            return x
        found = tf.reduce_all(tf.math.is_finite(x) | ~tf.math.is_finite(y))
        message = f"The inverse of layer '{self._layer.name}' did not find a preimage for every vector."
        with tf.control_dependencies([tf.debugging.assert_equal(found, True, message=message)]):
            return tf.identity(x)

    def _forward_log_det_jacobian(self, x: tf.Tensor) -> tf.Tensor:
        return self._layer.log_det_jacobian(x)
