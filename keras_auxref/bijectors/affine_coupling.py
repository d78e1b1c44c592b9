"""Affine coupling as a TFP bijector."""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref.bijectors._base import map_events
from keras_auxref.bijectors._cache import FreshBijector
from keras_auxref.ops.coupling import (
    build_network,
    checked_bound,
    couple,
    coupling_log_det,
    coupling_sizes,
    scaled,
    scaled_inverse,
)


class AffineCoupling(FreshBijector):
    """The two parts x_a, x_b of the last axis, of sizes ⌊d/2⌋ and ⌈d/2⌉: the first moves the second.

        (t, r) = network(x_a)        log s = bound·tanh(r/bound)
        y_a = x_a                    y_b = (x_b + t)·s                log|det ∂y/∂x| = Σ log s

    The trainable variables are those of the network.

    Args:
        network: Any Keras layer or model from x_a, with one batch axis, to a tensor with twice the channels of x_b: t first,
            then r. A network that is not built is built on first use; until then there are no variables.
        bound: The bound on |log s|.
        event_ndims: How many trailing axes the network reads: 1 for vectors, 3 for images. By default one less than the rank of
            the input that the network was built for, and 1 if it was not built.
        validate_args: As in every TFP bijector; shapes are checked in any case.
        name: Name of the bijector.

    Example:
    >>> import keras
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> from keras_auxref.bijectors import AffineCoupling
    >>> bijector = AffineCoupling(keras.layers.Dense(4))  # of four features two are moved, by t and s for each
    >>> x = np.ones((3, 4), "float32")
    >>> np.allclose(bijector.inverse(tf.identity(bijector.forward(x))), x, atol=1e-6)
    True

    Reference: Dinh, Sohl-Dickstein & Bengio, "Density Estimation using Real NVP", ICLR 2017.
    """

    def __init__(
        self,
        network: keras.layers.Layer,
        bound: float = 2.0,
        event_ndims: int | None = None,
        validate_args: bool = False,
        name: str = "affine_coupling",
    ) -> None:
        parameters = dict(locals())
        if not isinstance(network, keras.layers.Layer):
            raise ValueError(f"`network` must be a Keras layer or model. Expected a `keras.layers.Layer`. Received: {network!r}")
        with tf.name_scope(name) as name:
            # Outside TensorFlow's tracking: a Keras layer is not a tf.Module.
            self._network = self._no_dependency(network)
            self._network_variables: list[tf.Variable] = []
            self._bound = checked_bound(bound)
            self._channels: int | None = None
            super().__init__(
                forward_min_event_ndims=event_ndims or _event_ndims(network),
                validate_args=validate_args,
                parameters=parameters,
                name=name,
            )
        self._list_variables()

    @classmethod
    def _parameter_properties(cls, dtype: tf.DType) -> dict[str, tfp.util.ParameterProperties]:
        return {}

    @property
    def network(self) -> keras.layers.Layer:
        """The Keras layer or model."""
        return self._network

    def _forward(self, x: tf.Tensor) -> tf.Tensor:
        y, log_det = self._map_events(scaled, x)
        # The network has run: keep its log-determinant in TFP's cache.
        self._cache.forward_attributes(x)["ildj"] = -log_det
        return y

    def _inverse(self, y: tf.Tensor) -> tf.Tensor:
        x, log_det = self._map_events(scaled_inverse, y)
        self._cache.inverse_attributes(y)["ildj"] = -log_det
        return x

    def _forward_log_det_jacobian(self, x: tf.Tensor) -> tf.Tensor:
        return self._map_events(scaled, x)[1]

    def _map_events(self, move: Callable[..., tuple[tf.Tensor, tf.Tensor]], x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        axes, bounded = self.forward_min_event_ndims, functools.partial(move, bound=self._bound)

        def one_batch_axis(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            self._build(x)
            value, log_scale = couple(x, self._network, bounded)
            return value, coupling_log_det(log_scale, axes)

        return map_events(one_batch_axis, x, axes)

    def _build(self, x: tf.Tensor) -> None:
        if self._channels == x.shape[-1]:
            return
        size, moved = coupling_sizes(x.shape[-1], "AffineCoupling")
        build_network(self._network, (None, *x.shape[1:-1], size), 2 * moved, x.dtype.name, "AffineCoupling")
        self._channels = x.shape[-1]
        self._list_variables()

    def _list_variables(self) -> None:
        self._network_variables = [variable.value for variable in self._network.weights]


def _event_ndims(network: keras.layers.Layer) -> int:
    shape = getattr(network, "input_shape", None) if network.built else None
    return len(shape) - 1 if isinstance(shape, tuple) else 1
