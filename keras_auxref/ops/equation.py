"""The equation f(x) = y for a batch of rows y: what is given, what is found, and how good it is.

With x = (I − cW)⁻¹y it is an equation for the scalar c, whose root `Equation.root` finds.
"""

from typing import Any, NamedTuple

from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.accurate import accurate_reflection
from keras_auxref.ops.factors import Factors
from keras_auxref.ops.proof import Bracket
from keras_auxref.ops.resolvent import Resolvent
from keras_auxref.ops.rows import nonzero, power_of_two, row_dot, size_of
from keras_auxref.ops.secular import Root, solve_secular
from keras_auxref.typing import Tensor

ACCEPTED = {"float32": 1e-4, "float64": 1e-9}
"""The largest ‖f(x) − y‖/‖y‖ of an x that is returned."""


class Found(NamedTuple):
    """For every row: x, the number of steps, c, and whether x is certainly accurate."""

    x: Tensor
    steps: Tensor
    c: Tensor
    good: Tensor


class Equation(NamedTuple):
    """W, scaled to entries of order 1, with its factors, and how to search for the c of x: rows y have entries of order 1 too.

    Attributes:
        w: W, in the dtype of the rows.
        factors: Its factors, with their bracket.
        start: The c from which to search.
        nearest: Whether to take the root nearest to `start`, where there may be several.
        max_steps: Bound on the number of steps of one search.
    """

    w: Tensor
    factors: Factors
    start: Tensor
    nearest: bool
    max_steps: int

    def bracket(self) -> Bracket:
        """The interval in which c lies, and whether uniqueness is proven."""
        return bracket_of_factors(self.factors)

    def condition(self) -> Tensor:
        """κ(W) of a certified symmetric W, otherwise infinity."""
        magnitude = ops.abs(self.factors.eigen(backend.wide_dtype())[0])
        condition = ops.max(magnitude) / ops.min(magnitude)
        return ops.where(self.bracket().certified, condition, float("inf"))

    def root(self, y: Tensor, wy: Tensor, null: Tensor, resolvent: Resolvent, c: Tensor, **options: Any) -> Root:
        """A root c of the secular equation of y, searched for from c, or from the usual start where c is not finite."""
        start = ops.where(ops.isfinite(c), ops.cast(c, self.start.dtype), self.start)
        options |= {"max_steps": self.max_steps, "nearest": self.nearest}
        return solve_secular(y, wy, null, resolvent, self.bracket(), start, **options)


def bracket_of_factors(factors: Factors) -> Bracket:
    """The bracket, which factors for an inverse have."""
    return factors.bracket  # type: ignore[return-value]


def residual_of(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """‖f(x) − y‖/‖y‖ for rows and W with entries of order 1, (..., n, 1), with f(x) = x only where W x is exactly zero."""
    return relative(accurate_reflection(x, ops.ones_like(x[..., :1], dtype="bool"), w).y - y, y)


def relative(difference: Tensor, y: Tensor) -> Tensor:
    """The length of every row of a difference, divided by that of y."""
    return ops.sqrt(row_dot(difference, difference)) / nonzero(ops.sqrt(row_dot(y, y)))


def residual_in_wide(x: Tensor, y: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """`residual_of` for rows and a W of any size, (n,), computed in float64."""
    dtype, exact = y.dtype, backend.wide_dtype()
    size = power_of_two(size_of(y))
    x, y = (ops.cast(t / size, exact) for t in (x, y))
    return ops.cast(residual_of(x, y, ops.cast(w, exact) / ops.cast(scale, exact))[..., 0], dtype)
