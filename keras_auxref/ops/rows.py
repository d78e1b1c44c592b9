"""Small helpers on batches of row vectors."""

import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_auxref.typing import Tensor

HALF = ("float16", "bfloat16")


def dtype_of(x: Tensor) -> str:
    """The name of the dtype of a tensor."""
    return keras.backend.standardize_dtype(x.dtype)


def epsilon(dtype: str) -> float:
    """Machine epsilon of a floating-point dtype."""
    return {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}[dtype]


def working_dtype(dtype: str) -> str:
    """The dtype in which tensors of a dtype are worked on: float32 at least."""
    return "float32" if dtype in HALF else dtype


def largest(x: Tensor, axis: int | None = -1) -> Tensor:
    """max|x|. Over long axes by two reductions without a temporary of the size of x, over short ones by one."""
    keepdims = axis is not None
    if 0 in x.shape:  # an empty batch is legal, an empty maximum is not
        return ops.sum(x, axis=axis, keepdims=keepdims)
    if axis is not None and (x.shape[axis] or 0) <= 64:
        return ops.max(ops.abs(x), axis=axis, keepdims=keepdims)
    return ops.maximum(ops.max(x, axis=axis, keepdims=keepdims), -ops.min(x, axis=axis, keepdims=keepdims))


def size_of(x: Tensor, axis: int | None = -1) -> Tensor:
    """max|x| as a constant to automatic differentiation, and 1 where x = 0, so that one can divide by it."""
    return nonzero(largest(ops.stop_gradient(x), axis))


def power_of_two(x: Tensor) -> Tensor:
    """A power of two close to x > 0, as a constant to automatic differentiation: dividing by it is exact."""
    x = ops.stop_gradient(x)
    return ops.cast(ops.power(ops.cast(2.0, x.dtype), ops.floor(ops.log(x) / math.log(2))), x.dtype)


def nonzero(x: Tensor) -> Tensor:
    """x, and 1 where x = 0."""
    return ops.where(x == 0, ops.ones_like(x), x)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, where a may be one vector. Keras' own function passes float64 through float32 on PyTorch."""
    return (a[None] @ b)[0] if len(a.shape) == 1 else a @ b


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """aᵀb for every row, shape (n, 1)."""
    d = a.shape[-1]
    if d is not None and d <= 16:  # a reduction over so short an axis costs TensorFlow more than a product with ones
        return matmul(a * b, ops.ones((d, 1), dtype=a.dtype))
    return ops.sum(a * b, axis=-1, keepdims=True)


def map_rows(function: Callable[[Tensor], Any], x: Tensor, dtype: str | None = None) -> Any:
    """Applies a map of (n, d) to x of shape (..., d); outputs (n,) and (n, …) get the leading axes of x back.

    With `dtype`, the map computes in that dtype, and its outputs are cast back to the dtype of x.
    """
    if dtype is not None:
        outputs = map_rows(function, ops.cast(x, dtype))
        return keras.tree.map_structure(lambda t: ops.cast(t, x.dtype), outputs)
    if len(x.shape) == 2:
        return function(x)
    shape = ops.shape(x)
    outputs = function(ops.reshape(x, (-1, shape[-1])))
    return keras.tree.map_structure(lambda t: ops.reshape(t, (*shape[:-1], *ops.shape(t)[1:])), outputs)
