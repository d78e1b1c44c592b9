"""y = (x + t)·exp(log s), elementwise: the formula of activation normalisation and of affine coupling."""

from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.rows import dtype_of, epsilon, nonzero
from keras_auxref.typing import Tensor


def affine(x: Tensor, shift: Tensor, log_scale: Tensor) -> Tensor:
    """(x + shift)·exp(log_scale)."""
    return (x + shift) * ops.exp(log_scale)


def affine_inverse(y: Tensor, shift: Tensor, log_scale: Tensor) -> Tensor:
    """y·exp(−log_scale) − shift."""
    return y * ops.exp(-log_scale) - shift


def standardization(x: Tensor) -> tuple[Tensor, Tensor]:
    """The shift and log_scale, each of shape (d,), with which `affine` gives every channel of x mean 0 and variance 1.

    The statistics are over all axes but the last. A channel that is constant up to rounding has no scale: its log_scale is 0.
    """
    dtype = dtype_of(x)
    # Squares of 1e±30 are out of range in float32, and a mean of many values loses digits.
    x = ops.cast(x, backend.wide_dtype())
    axes = tuple(range(len(x.shape) - 1))
    size = nonzero(ops.max(ops.abs(x), axis=axes))
    x = x / size
    mean = ops.mean(x, axis=axes)
    deviation = ops.sqrt(ops.mean(ops.square(x - mean), axis=axes))
    constant = deviation <= epsilon(dtype)
    log_scale = -(ops.log(ops.where(constant, ops.ones_like(deviation), deviation)) + ops.log(size))
    log_scale = ops.where(constant, ops.zeros_like(log_scale), log_scale)
    return ops.cast(-mean * size, dtype), ops.cast(log_scale, dtype)


def channel_log_det(x: Tensor, log_scale: Tensor) -> Tensor:
    """Σ log_scale for every vector on the last axis of x, shape `x.shape[:-1]`."""
    # x[..., 0]·0 would propagate NaN and infinities of x.
    return ops.zeros_like(x[..., 0]) + ops.sum(log_scale)
