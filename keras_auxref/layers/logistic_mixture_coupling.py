"""Coupling by a mixture of logistics: a network of one part of the channels bends the other part."""

from typing import Any

import keras

from keras_auxref._keras import PACKAGE
from keras_auxref.kernels.certificate import Certificate
from keras_auxref.layers._coupling import Coupling
from keras_auxref.ops._coupling import checked_bound, mixed, mixed_inverse
from keras_auxref.typing import Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class LogisticMixtureCoupling(Coupling):
    """Coupling by the distribution function of a mixture of logistics, of the two parts x_a, x_b of the last axis.

        (t, r, l, m, v) = network(x_a)      a = bound·tanh(r/bound)      log s = scale_bound·tanh(v/scale_bound)
        y_a = x_a                           y_b = σ⁻¹(F(x_b))·eᵃ + t
        F(x) = Σ πₖ σ((x − μₖ)/sₖ)          π = softmax(l)               μ = m + start

    entry by entry, each with its own mixture. An affine coupling knows one bend of x_b, this one as many as it has components. It
    is increasing in x_b and onto the real line, whatever the network says. F is never computed, only log F and log(1 − F): the
    map is as exact at x = ±10⁴ as at 0. The inverse is a Newton iteration in a bracket known beforehand, and what it returns
    is checked: NaN where it is no preimage to rounding. Its gradients are those of the implicit function theorem.

    `start` spreads the means over [−1, 1], because components that start as the same would stay the same. With a network that
    says zero the coupling is then close to the identity, of slope 0.90 at 0 and 1 far out for 8 components.

    Args:
        network: Any Keras layer or model from x_a to a tensor with 2 + 3·components times the c channels of x_b: first t, then r,
            c numbers each, and then for each channel `components` numbers l, as many m, as many v. By default as for
            `AffineCoupling`, with a last layer that starts at zero.
        hidden: Channels of the hidden layers of the default network.
        components: The number of logistics in each mixture.
        bound: The bound on |a|.
        scale_bound: The bound on |log s|.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: Tensor of shape `(batch, ..., d)`, d ≥ 2.

    Output: A tensor of the same shape.

    Example:
    >>> import numpy as np
    >>> layer, x = LogisticMixtureCoupling(hidden=16), np.ones((2, 4, 4, 3), "float32")
    >>> np.allclose(layer.inverse(layer(x)), x, atol=1e-6)
    True

    Reference: Ho, Chen, Srinivas, Duan & Abbeel, "Flow++: Improving Flow-Based Generative Models with Variational
    Dequantization and Architecture Design", ICML 2019.
    """

    elementary = False  # the inverse searches

    def __init__(
        self,
        network: Any = None,
        hidden: int = 64,
        components: int = 8,
        bound: float = 2.0,
        scale_bound: float = 5.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, hidden, **kwargs)
        if isinstance(components, bool) or not isinstance(components, int) or components < 1:
            raise ValueError(f"`components` must be a positive integer. Expected 1, 2, 3, … Received: {components!r}")
        self.components = components
        self.bound = checked_bound(bound, of="|a|")
        self.scale_bound = checked_bound(scale_bound, "scale_bound")
        self.parameters_per_channel = 2 + 3 * components

    def move(self, b: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """(σ⁻¹(F(x_b))·eᵃ + t, a + log d σ⁻¹(F)/dx_b)."""
        return mixed(b, parameters, self.components, self.bound, self.scale_bound)

    def move_back(self, b: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """x_b of y_b, or NaN, and the same logarithm there."""
        return mixed_inverse(b, parameters, self.components, self.bound, self.scale_bound)

    def certificate(self) -> Certificate:
        """y_b is increasing in x_b whatever the network says, as long as it says numbers and the bounds leave scales that are."""
        reason = "x_a stays as it is, and with it an increasing map of x_b onto the real line is known"
        return self._certified(reason, bound=self.bound, scale_bound=self.scale_bound)

    def get_config(self) -> dict[str, Any]:
        settings = {"components": self.components, "bound": self.bound, "scale_bound": self.scale_bound}
        return {**super().get_config(), **settings}
