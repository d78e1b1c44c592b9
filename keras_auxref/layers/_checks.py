"""Validation shared by the layers."""

from typing import Any

import keras

from keras_auxref.invertible import require_built

__all__ = ["last_axis", "require_built", "require_floating"]


def last_axis(layer: keras.layers.Layer, input_shape: Any) -> int:
    """d of an input of shape (batch, ..., d)."""
    d = input_shape[-1] if len(input_shape) >= 2 else None
    if d is None:
        raise ValueError(
            f"{type(layer).__name__} needs a batch axis and a known last axis. Expected shape (batch, ..., d). "
            f"Received: {tuple(input_shape)}"
        )
    return int(d)


def require_floating(layer: keras.layers.Layer, dtype: Any) -> None:
    """Refuses integers, which Keras does not cast."""
    if not keras.backend.is_float_dtype(dtype):
        raise ValueError(
            f"{type(layer).__name__} needs a floating-point dtype. Received: {keras.backend.standardize_dtype(dtype)}"
        )
