"""Affine coupling: a network of one part of the channels moves the other part."""

import math
from typing import Any

import keras
import numpy as np

from keras_auxref._keras import PACKAGE
from keras_auxref.invertible import Invertible
from keras_auxref.kernels.certificate import Certificate, not_proven, proven
from keras_auxref.layers._checks import as_input, last_axis, require_built, require_floating
from keras_auxref.ops._coupling import build_network, checked_bound, couple, coupling_log_det, coupling_sizes, uncouple
from keras_auxref.typing import Shape, Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class AffineCoupling(Invertible, keras.layers.Layer):
    """Affine coupling of the two parts x_a, x_b of the last axis, of sizes ⌊d/2⌋ and ⌈d/2⌉.

        (t, r) = network(x_a)        log s = bound·tanh(r/bound)
        y_a = x_a                    y_b = (x_b + t)·s                log|det ∂y/∂x| = Σ log s

    The inverse costs what the map costs, and needs no inverse of the network. The bound keeps s within exp(±bound), so that no
    single coupling can overflow. One event is everything but the batch axis, because a network may mix pixels.

    Args:
        network: Any Keras layer or model from x_a to a tensor with twice the channels of x_b: t first, then r. By default two
            hidden layers with ReLU and a last layer that starts at zero, so that the coupling starts as the identity: dense
            for inputs of rank 2, convolutions 3×3, 1×1, 3×3 for images of rank 4.
        hidden: Channels of the hidden layers of the default network.
        bound: The bound on |log s|.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: Tensor of shape `(batch, ..., d)`, d ≥ 2.

    Output: A tensor of the same shape.

    Example:
    >>> import numpy as np
    >>> layer, x = AffineCoupling(hidden=16), np.ones((2, 4, 4, 3), "float32")
    >>> y, log_det = layer.forward_and_log_det(x)
    >>> bool(np.all(y == x)), log_det.shape
    (True, TensorShape([2]))

    Reference: Dinh, Sohl-Dickstein & Bengio, "Density Estimation using Real NVP", ICLR 2017.
    """

    cheap_log_det = True

    def __init__(self, network: Any = None, hidden: int = 64, bound: float = 2.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        require_floating(self, self.compute_dtype)
        if network is not None and not isinstance(network, keras.layers.Layer):
            raise ValueError(f"`network` must be a Keras layer or model. Expected a `keras.layers.Layer`. Received: {network!r}")
        if not isinstance(hidden, int) or hidden < 1:
            raise ValueError(f"`hidden` must be a positive integer. Expected 1, 2, 3, … Received: {hidden!r}")
        self.network: Any = network
        self.hidden, self.bound = hidden, checked_bound(bound)
        self._own_network = network is None

    def build(self, input_shape: Shape) -> None:
        d = last_axis(self, input_shape)
        size, moved = coupling_sizes(d, type(self).__name__)
        if self._own_network:
            self.network = self._default_network((*input_shape[:-1], size), 2 * moved)
        build_network(self.network, (*input_shape[:-1], size), 2 * moved, self.compute_dtype)
        self.event_ndims = len(input_shape) - 1
        self.input_spec = keras.layers.InputSpec(ndim=len(input_shape), axes={-1: d})

    def _default_network(self, input_shape: Shape, channels: int) -> Any:
        dense, conv = keras.layers.Dense, keras.layers.Conv2D
        hidden = {"activation": "relu", "dtype": self.dtype_policy}
        last = {"kernel_initializer": "zeros", "dtype": self.dtype_policy}
        if len(input_shape) == 2:
            parts = [dense(self.hidden, **hidden), dense(self.hidden, **hidden), dense(channels, **last)]
        elif len(input_shape) == 4:
            parts = [
                conv(self.hidden, 3, padding="same", **hidden),
                conv(self.hidden, 1, **hidden),
                conv(channels, 3, padding="same", **last),
            ]
        else:
            raise ValueError(
                "The default network of AffineCoupling is for vectors and images; give a `network` for anything else. Expected "
                f"an input of rank 2 or 4. Received: rank {len(input_shape)}"
            )
        # A `Sequential` has no dtype, and would round a float64 input to float32.
        inputs = outputs = keras.Input(batch_shape=(None, *input_shape[1:]), dtype=self.compute_dtype)
        for part in parts:
            outputs = part(outputs)
        return keras.Model(inputs, outputs, name="network")

    def call(self, inputs: Tensor) -> Tensor:
        return couple(as_input(self, inputs), self.network, self.bound)[0]

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return input_shape

    def forward_and_log_det(self, x: Tensor, training: bool | None = None) -> tuple[Tensor, Tensor]:
        """(y, Σ log s), with one pass of the network."""
        x = keras.ops.convert_to_tensor(x, dtype=self.compute_dtype)
        if not self.built:
            self(x)
        y, log_scale = couple(x, self.network, self.bound)
        return y, coupling_log_det(log_scale, self.event_ndims)

    def inverse(self, y: Tensor) -> Tensor:
        """x = (y_a, y_b/s − t), with one pass of the network."""
        return uncouple(self._tensor(y, "inverse"), self.network, self.bound)[0]

    def log_det_jacobian(self, x: Tensor) -> Tensor:
        """Σ log s of every event, shape `(batch,)`."""
        return self.forward_and_log_det(self._tensor(x, "log_det_jacobian"))[1]

    def certificate(self) -> Certificate:
        """x_b can be solved for whatever the network says, as long as it says numbers and exp(±bound) is one."""
        require_built(self, "certificate")
        limits = keras.ops.exp(keras.ops.convert_to_tensor([-self.bound, self.bound], dtype=self.compute_dtype))
        low, high = keras.ops.convert_to_numpy(keras.ops.cast(limits, "float64"))
        if not (low > 0 and high < math.inf):
            return not_proven(f"scales up to exp(±{self.bound:g}) leave {self.compute_dtype}")
        weights = (keras.ops.convert_to_numpy(weight).astype(np.float64) for weight in self.network.weights)
        if not all(np.isfinite(weight).all() for weight in weights):
            return not_proven("the network has weights that are not finite")
        return proven("x_a stays as it is, and with it shift and scale of x_b are known, the scale never zero")

    def get_config(self) -> dict[str, Any]:
        network = None if self._own_network else keras.saving.serialize_keras_object(self.network)
        return {**super().get_config(), "network": network, "hidden": self.hidden, "bound": self.bound}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "AffineCoupling":
        config = dict(config)
        if config.get("network") is not None:
            config["network"] = keras.saving.deserialize_keras_object(config["network"])
        return cls(**config)
