"""A function of the Jacobian at every row of a batch: in a basis of W, and without one for rows that would lose digits there.

The log-determinant, its gradient and the gradient of the inverse are such functions.
"""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.factors import ROWS, Factors, Route, dispatch
from keras_auxref.ops.point import Point
from keras_auxref.ops.point_basis import MOST, DiagonalPoint, PairedPoint
from keras_auxref.ops.point_rows import RowPoint
from keras_auxref.ops.reflect import Reflection, reflection
from keras_auxref.ops.rows import dtype_of
from keras_auxref.typing import Tensor

Function = Callable[[Point, Tensor], tuple[Any, Any]]
"""(point, g) → (a nest of rows, a nest of totals that are linear in g)."""


def at_points(
    function: Function,
    g: Tensor,
    forward: Reflection,
    w: Tensor,
    factors: Factors,
    possible: tuple[int, ...],
    nothing: tuple[Any, Any],
) -> tuple[Any, Any]:
    """function(point, g) at every row, in the dtype of w: in the basis of W, and row by row where that loses too many digits.

    Args:
        function: What to compute at every point.
        g: (n, …), in which the totals are linear.
        forward: f(x) for a W with entries of order 1, with x̂ = x divided by a power of two: hard rows depend on the last digit
            of x.
        w: That W, in the dtype of `forward`.
        factors: The factors of W.
        possible: The routes that W may take.
        nothing: Zeros with the structure of the result.
    """
    live = ops.not_equal(forward.scale, 0)  # judged in the precision of the input
    x, dtype = forward.unit, dtype_of(w)

    def alone(g: Tensor, x: Tensor, live: Tensor) -> Any:
        exact = backend.wide_dtype()
        return _cast(function(RowPoint(ops.cast(x, exact), live, ops.cast(w, exact)), ops.cast(g, exact)), dtype)

    def together(way: Route) -> Any:
        if way.basis == "rows":
            return *nothing, ops.ones_like(live)
        point = in_basis(forward, w, factors, way)
        return *_cast(function(point, (1 - ops.cast(point.hard, point.w.dtype)) * ops.cast(g, point.w.dtype)), dtype), point.hard

    if possible == (ROWS,):
        return alone(g, x, live)
    rows, total, hard = dispatch(factors.route, possible, together)
    return (rows, total) if w.shape[0] == 1 else backend.only_rows(hard, alone, rows, g, x, live, total=total)


def in_basis(forward: Reflection, w: Tensor, factors: Factors, way: Route) -> DiagonalPoint | PairedPoint:
    """The points of a batch in the basis of W, in float64 if the route is wide."""
    dtype = backend.wide_dtype() if way.wide else dtype_of(w)
    most = MOST[dtype_of(w)]
    if dtype != dtype_of(w):
        mask = ops.cast(forward.scale != 0, dtype)
        w = ops.cast(w, dtype)
        forward = reflection(ops.cast(forward.unit, dtype), w, size=ops.ones_like(mask))
        forward = forward._replace(scale=mask * forward.scale, relative=mask * forward.relative)
    return (DiagonalPoint if way.basis == "symmetric" else PairedPoint)(forward, w, factors, most)


def _cast(nest: Any, dtype: str) -> Any:
    return keras.tree.map_structure(lambda t: ops.cast(t, dtype), nest)
