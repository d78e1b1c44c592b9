"""How trainable weights become W, and what that guarantees."""

from typing import Any

import keras

from keras_auxref.kernels.base import Kernel
from keras_auxref.kernels.certificate import Certificate, certify
from keras_auxref.kernels.free import Free
from keras_auxref.kernels.relaxed_cayley import RelaxedCayley
from keras_auxref.kernels.spectral import Spectral

_NAMES: dict[str, type[Kernel]] = {"free": Free, "spectral": Spectral, "relaxed_cayley": RelaxedCayley}

__all__ = ["Certificate", "Free", "Kernel", "RelaxedCayley", "Spectral", "certify", "get"]


def get(identifier: Any) -> Kernel:
    """A kernel from an instance, one of the names "free", "spectral", "relaxed_cayley", or a serialised config."""
    if isinstance(identifier, Kernel):
        return identifier
    if isinstance(identifier, str) and identifier in _NAMES:
        return _NAMES[identifier]()
    if isinstance(identifier, dict):
        kernel = keras.saving.deserialize_keras_object(identifier)
        if isinstance(kernel, Kernel):
            return kernel
    raise ValueError(f"Unknown kernel. Expected a `kernels.Kernel` instance or one of {sorted(_NAMES)}. Received: {identifier!r}")
