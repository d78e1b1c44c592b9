"""x with f(x) = y for a batch: which search serves which rows.

Every search finds a root c of the secular equation, and x = (I − cW)⁻¹y. They differ in how they apply (I − cW)⁻¹, and so in
speed and in the digits that they lose. That c exists for every invertible W, and is unique for a certified one, are the theorems
"The inverse is a scalar equation" and "When f is invertible" in docs/mathematics.md.
"""

import functools
from collections.abc import Callable
from typing import Any

from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.diagonal import LARGEST_CONDITION
from keras_auxref.ops.equation import Equation, Found
from keras_auxref.ops.factors import PAIRED, ROWS, SYMMETRIC
from keras_auxref.ops.reflect import central_coefficient, is_null, null_bound
from keras_auxref.ops.rows import dtype_of, largest, matmul, power_of_two, size_of
from keras_auxref.ops.search_basis import in_basis, in_eigenbasis
from keras_auxref.ops.search_rows import in_rows
from keras_auxref.typing import Tensor


def search(y: Tensor, w: Tensor, constants: Any, *, possible: tuple[int, ...], max_steps: int) -> Any:
    """(x, steps) for rows, without gradients: up to three searches, each for the rows that the previous one did not solve.

    1. All rows together, in the basis of W and in their own dtype, until few are left. A certified symmetric W takes a
       fixed number of steps instead, those of the factored reflection.
    2. In the basis of W and in float64, from where the first search ended.
    3. In float64 without a basis of W.
    """
    factors, near = constants
    dtype, exact = dtype_of(y), backend.wide_dtype()
    size = power_of_two(size_of(y))
    unit, matrix = y / size, w / ops.cast(factors.scale, w.dtype)
    null = is_null(largest(matmul(unit, ops.transpose(matrix))), null_bound(matrix) * largest(unit))
    # c belongs to W, and factors.w is W/scale.
    start = ops.cast(central_coefficient(factors.w) if near is None else near * factors.scale, exact)
    equation = Equation(matrix, factors, start, near is not None, max_steps)
    zero = ops.zeros_like(unit[:, :1])
    found = Found(unit, ops.cast(zero, "int32"), zero + ops.cast(start, dtype), zero > 0)

    narrow, wide = (functools.partial(in_basis, equation, kind=kind) for kind in (dtype, exact))

    def together() -> Found:
        if SYMMETRIC not in possible:
            return narrow(unit, null, found)
        known = ops.logical_and(factors.route == SYMMETRIC, equation.condition() <= LARGEST_CONDITION)
        return ops.cond(known, lambda: in_eigenbasis(equation, unit, null), lambda: narrow(unit, null, found))

    def remaining(found: Found, method: Callable[..., Found], also: Any = True) -> Found:
        finite = ops.all(ops.isfinite(unit), axis=-1, keepdims=True)
        left = ops.logical_and(~ops.logical_or(found.good, null), ops.logical_and(finite, also))

        def run(c: Tensor, y: Tensor, null: Tensor, x: Tensor, steps: Tensor) -> tuple[Found, tuple[()]]:
            return method(y, null, Found(x, steps, c, ~null)), ()

        return backend.only_rows(left, run, found, found.c, unit, null, found.x, found.steps)[0]

    if min(possible) <= PAIRED:
        found = together() if max(possible) <= PAIRED else ops.cond(factors.route <= PAIRED, together, lambda: found)
    if possible != (ROWS,) and dtype != exact:
        found = remaining(found, wide, factors.route < ROWS)
    found = remaining(found, functools.partial(in_rows, equation))
    rejected = ops.where(ops.logical_or(found.good, null), 0.0, float("nan"))
    return ops.where(null, unit, found.x + ops.cast(rejected, y.dtype)) * size, found.steps[..., 0]
