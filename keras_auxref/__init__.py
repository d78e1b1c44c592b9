"""Auxiliary reflections for Keras 3, TensorFlow and TensorFlow Probability.

After "One Reflection Suffice" (Mathiasen & Hvilshøj, 2020).
"""

from typing import Any

from keras_auxref import initializers, kernels, ops
from keras_auxref.layers import AuxReflection, OrthogonalDense, SVDDense

__version__ = "0.1.0"
__all__ = ["AuxReflection", "OrthogonalDense", "SVDDense", "bijectors", "initializers", "kernels", "ops"]


def __getattr__(name: str) -> Any:
    # TensorFlow Probability takes a second to import: only those who build bijectors pay for it.
    if name == "bijectors":
        import importlib

        return importlib.import_module("keras_auxref.bijectors")
    raise AttributeError(f"module 'keras_auxref' has no attribute {name!r}")
