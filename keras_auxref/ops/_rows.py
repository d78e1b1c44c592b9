"""Small helpers on batches of row vectors."""

from collections.abc import Callable
from typing import Any

from keras import ops


def epsilon(dtype: str) -> float:
    """Machine epsilon of a floating-point dtype."""
    return {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}[dtype]


def map_rows(function: Callable[[Any], Any], x: Any) -> Any:
    """Applies a map of (n, d) to x of shape (..., d); outputs (n,) and (n, …) get the leading axes of x back."""
    if len(x.shape) == 2:
        return function(x)
    shape = ops.shape(x)
    y = function(ops.reshape(x, (-1, shape[-1])))
    return ops.reshape(y, (*shape[:-1], *ops.shape(y)[1:]))
