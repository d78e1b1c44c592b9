"""Additive coupling: a network of one part of the channels shifts the other part."""

import keras

from keras_auxref.certificate import Certificate
from keras_auxref.flows.parts.coupling import Coupling
from keras_auxref.ops.coupling import additive, additive_inverse
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class AdditiveCoupling(Coupling):
    """Additive coupling of the two parts x_a, x_b of the last axis, of sizes ⌊d/2⌋ and ⌈d/2⌉.

        y_a = x_a        y_b = x_b + network(x_a)        log|det ∂y/∂x| = 0

    It preserves volume, so in a flow of such couplings only the other layers change densities. One event is everything
    but the batch axis, because a network may mix pixels.

    Args:
        network: Any Keras layer or model from x_a to a tensor of the shape of x_b. By default as for `AffineCoupling`, so that
            the coupling starts as the identity.
        hidden: Channels of the hidden layers of the default network.
        context: See `AffineCoupling`.
        norm: See `AffineCoupling`.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: Tensor of shape `(batch, ..., d)`, d ≥ 2.
        context: With `context=k`, a tensor of shape `(batch, k)`.

    Output: A tensor of the same shape.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.flows import AdditiveCoupling
    >>> layer, x = AdditiveCoupling(hidden=16), np.ones((2, 4, 4, 3), "float32")
    >>> y, log_det = layer.forward_and_log_det(x)
    >>> bool(np.all(y == x)), float(log_det[0])
    (True, 0.0)

    Reference: Dinh, Krueger & Bengio, "NICE: Non-linear Independent Components Estimation", ICLR 2015 (workshop).
    """

    def move(self, b: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """(x_b + t, 0)."""
        return additive(b, parameters)

    def move_back(self, b: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """(y_b − t, 0)."""
        return additive_inverse(b, parameters)

    def certificate(self) -> Certificate:
        """Proven for every finite output of the network: x_b = y_b − t."""
        return self._certified("x_a stays as it is, and with it the shift of x_b is known")
