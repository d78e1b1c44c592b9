"""What every parametrisation of W has in common."""

from typing import Any

import keras
import numpy as np

from keras_auxref._keras import outside_graphs
from keras_auxref.kernels.certificate import Certificate, certify
from keras_auxref.ops._checks import is_concrete
from keras_auxref.typing import Tensor


class Kernel:
    """How trainable weights become W, and what that guarantees.

    A kernel holds settings, never weights: one instance can serve many layers. A new one is a subclass, registered with
    `keras.saving.register_keras_serializable`, that overrides `default_initializer`, `initial_weights`, `__call__` and,
    where it has arguments, `get_config`; `weight_names` where it can say them.
    """

    symmetric = False
    """True when W = Wᵀ by construction: log-determinant and inverse then cost less, and compile under XLA."""

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The names of the weights. A kernel that states them as an attribute spares the making of initial weights."""
        with outside_graphs():
            return tuple(self.initial_weights(2, self.default_initializer(), "float32"))

    def default_initializer(self) -> keras.initializers.Initializer:
        """The meaning of `kernel_initializer=None`."""
        raise NotImplementedError

    promises: bool = False
    """True when f is a bijection whatever the weights are. Such a W is used in float32 at least: rounding breaks promises."""

    def initial_weights(self, d: int, initializer: Any, dtype: str) -> dict[str, Tensor]:
        """The trainable weights as a dict of names and initial values."""
        weight = initializer((d, d), dtype=dtype)
        require_nonzero(weight, initializer)
        return {"kernel": weight}

    def __call__(self, weights: dict[str, Tensor]) -> Tensor:
        """W, of shape (d, d), from weights in float32 or float64."""
        raise NotImplementedError

    def certificate(self, w: Tensor) -> Certificate:
        """Proves or declines to prove that f(x) = H(Wx) x is invertible, for this very W."""
        return certify(w)

    def get_config(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Kernel":
        return cls(**config)


def require_nonzero(weight: Tensor, initializer: Any) -> None:
    """Refuses a start of zeros, at which the gradient is zero too. In one dimension there is nothing to train."""
    if weight.shape[0] > 1 and is_concrete(weight) and not np.any(keras.ops.convert_to_numpy(weight)):
        name = getattr(initializer, "__name__", type(initializer).__name__)
        raise ValueError(
            "Weights of zero never train: the auxiliary reflection is then stationary, with the gradient zero. Expected a "
            f"`kernel_initializer` that makes other weights. Received: zeros, from {name}"
        )
