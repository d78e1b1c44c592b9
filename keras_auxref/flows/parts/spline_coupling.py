"""Coupling by splines: a network of one part of the channels gives every entry of the other part its own spline."""

from typing import Unpack

import keras

from keras_auxref.certificate import Certificate
from keras_auxref.flows.parts.coupling import Coupling, CouplingArguments
from keras_auxref.layers.checks import last_axis
from keras_auxref.ops import backend
from keras_auxref.ops.checks import whole_number
from keras_auxref.ops.coupling import checked_bound, couple, coupling_sizes, splined, splined_inverse
from keras_auxref.ops.spline import spline_parameters
from keras_auxref.package import PACKAGE
from keras_auxref.typing import DType, Shape, Tensor

OWN_RATE = 10.0
"""How much faster the splines of x_a train than the networks."""


@keras.saving.register_keras_serializable(PACKAGE)
class SplineCoupling(Coupling):
    """Coupling by monotone rational-quadratic splines, of the two parts x_a, x_b of the last axis.

        y_a = g(x_a),   g a spline with knots and slopes that are weights
        y_b = h(x_b),   h a spline with the knots and slopes that network(y_a) returns

    entry by entry, each with its own spline. Between knots xₖ and xₖ₊₁ = xₖ + w, with values yₖ and yₖ₊₁ = yₖ + s·w and slopes
    d₀ and d₁ there, and ξ = (x − xₖ)/w:

        h(x) = yₖ + s w (s ξ² + d₀ ξ(1 − ξ)) / (s + (d₀ + d₁ − 2s) ξ(1 − ξ))

    and the same for g. Outside [−bound, bound] both are the identity. g starts as the identity, and where the network returns
    zero h is the identity too. The inverse is a root of a quadratic equation, and costs as much as the map.

    Secants s are within exp(±slope_bound), and slopes at knots within a factor e of the harmonic mean of the secants beside them,
    for every output of the network. With the defaults no slope is below 0.03, and the inverse is within 10⁻⁵ of x_b in float32.
    Durkan et al. allow slopes down to 10⁻³, which costs two digits of x_b there.

    Args:
        network: Any Keras layer or model from x_a to a tensor with 3·bins − 1 times the channels of x_b: for each channel, `bins`
            numbers for widths, as many for secants, and one for the slope at every knot between two bins. By default as
            for `AffineCoupling`, so that the coupling starts as the identity.
        hidden: Channels of the hidden layers of the default network.
        bins: The number of bins, 2 or more.
        bound: Where the tails begin. ActNorm before the coupling puts almost all data within 3, where all bins are.
        slope_bound: The bound on |log s|.
        context: See `AffineCoupling`.
        norm: See `AffineCoupling`.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: Tensor of shape `(batch, ..., d)`, d ≥ 2.
        context: With `context=k`, a tensor of shape `(batch, k)`.

    Output: A tensor of the same shape.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.flows import SplineCoupling
    >>> layer, x = SplineCoupling(hidden=16), np.linspace(-6, 6, 8, dtype="float32").reshape(2, 4)
    >>> np.allclose(layer(x), x, atol=1e-5), np.allclose(layer.inverse(layer(x)), x, atol=1e-5)
    (True, True)

    Reference: Durkan, Bekasov, Murray & Papamakarios, "Neural Spline Flows", NeurIPS 2019.
    """

    settings = ("bins", "bound", "slope_bound")

    def __init__(
        self,
        network: keras.layers.Layer | None = None,
        hidden: int = 64,
        bins: int = 8,
        bound: float = 3.0,
        slope_bound: float = 2.0,
        **kwargs: Unpack[CouplingArguments],
    ) -> None:
        super().__init__(network, hidden, **kwargs)
        self.bins = whole_number("bins", bins, least=2)
        self.bound = checked_bound(bound, of="|x|")
        self.slope_bound = checked_bound(slope_bound, "slope_bound")
        self.parameters_per_channel = spline_parameters(self.bins)

    def build(self, input_shape: Shape) -> None:
        super().build(input_shape)
        size, _ = coupling_sizes(last_axis(self, input_shape), type(self).__name__)
        self.own = self.add_weight(name="own", shape=(size * self.parameters_per_channel,), initializer="zeros", autocast=False)

    def forward_and_log_slope(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        a, b = backend.split(x, [x.shape[-1] // 2])
        a, first = self.move(a, self._own_parameters(x.dtype))
        y, second = couple(keras.ops.concatenate([a, b], axis=-1), self.network, self.move, context)
        return y, keras.ops.concatenate([first, second], axis=-1)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        """x with layer(x, context) = y, with one pass of the network."""
        x = super().inverse(y, context)
        a, b = backend.split(x, [x.shape[-1] // 2])
        return keras.ops.concatenate([self.move_back(a, self._own_parameters(x.dtype))[0], b], axis=-1)

    def _own_parameters(self, dtype: DType) -> Tensor:
        # A parameter of h moves with many weights of the network at once, a parameter of g with one weight alone.
        return OWN_RATE * keras.ops.cast(self.own, dtype)

    def move(self, b: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """(h(x_b), log h′(x_b))."""
        return splined(b, parameters, self.bins, self.bound, self.slope_bound)

    def move_back(self, b: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """(h⁻¹(y_b), log h′ there)."""
        return splined_inverse(b, parameters, self.bins, self.bound, self.slope_bound)

    def certificate(self) -> Certificate:
        """g and h increase for all finite weights and outputs of the network, if exp(±slope_bound) is finite and positive."""
        reason = "increasing splines with linear tails: that of x_a is known, and with y_a that of x_b"
        return self._certified(reason, slope_bound=self.slope_bound)
