"""What every parametrisation of W has in common."""

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_auxref.certificate import Certificate, certify
from keras_auxref.ops import backend
from keras_auxref.ops.backend import outside_graphs
from keras_auxref.ops.checks import is_concrete
from keras_auxref.ops.rows import epsilon
from keras_auxref.typing import Config, Tensor


class Kernel:
    """How trainable weights become W, and what that guarantees.

    A kernel holds settings, never weights: one instance can serve many layers. A new one is a subclass, registered with
    `keras.saving.register_keras_serializable`, that overrides `default_initializer`, `initial_weights`, `__call__`,
    `get_config` if it has arguments, and `weight_names` if they are known in advance.

    Example:
    >>> from keras_auxref import AuxReflection
    >>> from keras_auxref.kernels import Kernel
    >>> isinstance(AuxReflection("spectral").parametrization, Kernel)
    True
    """

    symmetric = False
    """True when W = Wᵀ by construction: log-determinant and inverse then cost less, and compile under XLA."""

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The names of the weights. If a kernel has them as an attribute, no initial weights need to be made for this."""
        with outside_graphs():
            return tuple(self.initial_weights(2, self.default_initializer(), "float32"))

    def default_initializer(self) -> keras.initializers.Initializer:
        """The meaning of `kernel_initializer=None`."""
        raise NotImplementedError

    promises: bool = False
    """True when f is a bijection for all weights. W is then at least float32: rounding could break the guarantee."""

    def initial_weights(self, d: int, initializer: Callable[..., Tensor], dtype: str) -> dict[str, Tensor]:
        """The trainable weights as a dict of names and initial values."""
        weight = initializer((d, d), dtype=dtype)
        require_nonzero(weight, initializer)
        return {"kernel": weight}

    def __call__(self, weights: dict[str, Tensor]) -> Tensor:
        """W, of shape (d, d), from weights in float32 or float64."""
        raise NotImplementedError

    def certificate(self, w: Tensor) -> Certificate:
        """Proves that f(x) = H(Wx) x is invertible for this W, or reports that there is no proof."""
        return certify(w)

    def get_config(self) -> Config:
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Kernel":
        return cls(**config)


def require_alone(name: str, value: float | None, lipschitz: float) -> None:
    """Refuses two settings for the same quantity."""
    if value is not None:
        raise ValueError(
            f"`lipschitz` decides `{name}`. Expected one of the two. Received: {name}={value!r}, lipschitz={lipschitz!r}"
        )


def require_room(room: bool, lipschitz: float, least: float, dtype: str) -> None:
    """Refuses a Lipschitz constant so close to 1 that rounding may exceed it."""
    if not room:
        raise ValueError(
            f"Rounding alone may take more than that in {dtype}. Expected lipschitz > {least:.6g}, float64, or a smaller "
            f"`max_skew` where the kernel has one. Received: lipschitz={lipschitz}"
        )


def shift_by_rounding(d: int, dtype: str, norm: float, inverse: float) -> float:
    """How far the eigenvalues of S, the symmetric part of W⁻¹, may be from those that a kernel sets, as a certificate sees them.

    A kernel with a Lipschitz constant computes W in `wide` precision. Rounding to a dtype of unit u makes it W + E with
    ‖E‖₂ ≤ u ‖W‖_F ≤ u √d ‖W‖₂, which moves W⁻¹, and with it S, by at most ‖W⁻¹‖² ‖E‖/(1 − ‖W⁻¹‖ ‖E‖). The certificate adds its
    own error, 8dε ‖W⁻¹‖_F² ‖W‖_F and as much again for its residual (`ops.proof.spectrum`). Without float64, the
    inverse and the norms have errors of d u each.

    Args:
        d: The size of W.
        dtype: That of W; half precision counts as float32.
        norm: A bound on ‖W‖₂.
        inverse: A bound on ‖W⁻¹‖₂.
    """
    unit = epsilon("float64" if dtype == "float64" else "float32") / 2
    error = unit * norm * (d**0.5 + (0 if backend.wide_dtype() == "float64" else 2 * d))
    if inverse * error >= 0.5:
        return math.inf
    return inverse**2 * (error / (1 - inverse * error) + 16 * d**2.5 * epsilon("float64") * norm)


def wide(weight: Tensor) -> Tensor:
    """A weight in the most precise dtype available."""
    return keras.ops.cast(weight, backend.wide_dtype())


def require_nonzero(weight: Tensor, initializer: Callable[..., Tensor]) -> None:
    """Refuses a start of zeros, at which the gradient is zero too. In one dimension there is nothing to train."""
    if weight.shape[0] > 1 and is_concrete(weight) and not np.any(keras.ops.convert_to_numpy(weight)):
        name = getattr(initializer, "__name__", type(initializer).__name__)
        raise ValueError(
            "Weights of zero never train: the auxiliary reflection is then stationary, with the gradient zero. Expected a "
            f"`kernel_initializer` that makes other weights. Received: zeros, from {name}"
        )
