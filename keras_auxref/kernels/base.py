"""What every parametrisation of W has in common."""

from typing import Any

import keras

from keras_auxref.kernels.certificate import Certificate, certify


class Kernel:
    """How trainable weights become W, and what that guarantees.

    A kernel holds settings, never weights: one instance can serve many layers. A new one is a subclass, registered with
    `keras.saving.register_keras_serializable`, that overrides `default_initializer`, `initial_weights`, `__call__` and,
    where it has arguments, `get_config`.
    """

    symmetric = False
    """True when W = Wᵀ by construction: log-determinant and inverse then cost less, and compile under XLA."""

    def default_initializer(self) -> keras.initializers.Initializer:
        """The meaning of `kernel_initializer=None`."""
        raise NotImplementedError

    def initial_weights(self, d: int, initializer: Any, dtype: str) -> dict[str, Any]:
        """The trainable weights as a dict of names and initial values."""
        return {"kernel": initializer((d, d), dtype=dtype)}

    def __call__(self, weights: dict[str, Any]) -> Any:
        """W, of shape (d, d)."""
        raise NotImplementedError

    def certificate(self, w: Any) -> Certificate:
        """Proves or declines to prove that f(x) = H(Wx) x is invertible, for this very W."""
        return certify(w)

    def get_config(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Kernel":
        return cls(**config)
