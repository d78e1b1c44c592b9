"""Affine coupling: one part of a vector moves the other (Dinh et al. 2017)."""

from typing import Any

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
