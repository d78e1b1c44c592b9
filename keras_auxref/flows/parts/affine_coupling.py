"""Affine coupling: a network of one part of the channels shifts and scales the other part."""

from typing import Unpack

import keras

from keras_auxref.certificate import Certificate
from keras_auxref.flows.parts.coupling import Coupling, CouplingArguments
from keras_auxref.ops.coupling import checked_bound, scaled, scaled_inverse
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class AffineCoupling(Coupling):
    """Affine coupling of the two parts x_a, x_b of the last axis, of sizes ⌊d/2⌋ and ⌈d/2⌉.

        (t, r) = network(x_a)        log s = bound·tanh(r/bound)
        y_a = x_a                    y_b = (x_b + t)·s                log|det ∂y/∂x| = Σ log s

    The inverse costs as much as the map, and the network need not be invertible. The bound keeps s within exp(±bound), so no
    single coupling can overflow. One event is everything but the batch axis, because a network may mix pixels.

    Args:
        network: Any Keras layer or model from x_a to a tensor with twice the channels of x_b: t first, then r. By default two
            hidden layers with ReLU and a last layer that starts at zero, so that the coupling starts as the identity: dense
            for inputs of rank 2, convolutions 3×3, 1×1, 3×3 for images of rank 4.
        hidden: Channels of the hidden layers of the default network.
        bound: The bound on |log s|.
        context: The number k of entries of a context, which every method then takes, a tensor of shape `(batch, k)`. The network
            sees it as k more channels of x_a, the same for all pixels of an image.
        norm: Whether the default network normalises its hidden channels (`keras.layers.LayerNormalization`). Its output then does
            not grow with its input, so that a flow does not scale up an unusual input more and more from step to step.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: Tensor of shape `(batch, ..., d)`, d ≥ 2.
        context: With `context=k`, a tensor of shape `(batch, k)`.

    Output: A tensor of the same shape.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.flows import AffineCoupling
    >>> layer, x = AffineCoupling(hidden=16), np.ones((2, 4, 4, 3), "float32")
    >>> y, log_det = layer.forward_and_log_det(x)
    >>> bool(np.all(y == x)), log_det.shape
    (True, TensorShape([2]))

    Reference: Dinh, Sohl-Dickstein & Bengio, "Density Estimation using Real NVP", ICLR 2017.
    """

    parameters_per_channel = 2
    settings = ("bound",)

    def __init__(
        self,
        network: keras.layers.Layer | None = None,
        hidden: int = 64,
        bound: float = 2.0,
        **kwargs: Unpack[CouplingArguments],
    ) -> None:
        super().__init__(network, hidden, **kwargs)
        self.bound = checked_bound(bound)

    def move(self, b: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """((x_b + t)·s, log s)."""
        return scaled(b, parameters, self.bound)

    def move_back(self, b: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """(y_b/s − t, log s)."""
        return scaled_inverse(b, parameters, self.bound)

    def certificate(self) -> Certificate:
        """Proven for every finite output of the network, if exp(±bound) is finite and positive."""
        reason = "x_a stays as it is, and with it shift and scale of x_b are known, the scale never zero"
        return self._certified(reason, bound=self.bound)
