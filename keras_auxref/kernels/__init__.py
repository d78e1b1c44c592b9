"""How trainable weights become W, and what that guarantees."""

from typing import TypeAlias

import keras

from keras_auxref.certificate import Certificate, certify
from keras_auxref.kernels.base import Kernel
from keras_auxref.kernels.free import Free
from keras_auxref.kernels.relaxed_cayley import RelaxedCayley
from keras_auxref.kernels.spectral import Spectral
from keras_auxref.typing import Config

KernelLike: TypeAlias = str | Kernel | Config
"""A kernel, its name, or its configuration."""
_NAMES: dict[str, type[Kernel]] = {"free": Free, "spectral": Spectral, "relaxed_cayley": RelaxedCayley}

__all__ = ["Certificate", "Free", "Kernel", "RelaxedCayley", "Spectral", "certify", "get"]


def get(identifier: KernelLike) -> Kernel:
    """A kernel from an instance, one of the names "free", "spectral", "relaxed_cayley", or a serialised config.

    Example:
    >>> from keras_auxref import kernels
    >>> kernels.get("spectral").bound
    0.5
    """
    if isinstance(identifier, Kernel):
        return identifier
    if isinstance(identifier, str) and identifier in _NAMES:
        return _NAMES[identifier]()
    if isinstance(identifier, dict):
        kernel = keras.saving.deserialize_keras_object(identifier)
        if isinstance(kernel, Kernel):
            return kernel
    raise ValueError(f"Unknown kernel. Expected a `kernels.Kernel` instance or one of {sorted(_NAMES)}. Received: {identifier!r}")
