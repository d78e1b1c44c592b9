"""What all couplings share: a network of one part of the channels moves the other part, entry by entry."""

from typing import Any, Self

import keras
import numpy as np

from keras_auxref.invertible import Invertible
from keras_auxref.kernels.certificate import Certificate, not_proven, proven
from keras_auxref.layers._checks import as_input, last_axis, require_built, require_floating
from keras_auxref.ops._coupling import build_network, couple, coupling_log_det, coupling_sizes
from keras_auxref.typing import Shape, Tensor


class Coupling(Invertible, keras.layers.Layer):
    """Coupling of the two parts x_a, x_b of the last axis, of sizes ⌊d/2⌋ and ⌈d/2⌉.

        y_a = x_a        y_b = h(x_b; network(x_a))        log|det ∂y/∂x| = Σ log h′

    h is increasing in every entry of x_b. A subclass has `move` (h and log h′), `move_back` (h⁻¹ and log h′), and
    `parameters_per_channel`, how many numbers the network has to say about each channel of x_b. One event is everything but the
    batch axis, because a network may mix pixels.
    """

    cheap_log_det = True
    parameters_per_channel: int = 1

    def __init__(self, network: Any = None, hidden: int = 64, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        require_floating(self, self.compute_dtype)
        if network is not None and not isinstance(network, keras.layers.Layer):
            raise ValueError(f"`network` must be a Keras layer or model. Expected a `keras.layers.Layer`. Received: {network!r}")
        if not isinstance(hidden, int) or hidden < 1:
            raise ValueError(f"`hidden` must be a positive integer. Expected 1, 2, 3, … Received: {hidden!r}")
        self.network: Any = network
        self.hidden = hidden
        self._own_network = network is None

    def move(self, b: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """(y_b, log ∂y_b/∂x_b) of x_b."""
        raise NotImplementedError

    def move_back(self, b: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """(x_b, log ∂y_b/∂x_b) of y_b."""
        raise NotImplementedError

    def build(self, input_shape: Shape) -> None:
        d, name = last_axis(self, input_shape), type(self).__name__
        size, moved = coupling_sizes(d, name)
        shape, channels = (*input_shape[:-1], size), self.parameters_per_channel * moved
        if self._own_network:
            self.network = default_network(shape, channels, self.hidden, self.dtype_policy, name)
        build_network(self.network, shape, channels, self.compute_dtype, name)
        self.event_ndims = len(input_shape) - 1
        self.input_spec = keras.layers.InputSpec(ndim=len(input_shape), axes={-1: d})

    def call(self, inputs: Tensor) -> Tensor:
        return couple(as_input(self, inputs), self.network, self.move)[0]

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return input_shape

    def forward_and_log_det(self, x: Tensor, training: bool | None = None) -> tuple[Tensor, Tensor]:
        """(y, log|det ∂y/∂x|), with one pass of the network."""
        x = keras.ops.convert_to_tensor(x, dtype=self.compute_dtype)
        if not self.built:
            self(x)
        y, log_slope = couple(x, self.network, self.move)
        return y, coupling_log_det(log_slope, self.event_ndims)

    def inverse(self, y: Tensor) -> Tensor:
        """x with layer(x) = y, with one pass of the network."""
        return couple(self._tensor(y, "inverse"), self.network, self.move_back)[0]

    def log_det_jacobian(self, x: Tensor) -> Tensor:
        """log|det ∂y/∂x| of every event, shape `(batch,)`."""
        return self.forward_and_log_det(self._tensor(x, "log_det_jacobian"))[1]

    def _certified(self, reason: str, **bounds: float) -> Certificate:
        """Proven for this reason, as long as the network has numbers for weights and exp(±bound) are numbers."""
        require_built(self, "certificate")
        for bound in bounds.values():
            limits = keras.ops.exp(keras.ops.convert_to_tensor([-bound, bound], dtype=self.compute_dtype))
            low, high = keras.ops.convert_to_numpy(keras.ops.cast(limits, "float64"))
            if not (low > 0 and high < np.inf):
                return not_proven(f"scales up to exp(±{bound:g}) leave {self.compute_dtype}")
        weights = (keras.ops.convert_to_numpy(weight).astype(np.float64) for weight in self.network.weights)
        if not all(np.isfinite(weight).all() for weight in weights):
            return not_proven("the network has weights that are not finite")
        return proven(reason)

    def get_config(self) -> dict[str, Any]:
        network = None if self._own_network else keras.saving.serialize_keras_object(self.network)
        return {**super().get_config(), "network": network, "hidden": self.hidden}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        config = dict(config)
        if config.get("network") is not None:
            config["network"] = keras.saving.deserialize_keras_object(config["network"])
        return cls(**config)


def default_network(input_shape: Shape, channels: int, hidden: int, dtype: Any, name: str) -> Any:
    """Two hidden layers with ReLU and a last one that starts at zero: dense for vectors, 3×3, 1×1 and 3×3 for images."""
    dense, conv = keras.layers.Dense, keras.layers.Conv2D
    inner = {"activation": "relu", "dtype": dtype}
    last = {"kernel_initializer": "zeros", "dtype": dtype}
    if len(input_shape) == 2:
        parts = [dense(hidden, **inner), dense(hidden, **inner), dense(channels, **last)]
    elif len(input_shape) == 4:
        parts = [
            conv(hidden, 3, padding="same", **inner),
            conv(hidden, 1, **inner),
            conv(channels, 3, padding="same", **last),
        ]
    else:
        raise ValueError(
            f"The default network of {name} is for vectors and images; give a `network` for anything else. Expected "
            f"an input of rank 2 or 4. Received: rank {len(input_shape)}"
        )
    # A `Sequential` has no dtype, and would round a float64 input to float32.
    compute_dtype = keras.dtype_policies.get(dtype).compute_dtype
    inputs = outputs = keras.Input(batch_shape=(None, *input_shape[1:]), dtype=compute_dtype)
    for part in parts:
        outputs = part(outputs)
    return keras.Model(inputs, outputs, name="network")
