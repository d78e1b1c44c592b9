"""The Householder reflection H(v) x."""

from typing import NamedTuple

from keras import ops

from keras_auxref.ops.checks import as_tensor, check_vector
from keras_auxref.ops.rows import dtype_of, largest, working_dtype
from keras_auxref.typing import Tensor


class Mirrored(NamedTuple):
    """H(u) x with what its gradient needs: û = u r, the factor 2/‖û‖² and the coefficient ĉ = 2 ûᵀx/‖û‖²."""

    y: Tensor
    direction: Tensor
    scale: Tensor
    factor: Tensor
    coefficient: Tensor


def reflect_along(u: Tensor, x: Tensor, magnitude: Tensor, null: Tensor) -> Mirrored:
    """H(u) x for u scaled to max|û| = 1 first, so that ‖û‖² neither over- nor underflows; x itself where `null`.

    `magnitude` is max|u|. Treating it as a constant is exact, because H does not depend on the length of u. On null rows 1 is
    added to the divisor, which keeps gradients of every order finite.
    """
    null = ops.cast(null, u.dtype)
    scale = (1 - null) / (magnitude + null)
    direction = u * scale
    factor = 2 / (ops.sum(ops.square(direction), axis=-1, keepdims=True) + null)
    coefficient = ops.sum(direction * x, axis=-1, keepdims=True) * factor
    return Mirrored(x - coefficient * direction, direction, scale, factor, coefficient)


def householder(v: Tensor, x: Tensor) -> Tensor:
    """The Householder reflection of x in the hyperplane orthogonal to v.

        H(v) x = x − 2 v (vᵀx) / ‖v‖²,      and x itself where v = 0.

    Args:
        v: Tensor of shape `(..., d)`, broadcast against `x`. Its length does not matter.
        x: Tensor of shape `(..., d)`.

    Returns:
        A tensor of the broadcast shape and of the dtype of `x`. ‖H(v) x‖ = ‖x‖.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import householder
    >>> print(householder(np.array([1.0, 0.0]), np.array([3.0, 4.0])).numpy())
    [-3.  4.]
    """
    v, x = as_tensor(v, "v"), as_tensor(x, "x")
    check_vector(v, "v")
    check_vector(x, "x")
    if v.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"`v` and `x` must agree on the last axis. Expected shape (..., {x.shape[-1]}) for v. "
            f"Received: v {tuple(v.shape)}, x {tuple(x.shape)}"
        )
    dtype = dtype_of(x)
    v, x = (ops.cast(t, working_dtype(dtype)) for t in (v, x))
    magnitude = ops.stop_gradient(largest(v))
    return ops.cast(reflect_along(v, x, magnitude, magnitude <= 0).y, dtype)
