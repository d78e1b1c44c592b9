"""Validation shared by the layers."""

import keras

from keras_auxref.invertible import require_built
from keras_auxref.ops.checks import HALF, check_one_tensor, is_concrete
from keras_auxref.typing import DType, Shape, Tensor

__all__ = [
    "as_input",
    "at_least_float32",
    "check_sequences",
    "has_value",
    "last_axis",
    "require_built",
    "require_floating",
    "require_precision",
]


def last_axis(layer: keras.layers.Layer, input_shape: Shape) -> int:
    """d of an input of shape (batch, ..., d)."""
    _check_one(layer, input_shape, "(batch, ..., d)")
    d = input_shape[-1] if len(input_shape) >= 2 else None
    if not d:
        raise ValueError(
            f"{type(layer).__name__} needs a batch axis and a known last axis of size ≥ 1. Expected shape (batch, ..., d). "
            f"Received: {tuple(input_shape)}"
        )
    return int(d)


def check_sequences(layer: keras.layers.Layer, input_shape: Shape | None) -> None:
    """Refuses what is not one tensor of shape (batch, time, features)."""
    _check_one(layer, input_shape, "(batch, time, features)")
    if input_shape is None or len(input_shape) != 3 or not input_shape[-1]:
        raise ValueError(
            f"{type(layer).__name__} needs sequences with a known number of features. Expected shape (batch, time, features), "
            f"features ≥ 1. Received: {tuple(input_shape or ())}"
        )


def _check_one(layer: keras.layers.Layer, input_shape: Shape | None, expected: str) -> None:
    """Refuses the shapes of several inputs, and none."""
    several = isinstance(input_shape, dict) or any(isinstance(n, tuple | list) for n in input_shape or ())
    if input_shape is None or several:
        received = None if input_shape is None else f"{len(input_shape)} inputs"
        raise ValueError(f"{type(layer).__name__} takes one tensor. Expected shape {expected}. Received: {received}")


def has_value(weight: Tensor) -> bool:
    """Whether a weight can be read now. In a loop over stacked weights it is a slice of them and a node of the graph."""
    return hasattr(weight, "numpy") or is_concrete(weight)


def require_floating(layer: keras.layers.Layer, dtype: DType) -> None:
    """Refuses a layer that would compute in integers."""
    if not keras.backend.is_float_dtype(dtype):
        raise ValueError(
            f"{type(layer).__name__} needs a floating-point dtype. Received: {keras.backend.standardize_dtype(dtype)}"
        )


def require_precision(layer: keras.layers.Layer) -> None:
    """Refuses half precision, which has too few digits for a likelihood."""
    if layer.compute_dtype not in ("float32", "float64"):
        raise ValueError(f"A likelihood needs dtype float32 or float64. Received: {layer.compute_dtype}")


def as_input(layer: keras.layers.Layer, inputs: Tensor) -> Tensor:
    """The inputs of `call`: floats as Keras' autocasting left them; integers and booleans are cast, as `Dense` does."""
    check_one_tensor(inputs, type(layer).__name__)
    dtype = keras.backend.standardize_dtype(inputs.dtype)
    if keras.backend.is_float_dtype(dtype):
        return inputs
    if dtype != "bool" and not keras.backend.is_int_dtype(dtype):
        raise ValueError(f"{type(layer).__name__} needs real numbers. Expected floats or integers. Received: {dtype}")
    return keras.ops.cast(inputs, layer.compute_dtype)


def at_least_float32(x: Tensor) -> Tensor:
    """A tensor in float32 or float64: half precision has no factorisations, and too few digits for a guarantee."""
    x = keras.ops.convert_to_tensor(x)
    return keras.ops.cast(x, "float32") if keras.backend.standardize_dtype(x.dtype) in HALF else x
