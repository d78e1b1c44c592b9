"""The auxiliary reflection f(x) = H(Wx) x (paper, section 1): the map, where it is the identity, and its gradient."""

import math
from typing import Any, NamedTuple

from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.checks import HALF, as_tensor, check_vectors_and_matrix, is_symbolic
from keras_auxref.ops.householder import reflect_along
from keras_auxref.ops.rows import dtype_of, epsilon, largest, map_rows, matmul, nonzero, size_of, working_dtype
from keras_auxref.typing import Tensor


def reflect(x: Tensor, w: Tensor) -> Tensor:
    """The auxiliary reflection of every vector on the last axis of x.

        f(x) = H(Wx) x = x − c u,      u = W x,      c = 2 uᵀx / ‖u‖².

    f preserves norms, f(αx) = α f(x), and W = I − U gives f(x) = U x for every orthogonal U (Theorem 1 of the paper). Where
    W x = 0 the value that keeps Theorem 1 true is f(x) = x, with the identity as gradient for x and zero for W; "zero" is
    numerical, max|u| ≤ 4 ε √d max|W| max|x|. Entries of x and of W may have any size from 1e-30 to 1e+30. Runs on every Keras
    backend; on TensorFlow the gradient is in closed form: one matrix product forward and two backward, as for a Dense layer.
    Second derivatives are exact.

    Args:
        x: Tensor of shape `(..., d)`.
        w: Tensor of shape `(d, d)`, the paper's W: a batch of rows computes `x @ Wᵀ`.

    Returns:
        A tensor of the shape and dtype of `x`. For half-precision dtypes the reductions are in float32.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import reflect
    >>> swap = np.array([[0.0, 1.0], [1.0, 0.0]])
    >>> print(reflect(np.array([3.0, 4.0]), np.eye(2) - swap).numpy())
    [4. 3.]
    """
    x, w = as_tensor(x, "x"), as_tensor(w, "w")
    check_vectors_and_matrix(x, w, "x")
    if is_symbolic(x, w):
        return _plain(x, w)
    return map_rows(lambda rows: backend.closed_or_plain(_forward, _backward, _reference, (rows, w), _plain), x)


class Reflection(NamedTuple):
    """f(x) and what its gradient needs.

    With x̂ = x/size, size = max|x|, and û = r W x̂, r = 1/max|W x̂|, all intermediate values are of order 1:
    f(x) = x − ĉ û, ĉ = factor · ûᵀx, factor = 2/‖û‖². On null rows, where W x = 0, r and ĉ are 0.
    """

    y: Tensor
    size: Tensor
    unit: Tensor  # x̂
    direction: Tensor  # û
    scale: Tensor  # r
    factor: Tensor
    relative: Tensor  # ĉ/size

    @property
    def coefficient(self) -> Tensor:
        """c = 2 uᵀx/‖u‖² of u = W x: f(x) = (I − cW) x, 0 on null rows."""
        return self.relative * self.scale


def null_bound(w: Tensor) -> Tensor:
    """W x counts as zero where max|W x| is at most this times max|x|: 4 ε √d max|W|, the rounding of the product."""
    dtype = dtype_of(w)
    tolerance = 4 * epsilon(working_dtype(dtype)) * math.sqrt(w.shape[0])
    if dtype in HALF:  # such a product is accumulated in float32 and rounded once: its error does not grow with d
        tolerance = max(tolerance, epsilon(dtype))
    return tolerance * ops.cast(largest(ops.stop_gradient(w), axis=None), working_dtype(dtype))


def is_null(magnitude: Tensor, bound: Tensor) -> Tensor:
    """Where max|W x̂| is zero up to rounding, for max|x̂| = 1.

    A NaN must not count as a vector that W annihilates. Comparisons with it are false; the maximum of NaNs only, for which
    TensorFlow may return −∞, is recognised by its sign.
    """
    return ops.logical_and(magnitude >= 0, magnitude <= bound)


def reflection(x: Tensor, w: Tensor, bound: Tensor | None = None, size: Tensor | None = None) -> Reflection:
    """f(x), differentiable by any backend.

    `bound` is null_bound(w), if it is already known; `size` is what to divide x by, for callers that need a power of two.
    """
    dtype = dtype_of(x)
    bound = null_bound(w) if bound is None else bound
    if size is None:
        size = size_of(x)
        unit = x / size
    else:
        unit = x / size
        bound = bound * largest(ops.stop_gradient(unit))
    u = matmul(unit, ops.transpose(w))
    u, x, size = (ops.cast(t, working_dtype(dtype)) for t in (u, x, size))
    magnitude = largest(ops.stop_gradient(u))
    null = is_null(magnitude, bound)
    result = reflect_along(u, x, magnitude, null)
    relative = result.coefficient / size
    return Reflection(ops.cast(result.y, dtype), size, unit, result.direction, result.scale, result.factor, relative)


def reflection_vjp(g: Tensor, forward: Reflection, w: Tensor) -> tuple[Tensor, Tensor]:
    """For a cotangent g of f(x), the gradient for x and the gu with Σ gu xᵀ the gradient for W:

    k  = factor · gᵀû        e  = k û − g
    gu = r (ĉ/size · e − k x̂)       gx = Wᵀgu − e
    """
    dtype, working = forward.unit.dtype, forward.direction.dtype
    g, unit = ops.cast(g, working), ops.cast(forward.unit, working)
    k = ops.sum(g * forward.direction, axis=-1, keepdims=True) * forward.factor
    e = k * forward.direction - g
    gu = ops.cast(forward.coefficient * e - (forward.scale * k) * unit, dtype)
    return matmul(gu, w) - ops.cast(e, dtype), gu


def _forward(x: Tensor, w: Tensor, _: object) -> tuple[Tensor, Reflection]:
    result = reflection(x, w)
    return result.y, result


def _backward(g: Tensor, forward: Reflection, x: Tensor, w: Tensor, _: object) -> tuple[Tensor, Tensor]:
    gx, gu = reflection_vjp(g, forward, w)
    return gx, matmul(ops.transpose(gu), x)


def _reference(g: Tensor, x: Tensor, w: Tensor, _: object) -> Any:
    return backend.vjp(_plain)(g, x, w)


def _plain(x: Tensor, w: Tensor) -> Tensor:
    return reflection(x, w).y


def coefficient(x: Tensor, w: Tensor) -> Tensor:
    """c(x) = 2 uᵀx/‖u‖², u = W x, on the last axis of x: f(x) = (I − cW) x. 0 where W x = 0. Shape `(...,)`."""
    return ops.cast(reflection(x, w).coefficient[..., 0], x.dtype)


def central_coefficient(w: Tensor) -> Tensor:
    """2 tr W/‖W‖²_F, a typical c(x): the ratio of the means of 2 uᵀx and ‖u‖² over all directions; c itself for W = I − U."""
    size = size_of(w, axis=None)
    w = w / size
    return 2 * ops.trace(w) / (nonzero(ops.sum(ops.square(w))) * size)
