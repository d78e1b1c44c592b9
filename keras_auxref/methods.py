"""Checks for the methods of invertible layers: one dense tensor as input, a layer that is built, use in functional models."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import keras
import numpy as np

from keras_auxref.ops.checks import check_one_tensor, is_symbolic
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, LayerArguments, Shape, Tensor

METHODS = ("forward_and_log_det", "inverse", "log_det_jacobian")

T = TypeVar("T")


def checked(method: Callable[..., T]) -> Callable[..., T]:
    """A method that refuses anything but one tensor, builds its layer on first use, and may be used in functional models."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, x: Tensor, *args: object, **kwargs: object) -> T:
        check_one_tensor(x, f"{type(self).__name__}.{name}")
        if is_symbolic(x):
            return LayerMethod(self, name)(x, *args, **kwargs)
        shape = tuple(x.shape if hasattr(x, "shape") else np.shape(x))
        if not self.built:
            build_for(self, name, shape)
        _check_width(self, name, shape)
        return method(self, x, *args, **kwargs)

    return call


def build_for(layer: keras.layers.Layer, method: str, shape: Shape) -> None:
    """Builds a layer for the shape of the input of one of `METHODS`."""
    known = (None, *(n if isinstance(n, int) else None for n in shape[1:]))
    layer.build(layer.inverse_output_shape(known) if method == "inverse" else known)


def _check_width(layer: keras.layers.Layer, method: str, shape: Shape) -> None:
    """What `InputSpec` checks in a call: the size of the last axis for which the layer was built."""
    width = (getattr(layer.input_spec, "axes", None) or {}).get(-1)
    if width is None:
        return
    inner = layer.inverse_output_shape(shape) if method == "inverse" else shape
    if not inner or inner[-1] not in (width, None):
        raise ValueError(
            f"`{type(layer).__name__}.{method}` needs the last axis that the layer was built for. Expected shape (..., {width}). "
            f"Received: {shape}"
        )


@keras.saving.register_keras_serializable(PACKAGE)
class LayerMethod(keras.layers.Layer):
    """A method of an invertible layer as a separate layer with the same weights: what `layer.inverse(keras.Input(…))` creates.

    Args:
        layer: An invertible layer.
        method: `"inverse"`, `"log_det_jacobian"` or `"forward_and_log_det"`.
        **kwargs: Arguments of `keras.layers.Layer`.
    """

    def __init__(self, layer: keras.layers.Layer, method: str, **kwargs: Unpack[LayerArguments]) -> None:
        super().__init__(**{"dtype": layer.dtype_policy, **kwargs})
        self.layer, self.method = layer, method

    def build(self, input_shape: Shape) -> None:
        if not self.layer.built:
            build_for(self.layer, self.method, input_shape)

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor | tuple[Tensor, Tensor]:
        context = {"training": training} if self.method == "forward_and_log_det" else {}
        return getattr(self.layer, self.method)(inputs, **context)

    def compute_output_spec(
        self, inputs: Tensor, training: bool | None = None
    ) -> keras.KerasTensor | tuple[keras.KerasTensor, keras.KerasTensor]:
        layer, shape = self.layer, tuple(inputs.shape)
        if self.method == "inverse":
            return keras.KerasTensor(layer.inverse_output_shape(shape), dtype=self.compute_dtype)
        log_det = keras.KerasTensor(shape[: len(shape) - layer.event_ndims], dtype=self.compute_dtype)
        if self.method == "log_det_jacobian":
            return log_det
        return keras.KerasTensor(layer.compute_output_shape(shape), dtype=self.compute_dtype), log_det

    def get_config(self) -> Config:
        return {**super().get_config(), "layer": keras.saving.serialize_keras_object(self.layer), "method": self.method}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LayerMethod":
        return cls(**{**config, "layer": keras.saving.deserialize_keras_object(config["layer"])})
