"""Affine coupling: one part of a vector moves the other (Dinh et al. 2017)."""

import math
from typing import Any

import keras
from keras import ops

from keras_auxref.ops._affine import affine, affine_inverse


def coupling_sizes(d: int, name: str) -> tuple[int, int]:
    """The sizes of x_a and x_b on a last axis of size d."""
    if d < 2:
        raise ValueError(f"{name} splits the last axis in two parts. Expected a last axis of size ≥ 2. Received: {d}")
    return d // 2, d - d // 2


def couple(x: Any, network: Any, bound: float) -> tuple[Any, Any]:
    """y = (x_a, (x_b + t)·s) with (t, r) = network(x_a) and log s = bound·tanh(r/bound); y and log s."""
    a, b = _split(x)
    shift, log_scale = _parameters(a, b, network, bound)
    return ops.concatenate([a, affine(b, shift, log_scale)], axis=-1), log_scale


def uncouple(y: Any, network: Any, bound: float) -> tuple[Any, Any]:
    """The inverse of `couple`, x = (y_a, y_b/s − t); x and log s."""
    a, b = _split(y)
    shift, log_scale = _parameters(a, b, network, bound)
    return ops.concatenate([a, affine_inverse(b, shift, log_scale)], axis=-1), log_scale


def coupling_log_det(log_scale: Any, event_ndims: int) -> Any:
    """Σ log s over the last `event_ndims` axes."""
    return ops.sum(log_scale, axis=tuple(range(-event_ndims, 0)))


def _split(x: Any) -> tuple[Any, Any]:
    size = x.shape[-1] // 2
    return x[..., :size], x[..., size:]


def _parameters(a: Any, b: Any, network: Any, bound: float) -> tuple[Any, Any]:
    output = ops.cast(network(a), b.dtype)
    size = b.shape[-1]
    return output[..., :size], bound * ops.tanh(output[..., size:] / bound)


def build_network(network: Any, input_shape: Any, channels: int, dtype: Any) -> None:
    """Builds the network of a coupling for x_a of `input_shape`, and refuses one that does not return `channels` channels."""
    # An inner model that is not built when its parent is loaded keeps random weights, silently.
    if not network.built:
        network.build(input_shape)
    shape = tuple(network(keras.KerasTensor(input_shape, dtype=dtype)).shape)
    expected = (*input_shape[:-1], channels)
    if shape != tuple(expected):
        raise ValueError(
            "The network of AffineCoupling must return shift and scale, twice the channels that it moves. "
            f"Expected {tuple(expected)} for an input of shape {tuple(input_shape)}. Received: {shape}"
        )


def checked_bound(bound: Any) -> float:
    """Refuses a bound on |log s| that is not positive and finite."""
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound < math.inf:
        raise ValueError(f"`bound` on |log s| must be a positive number. Expected 0 < bound < ∞. Received: {bound!r}")
    return float(bound)
