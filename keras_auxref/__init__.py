"""Auxiliary reflections for Keras 3, TensorFlow and TensorFlow Probability.

After "One Reflection Suffice" (Mathiasen & Hvilshøj, 2020).
"""

import importlib
from typing import Any

from keras_auxref import initializers, kernels, ops, regularizers
from keras_auxref._keras import register_later
from keras_auxref.invertible import Invertible, register_bijector
from keras_auxref.layers import (
    AuxReflection,
    FactoredReflection,
    OrthogonalDense,
    OrthogonalRNN,
    OrthogonalRNNCell,
    SVDDense,
)

__version__ = "0.2.0"
__all__ = [
    "AuxReflection",
    "FactoredReflection",
    "Glow",
    "OrthogonalDense",
    "OrthogonalRNN",
    "OrthogonalRNNCell",
    "SVDDense",
    "bijectors",
    "export_saved_model",
    "flows",
    "initializers",
    "kernels",
    "ops",
    "regularizers",
    "serving",
]


def _bijector_of(layer: Invertible, **kwargs: Any) -> Any:
    return importlib.import_module("keras_auxref.bijectors").LayerBijector(layer, **kwargs)


register_bijector(_bijector_of)
register_later("keras_auxref.flows", "Glow", "Logit", "MultiScale", "VariationalDequantisation", "Warmup")


def __getattr__(name: str) -> Any:
    # TensorFlow Probability takes a second to import, and flows need TensorFlow: only those who use them pay for it.
    if name in ("bijectors", "flows", "serving"):
        return importlib.import_module(f"keras_auxref.{name}")
    if name == "Glow":
        return importlib.import_module("keras_auxref.flows").Glow
    if name == "export_saved_model":
        return importlib.import_module("keras_auxref.serving").export_saved_model
    raise AttributeError(f"module 'keras_auxref' has no attribute {name!r}")
