"""W x where its terms cancel, to the last digit, and f(x) from it."""

import math

from keras import ops

from keras_auxref.ops.householder import reflect_along
from keras_auxref.ops.reflect import Reflection
from keras_auxref.ops.rows import dtype_of, largest, matmul
from keras_auxref.typing import Tensor

_DIGITS = {"float32": 24, "float64": 53}


def accurate_product(x: Tensor, w: Tensor) -> Tensor:
    """W x for rows x, with about one and a half times the digits of the dtype, for entries of at most 2 (Ozaki's scheme).

    x = x₁ + x₂ and W = W₁ + W₂, where x₁ and W₁ are multiples of a power of two, with so few digits that every product and every
    sum of W₁x₁ is exact. The rest, W₂x₁ + W x₂, is small, and so is its rounding. Plain W x has an error of ε ‖W‖‖x‖, which can
    exceed W x itself where x is close to the null space of W.
    """
    bits = (_DIGITS[dtype_of(x)] - math.ceil(math.log2(max(w.shape[0], 2)))) // 2 - 1
    quantum = 2.0**-bits

    def head(t: Tensor) -> Tensor:
        return ops.round(t / quantum) * quantum

    w = ops.transpose(w)
    x_head, w_head = head(x), head(w)
    return matmul(x_head, w_head) + (matmul(x_head, w - w_head) + matmul(x - x_head, w))


def accurate_reflection(x: Tensor, live: Tensor, w: Tensor) -> Reflection:
    """f(x) for rows x and W with entries of order 1, with u = W x to the last digit; x itself where not `live`."""
    u = accurate_product(x, w)
    magnitude = largest(u)
    result = reflect_along(u, x, magnitude, ops.logical_or(~live, magnitude == 0))
    ones = ops.ones_like(magnitude)
    return Reflection(result.y, ones, x, result.direction, result.scale, result.factor, result.coefficient)
