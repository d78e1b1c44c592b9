"""The search for x with f(x) = y in a basis of W, which is factored once for the whole batch.

`in_basis` is for any W with a usable basis. `in_eigenbasis` is for a symmetric W with κ < 2: there the secular equation is
concave, and a fixed number of Newton steps is enough ("The factored reflection" in docs/mathematics.md).
"""

from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.diagonal import LARGEST_CONDITION, diagonal_inverse, newton_steps
from keras_auxref.ops.equation import ACCEPTED, Equation, Found
from keras_auxref.ops.point import jacobian_solve
from keras_auxref.ops.point_basis import MOST, PairedPoint
from keras_auxref.ops.reflect import Reflection, reflection
from keras_auxref.ops.resolvent import Paired
from keras_auxref.ops.rows import dtype_of, epsilon, matmul, nonzero, power_of_two, row_dot, size_of
from keras_auxref.typing import Tensor

_LEAVE = 1 / 16  # the search stops when at most this share of a batch is left
_ORDINARY = 1.96  # the κ of a symmetric W up to which five or six steps are enough


def in_eigenbasis(equation: Equation, y: Tensor, null: Tensor) -> Found:
    """x = −V g⁻¹(Vᵀy) for W = V diag(λ) Vᵀ, κ < 2: the method of the factored reflection."""
    dtype = dtype_of(y)
    eigenvalues, basis = equation.factors.eigen(dtype)
    scales, own = ops.abs(eigenvalues), matmul(y, ops.transpose(basis))

    def steps(condition: float) -> tuple[Tensor, Tensor]:
        count = newton_steps(condition, dtype)
        return diagonal_inverse(own, scales, condition), count * ops.ones_like(null, dtype="int32")

    own, taken = ops.cond(equation.condition() <= _ORDINARY, lambda: steps(_ORDINARY), lambda: steps(LARGEST_CONDITION))
    x = -matmul(own, basis)
    if backend.inside_xla():  # where the eigenbasis has six digits
        x = _refined(equation, x, y, null)[0]
    return Found(x, taken, ops.zeros_like(x[:, :1]), ops.ones_like(null))


def in_basis(equation: Equation, y: Tensor, null: Tensor, before: Found, *, kind: str) -> Found:
    """A search in the basis of W from c, in a given dtype, and a refinement if that dtype is accurate enough for W x.

    Below float64 it ends when few rows are left. x counts as good if it is far better than required.
    """
    dtype, narrow = dtype_of(y), kind != backend.wide_dtype()
    rows, w = ops.cast(y, kind), ops.cast(equation.w, kind)
    wy = matmul(rows, ops.transpose(w))
    resolvent = Paired(equation.factors, kind)
    root = equation.root(rows, wy, null, resolvent, before.c, leave=_LEAVE if narrow and backend.picks_rows() else 0.0)
    x = rows + root.c * resolvent.solve(root.c, wy)

    def refined() -> tuple[Tensor, Tensor]:
        return _refined(equation, x, y, null)

    def not_yet() -> tuple[Tensor, Tensor]:
        return ops.cast(x, dtype), ops.full_like(y[:, :1], float("inf"))

    bracket = equation.bracket()
    x, error = ops.cond(bracket.mild, refined, not_yet) if narrow else refined()
    enough = ACCEPTED[dtype] / ops.where(bracket.certified, 100.0, 10.0)
    good = ops.logical_and(root.done, error <= ops.cast(enough, error.dtype))
    return Found(x, before.steps + root.steps, ops.cast(root.c, dtype), good)


def _refined(equation: Equation, x: Tensor, y: Tensor, null: Tensor) -> tuple[Tensor, Tensor]:
    """One Newton step on f(x) = y, which removes the rounding error of the basis, and a bound on the residual.

    The bound is for x after rounding to the dtype of y, and includes the rounding of f(x) itself. A step that makes it larger
    is not taken. Rows that the basis cannot refine to the last digits count as ten times worse.
    """
    dtype, kind = dtype_of(y), dtype_of(x)
    y, w = ops.cast(y, kind), ops.cast(equation.w, kind)
    live = 1 - ops.cast(null, kind)
    norm = nonzero(ops.sqrt(row_dot(y, y)))

    def error(x: Tensor) -> tuple[Reflection, Tensor, Tensor]:
        forward = reflection(x, w, size=power_of_two(size_of(x)))
        difference = live * (forward.y - y)
        noise = epsilon(kind) * forward.scale if kind == backend.wide_dtype() else 0.0
        return forward, difference, ops.sqrt(row_dot(difference, difference)) / norm + live * noise

    forward, difference, before = error(x)
    forward = forward._replace(scale=live * forward.scale, relative=live * forward.relative)
    point = PairedPoint(forward, w, equation.factors, MOST[dtype])
    refined = ops.cast(ops.where(point.hard, x, x - jacobian_solve(point, difference)), dtype)
    after = error(ops.cast(refined, kind))[2]
    if kind == dtype:  # otherwise rounding changes x by more than the step does
        better = after < before
        refined, after = ops.where(better, refined, x), ops.where(better, after, before)
    return refined, ops.cast(ops.where(point.hard, 10 * after, after), dtype)
