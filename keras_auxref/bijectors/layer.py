"""A Keras layer as a TFP bijector."""

from collections.abc import Callable

import keras
import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref.bijectors._base import map_events
from keras_auxref.bijectors._cache import FreshBijector
from keras_auxref.bijectors._validation import checked_inverse
from keras_auxref.invertible import Invertible
from keras_auxref.typing import Shape


class LayerBijector(FreshBijector):
    """A view of an invertible Keras layer as a TFP bijector: it uses the weights of the layer and has none of its own.

    Keras variables are not `tf.Variable`s, so TFP would freeze their values; this bijector calls the layer instead, and lists
    the variables behind its weights, so that `trainable_variables` is what an optimiser needs. Inputs may have any number of
    axes before an event.

    Args:
        layer: A built layer with the interface of `keras_auxref.invertible.Invertible`.
        validate_args: Raise `tf.errors.InvalidArgumentError` if the inverse did not find a preimage, or if an auxiliary
            reflection in the layer is not proven to have only one.
        name: Name of the bijector.

    Example:
    >>> import tensorflow_probability as tfp
    >>> from keras_auxref import FactoredReflection
    >>> from keras_auxref.bijectors import LayerBijector
    >>> layer = FactoredReflection()
    >>> layer.build((None, 4))
    >>> bijector = LayerBijector(layer)  # or `layer.bijector()`
    >>> normal = tfp.distributions.MultivariateNormalDiag([0.0, 0.0, 0.0, 0.0])
    >>> tfp.distributions.TransformedDistribution(normal, bijector).sample(3, seed=1).shape
    TensorShape([3, 4])
    """

    def __init__(self, layer: keras.layers.Layer, validate_args: bool = False, name: str | None = None) -> None:
        parameters = dict(locals())
        if not isinstance(layer, Invertible):
            raise ValueError(f"LayerBijector needs an invertible layer. Expected a layer with `Invertible`. Received: {layer!r}")
        super().__init__(
            forward_min_event_ndims=layer.event_ndims,
            inverse_min_event_ndims=layer.inverse_event_ndims,
            is_constant_jacobian=layer.constant_jacobian,
            dtype=tf.as_dtype(layer.compute_dtype),
            validate_args=validate_args,
            parameters=parameters,
            name=name or layer.name,
        )
        # Outside TensorFlow's tracking: a Keras layer is not a tf.Module.
        self._layer = self._no_dependency(layer)
        self._layer_variables = [variable.value for variable in layer.weights]  # type: ignore[attr-defined]

    @classmethod
    def _parameter_properties(cls, dtype: tf.DType) -> dict[str, tfp.util.ParameterProperties]:
        return {}  # no tensor is an argument

    @property
    def layer(self) -> keras.layers.Layer:
        """The layer that this is a view of."""
        return self._layer

    def _forward(self, x: tf.Tensor) -> tf.Tensor:
        if not self._one_pass():
            return map_events(self._layer, x, self._layer.event_ndims)
        y, log_det = map_events(self._layer.forward_and_log_det, x, self._layer.event_ndims)
        self._cache.forward_attributes(x)["ildj"] = -log_det
        return y

    def _one_pass(self) -> bool:
        """Whether to compute the log-determinant along with the value: a graph prunes it if unused, but eagerly it takes time."""
        shares = type(self._layer).forward_and_log_det is not Invertible.forward_and_log_det
        return shares and (self._layer.cheap_log_det or not tf.executing_eagerly())

    def _inverse(self, y: tf.Tensor) -> tf.Tensor:
        x = map_events(self._layer.inverse, y, self._layer.inverse_event_ndims)
        if not self.validate_args:
            return x
        proofs = [part.proof() for part in self._layer.inverse_parts()]
        return checked_inverse(x, y, self, [proof for proof in proofs if proof is not None])

    def _forward_log_det_jacobian(self, x: tf.Tensor) -> tf.Tensor:
        return map_events(self._layer.log_det_jacobian, x, self._layer.event_ndims)

    def _forward_event_shape(self, input_shape: tf.TensorShape) -> tf.TensorShape:
        return _event_shape(self._layer.compute_output_shape, input_shape, self.forward_min_event_ndims)

    def _inverse_event_shape(self, output_shape: tf.TensorShape) -> tf.TensorShape:
        return _event_shape(self._layer.inverse_output_shape, output_shape, self.inverse_min_event_ndims)

    def _forward_event_shape_tensor(self, input_shape: tf.Tensor) -> tf.Tensor:
        return _event_shape_tensor(self._layer.compute_output_shape, input_shape, self.forward_min_event_ndims)

    def _inverse_event_shape_tensor(self, output_shape: tf.Tensor) -> tf.Tensor:
        return _event_shape_tensor(self._layer.inverse_output_shape, output_shape, self.inverse_min_event_ndims)


def _event_shape(function: Callable[[Shape], Shape], shape: tf.TensorShape, event_ndims: int) -> tf.TensorShape:
    """The shape after a layer; axes before its event do not change."""
    if shape.rank is None:
        return tf.TensorShape(None)
    if shape.rank < event_ndims:
        raise ValueError(f"Expected the shape of an event of {event_ndims} axes or more. Received: {tuple(shape)}")
    lead, event = shape[: shape.rank - event_ndims], shape[shape.rank - event_ndims :]
    return lead.concatenate(function((None, *event))[1:])


def _event_shape_tensor(function: Callable[[Shape], Shape], shape: tf.Tensor, event_ndims: int) -> tf.Tensor:
    known = tf.get_static_value(shape)
    sizes = tf.unstack(shape) if known is None else [int(size) for size in known]
    lead, event = sizes[: len(sizes) - event_ndims], sizes[len(sizes) - event_ndims :]
    return tf.stack([tf.cast(size, tf.int32) for size in (*lead, *function((None, *event))[1:])])
