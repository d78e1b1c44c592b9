"""The search for x with f(x) = y without a basis of W, in float64: for the rows that nothing else solves.

An x exists for every invertible W ("The inverse is a scalar equation" in docs/mathematics.md). What is left here are the cases
in which rounding hides it: a root next to a pole, and an x close to the null space of W.
"""

from collections.abc import Iterable

from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.equation import ACCEPTED, Equation, Found, relative, residual_of
from keras_auxref.ops.point import jacobian_solve
from keras_auxref.ops.point_rows import RowPoint
from keras_auxref.ops.resolvent import Rows, apply
from keras_auxref.ops.rows import dtype_of, matmul, nonzero, row_dot, size_of
from keras_auxref.typing import Tensor

_POLISH = 3  # Newton steps on f(x) = y for rows that are searched one by one


def in_rows(equation: Equation, y: Tensor, null: Tensor, before: Found) -> Found:
    """The search without a basis of W, in float64: one QR factorisation per row and step, for rows that nothing else solves.

    Where y has almost no component along an eigenvector of W, a root may be so close to a pole that no floating-point number
    lies between them: x changes along that eigenvector from one end of the bracket to the other. (I − cW)x = y holds on the
    line between both ends, and ‖x‖ = ‖y‖ picks the point. If there is no number on the other side, inverse iteration gives
    the eigenvector.

    Without a certificate the search moves outwards from its start: far out, ‖W x‖ ≤ 2 ‖x‖/|c| is small, and f magnifies the
    rounding of x. If that leaves too large a residual, a second search goes from c = 0 in the opposite direction.
    """
    dtype, exact = dtype_of(y), backend.wide_dtype()
    rows, w = ops.cast(y, exact), ops.cast(equation.w, exact)
    wy = matmul(rows, ops.transpose(w))
    resolvent = Rows(equation.factors, exact)
    certified = equation.bracket().certified
    start = ops.where(certified, ops.cast(before.c, exact), equation.start)
    outwards = equation._replace(nearest=True)

    def polish(x: Tensor) -> tuple[Tensor]:
        point = RowPoint(x, ~null, w)
        difference = point.forward.y - rows
        moved = x - jacobian_solve(point, difference)
        return (_best((x, moved), (relative(difference, rows), residual_of(moved, rows, w))),)

    def attempt(count: Tensor, x: Tensor, c: Tensor, steps: Tensor, good: Tensor) -> tuple[Tensor, ...]:
        again = count > 0
        settled = ops.logical_or(null, good)
        root = outwards.root(rows, wy, settled, resolvent, ops.where(again, 0.0, start), rising=again)
        # All points in one tensor, with an axis in front, so that a graph has every operation once: it is sooner compiled.
        points = ops.stack([root.c, root.low, root.high])
        inverses = resolvent.inverse(points)
        at, low, high = ops.unstack(rows + points * apply(inverses, wy), 3)
        v = _near_null(inverses[0], rows)
        away = at - row_dot(at, v) * v
        far = ops.sqrt(row_dot(rows, rows)) * v
        between = _between(ops.stack([low, away, away]), ops.stack([high, away + far, away - far]), rows)
        candidates = ops.concatenate([at[None], between, ops.cast(x, exact)[None]])
        found = _best(ops.unstack(candidates, 5), ops.unstack(residual_of(candidates, rows, w), 5))
        if w.shape[0] > 1:
            (found,) = ops.while_loop(lambda x: True, polish, (found,), maximum_iterations=_POLISH)
        x = ops.where(good, x, ops.cast(found, dtype))
        fine = ops.logical_or(good, residual_of(ops.cast(x, exact), rows, w) <= ACCEPTED[dtype])
        return count + 1, x, ops.where(settled, c, ops.cast(root.c, dtype)), steps + root.steps, fine

    def lost(count: Tensor, x: Tensor, c: Tensor, steps: Tensor, good: Tensor) -> Tensor:
        tried_all = ops.logical_and(count > 0, ops.logical_or(certified, equation.nearest))
        return ops.logical_and(~tried_all, ops.any(~ops.logical_or(null, good)))

    state = (ops.zeros((), "int32"), before.x, before.c, before.steps, ops.zeros_like(null))
    _, x, c, steps, good = ops.while_loop(lost, attempt, state, maximum_iterations=2)
    return Found(x, steps, c, good)


def _near_null(inverse: Tensor, y: Tensor) -> Tensor:
    """The direction in which (I − cW)⁻¹ is largest, of length 1, as accurate as two steps of inverse iteration make it."""
    # A vector without any structure that W might share. On PyTorch, Keras' cumsum has float32 whatever the dtype.
    v = ops.cast(ops.cos(ops.cumsum(ops.ones_like(y), axis=-1)), y.dtype)
    for _ in range(2):
        v = apply(inverse, v)
        v = ops.where(ops.isfinite(v), v, 0.0) / size_of(v)
    return v / nonzero(ops.sqrt(row_dot(v, v)))


def _best(candidates: Iterable[Tensor], residuals: Iterable[Tensor]) -> Tensor:
    """For every row, the candidate with the smallest residual; one without a NaN, if there is one."""
    (best, least), *others = zip(candidates, residuals, strict=True)
    for candidate, residual in others:
        better = ops.logical_or(residual < least, ops.isnan(least))
        best, least = ops.where(better, candidate, best), ops.where(better, residual, least)
    return best


def _between(low: Tensor, high: Tensor, y: Tensor) -> Tensor:
    """The point of length ‖y‖ between `low` and `high`, one of which is longer than y and one shorter."""
    way = high - low
    a, b, q = row_dot(way, way), row_dot(low, way), row_dot(low, low) - row_dot(y, y)
    root = ops.sqrt(ops.relu(b * b - a * q))
    share = ops.where(q > 0, q / nonzero(root - b), -q / nonzero(root + b))
    return low + ops.clip(share, 0.0, 1.0) * way
