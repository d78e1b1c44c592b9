"""Auxiliary reflections for Keras 3, TensorFlow and TensorFlow Probability.

After "One Reflection Suffice" (Mathiasen & Hvilshøj, 2020).
"""

import importlib
from typing import Any

from keras_auxref import flows, initializers, kernels, layers, ops, posteriors, regularizers
from keras_auxref.certificate import Certificate
from keras_auxref.flows import Flow, Glow
from keras_auxref.invertible import Invertible
from keras_auxref.layers import (
    AuxReflection,
    FactoredReflection,
    OrthogonalDense,
    OrthogonalRNN,
    OrthogonalRNNCell,
    SVDDense,
)
from keras_auxref.lipschitz import lipschitz_bounds

__version__ = "0.3.0"
__all__ = [
    "AuxReflection",
    "Certificate",
    "FactoredReflection",
    "Flow",
    "Glow",
    "Invertible",
    "OrthogonalDense",
    "OrthogonalRNN",
    "OrthogonalRNNCell",
    "SVDDense",
    "flows",
    "initializers",
    "kernels",
    "layers",
    "lipschitz_bounds",
    "ops",
    "posteriors",
    "regularizers",
]
_ON_TENSORFLOW = ("bijectors", "export_saved_model", "serving")
"""What needs TensorFlow, or TensorFlow Probability, which takes a second to import: imported only when used."""


def __getattr__(name: str) -> Any:
    if name in ("bijectors", "serving"):
        return importlib.import_module(f"keras_auxref.{name}")
    if name == "export_saved_model":
        return importlib.import_module("keras_auxref.serving").export_saved_model
    raise AttributeError(f"module 'keras_auxref' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_TENSORFLOW})
