"""Coupling by a mixture of logistics: a network of one part of the channels bends the other part."""

from typing import Unpack

import keras

from keras_auxref.certificate import Certificate
from keras_auxref.flows.parts.coupling import Coupling, CouplingArguments
from keras_auxref.ops.checks import whole_number
from keras_auxref.ops.coupling import checked_bound, mixed, mixed_inverse
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class LogisticMixtureCoupling(Coupling):
    """Coupling by the distribution function of a mixture of logistics, of the two parts x_a, x_b of the last axis.

        (t, r, l, m, v) = network(x_a)      a = bound·tanh(r/bound)      log s = scale_bound·tanh(v/scale_bound)
        y_a = x_a                           y_b = σ⁻¹(F(x_b))·eᵃ + t
        F(x) = Σ πₖ σ((x − μₖ)/sₖ)          π = softmax(l)               μ = m + start

    entry by entry, each with its own mixture. An affine coupling is linear in x_b; this one can bend once per component. It is
    increasing in x_b and onto the real line, for every output of the network. Only log F and log(1 − F) are computed, never F,
    so the map is as accurate at x = ±10⁴ as at 0. The inverse is a Newton iteration in a bracket known beforehand, and its
    result is checked: NaN where it is not a preimage to rounding. Gradients come from the implicit function theorem.

    `start` spreads the means over [−1, 1], because components that start equal would stay equal. With a network that returns
    zero the coupling is then close to the identity: for 8 components its slope is 0.90 at 0 and 1 far out.

    Args:
        network: Any Keras layer or model from x_a to a tensor with 2 + 3·components times the c channels of x_b: first t, then r,
            c numbers each, and then for each channel `components` numbers l, as many m, as many v. By default as for
            `AffineCoupling`, with a last layer that starts at zero.
        hidden: Channels of the hidden layers of the default network.
        components: The number of logistics in each mixture.
        bound: The bound on |a|.
        scale_bound: The bound on |log s|.
        context: See `AffineCoupling`.
        norm: See `AffineCoupling`.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: Tensor of shape `(batch, ..., d)`, d ≥ 2.
        context: With `context=k`, a tensor of shape `(batch, k)`.

    Output: A tensor of the same shape.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.flows import LogisticMixtureCoupling
    >>> layer, x = LogisticMixtureCoupling(hidden=16), np.ones((2, 4, 4, 3), "float32")
    >>> np.allclose(layer.inverse(layer(x)), x, atol=1e-6)
    True

    Reference: Ho, Chen, Srinivas, Duan & Abbeel, "Flow++: Improving Flow-Based Generative Models with Variational
    Dequantization and Architecture Design", ICML 2019.
    """

    elementary = False  # the inverse searches
    settings = ("components", "bound", "scale_bound")

    def __init__(
        self,
        network: keras.layers.Layer | None = None,
        hidden: int = 64,
        components: int = 8,
        bound: float = 2.0,
        scale_bound: float = 5.0,
        **kwargs: Unpack[CouplingArguments],
    ) -> None:
        super().__init__(network, hidden, **kwargs)
        self.components = whole_number("components", components)
        self.bound = checked_bound(bound, of="|a|")
        self.scale_bound = checked_bound(scale_bound, "scale_bound")
        self.parameters_per_channel = 2 + 3 * self.components

    def move(self, b: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """(σ⁻¹(F(x_b))·eᵃ + t, a + log d σ⁻¹(F)/dx_b)."""
        return mixed(b, parameters, self.components, self.bound, self.scale_bound)

    def move_back(self, b: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """x_b of y_b, or NaN, and the same logarithm there."""
        return mixed_inverse(b, parameters, self.components, self.bound, self.scale_bound)

    def certificate(self) -> Certificate:
        """y_b is increasing in x_b for every finite output of the network, if the bounds keep the scales finite and positive."""
        reason = "x_a stays as it is, and with it an increasing map of x_b onto the real line is known"
        return self._certified(reason, bound=self.bound, scale_bound=self.scale_bound)
