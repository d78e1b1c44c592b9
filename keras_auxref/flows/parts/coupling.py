"""What all couplings share: a network of one part of the channels moves the other part, entry by entry."""

from functools import partial
from typing import Any, Self, Unpack

import keras
import numpy as np

from keras_auxref.certificate import Certificate, not_proven, proven
from keras_auxref.invertible import Invertible
from keras_auxref.layers.checks import as_input, last_axis, require_built, require_floating
from keras_auxref.ops import backend
from keras_auxref.ops.checks import whole_number, whole_number_or_none
from keras_auxref.ops.coupling import build_network, couple, coupling_log_det, coupling_sizes
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, DType, LayerArguments, Shape, Tensor


class CouplingArguments(LayerArguments, total=False):
    """The keyword arguments of every coupling."""

    context: int | None
    norm: bool


class Coupling(Invertible, keras.layers.Layer):
    """Coupling of the two parts x_a, x_b of the last axis, of sizes ⌊d/2⌋ and ⌈d/2⌉.

        y_a = x_a        y_b = h(x_b; network(x_a))        log|det ∂y/∂x| = Σ log h′

    h is increasing in every entry of x_b. A subclass has `move` (h and log h′), `move_back` (h⁻¹ and log h′), and
    `parameters_per_channel`, how many numbers the network computes for each channel of x_b. One event is everything but the
    batch axis, because a network may mix pixels.

    With `context=k` every method also takes a context, a tensor of shape `(batch, k)`, and the network sees it along with x_a:

        y_b = h(x_b; network(x_a, context))

    as k more channels of x_a, the same for all pixels of an image. A context with the rank of x has its own k channels for
    every pixel.

    Args:
        network: The network. By default two hidden layers with ReLU and a last one that starts at zero.
        hidden: Channels of the hidden layers of the default network.
        context: The number of entries of a context, or None.
        norm: Whether the default network normalises its hidden channels.
        **kwargs: Arguments of `keras.layers.Layer`.
    """

    cheap_log_det = True
    parameters_per_channel: int = 1
    settings: tuple[str, ...] = ()  # the arguments of a subclass beside these, which are attributes too

    def __init__(
        self,
        network: keras.layers.Layer | None = None,
        hidden: int = 64,
        *,
        context: int | None = None,
        norm: bool = False,
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        super().__init__(**kwargs)
        require_floating(self, self.compute_dtype)
        if network is not None and not isinstance(network, keras.layers.Layer):
            raise ValueError(f"`network` must be a Keras layer or model. Expected a `keras.layers.Layer`. Received: {network!r}")
        self.network: Any = network
        self.hidden, self.context = whole_number("hidden", hidden), whole_number_or_none("context", context)
        self.norm = bool(norm)
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
        shape, channels = (*input_shape[:-1], size + (self.context or 0)), self.parameters_per_channel * moved
        if self._own_network:
            self.network = default_network(shape, channels, self.hidden, self.dtype_policy, name, self.norm)
        else:
            build_network(self.network, shape, channels, self.compute_dtype, name)
        self.event_ndims = len(input_shape) - 1
        self.input_spec = keras.layers.InputSpec(ndim=len(input_shape), axes={-1: d})

    def call(self, inputs: Tensor, context: Tensor | None = None) -> Tensor:
        return self.forward_and_log_slope(as_input(self, inputs), self._context(context))[0]

    def forward_and_log_det(
        self, x: Tensor, training: bool | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(y, log|det ∂y/∂x|), with one pass of the network."""
        x = keras.ops.convert_to_tensor(x, dtype=self.compute_dtype)
        y, log_slope = self.forward_and_log_slope(x, self._context(context))
        return y, coupling_log_det(log_slope, self.event_ndims)

    def forward_and_log_slope(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """y, and log h′ of every entry that is moved."""
        return couple(x, self.network, self.move, context)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        """x with layer(x, context) = y, with one pass of the network."""
        return couple(self._tensor(y, "inverse"), self.network, self.move_back, self._context(context))[0]

    def log_det_jacobian(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """log|det ∂y/∂x| of every event, shape `(batch,)`."""
        return self.forward_and_log_det(self._tensor(x, "log_det_jacobian"), context=context)[1]

    def _context(self, context: Tensor | None) -> Tensor | None:
        """The context as a tensor, where this coupling has one."""
        if (context is None) != (self.context is None):
            expected = "no context" if self.context is None else f"a context of shape (batch, {self.context})"
            received = "none" if context is None else f"shape {tuple(context.shape)}"
            raise ValueError(
                f"{type(self).__name__} was made with context={self.context}. Expected {expected}. Received: {received}"
            )
        if context is None:
            return None
        context = keras.ops.convert_to_tensor(context, dtype=self.compute_dtype)
        if context.shape[-1] != self.context or len(context.shape) not in (2, self.event_ndims + 1):
            raise ValueError(
                f"The context does not fit this {type(self).__name__}. Expected shape (batch, {self.context}). "
                f"Received: {tuple(context.shape)}"
            )
        return context

    def _certified(self, reason: str, **bounds: float) -> Certificate:
        """Proven for this reason, as long as the network has numbers for weights and exp(±bound) are numbers."""
        require_built(self, "certificate")
        for bound in bounds.values():
            limits = keras.ops.exp(keras.ops.convert_to_tensor([-bound, bound], dtype=self.compute_dtype))
            low, high = keras.ops.convert_to_numpy(keras.ops.cast(limits, "float64"))
            if not (low > 0 and high < np.inf):
                return not_proven(f"scales up to exp(±{bound:g}) leave {self.compute_dtype}")
        weights = (keras.ops.convert_to_numpy(weight).astype(np.float64) for weight in self.weights)
        if not all(np.isfinite(weight).all() for weight in weights):
            return not_proven("it has weights that are not finite")
        return proven(f"{reason}; no Lipschitz constant holds for every network")

    def get_config(self) -> Config:
        network = None if self._own_network else keras.saving.serialize_keras_object(self.network)
        names = ("hidden", "context", "norm", *self.settings)
        return {**super().get_config(), "network": network, **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        config = dict(config)
        if config.get("network") is not None:
            config["network"] = keras.saving.deserialize_keras_object(config["network"])
        return cls(**config)


@keras.saving.register_keras_serializable(PACKAGE)
class Conv2D(keras.layers.Conv2D):
    """A convolution of images in steps of one pixel that is fast in the loop of a flow, with XLA on a CPU, too."""

    def convolution_op(self, inputs: Tensor, kernel: Tensor) -> Tensor:
        return backend.convolve(inputs, kernel, self.padding)


def default_network(input_shape: Shape, channels: int, hidden: int, dtype: DType, name: str, norm: bool = False) -> keras.Model:
    """Two hidden layers with ReLU and a last one that starts at zero: dense for vectors, 3×3, 1×1 and 3×3 for images.

    With `norm` the channels of every pixel are normalised between a hidden layer and its ReLU.
    """
    dense, conv = keras.layers.Dense, partial(Conv2D, data_format="channels_last")
    inner = {"activation": None if norm else "relu", "dtype": dtype}
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
        if norm and part is not parts[-1]:
            outputs = keras.layers.ReLU(dtype=dtype)(keras.layers.LayerNormalization(dtype=dtype)(outputs))
    return keras.Model(inputs, outputs, name="network")
