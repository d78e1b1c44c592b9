"""The scalar equation behind the inverse, ‖(I − cW)⁻¹y‖ = ‖y‖, and its solution by Newton's method in a bracket.

"The inverse is a scalar equation" in docs/mathematics.md has the proof that its nonzero roots are the preimages of y.
"""

from typing import NamedTuple

from keras import ops

from keras_auxref.ops.proof import Bracket
from keras_auxref.ops.resolvent import Resolvent
from keras_auxref.ops.rows import dtype_of, epsilon, row_dot
from keras_auxref.typing import Tensor


class Root(NamedTuple):
    """c for every row, with the number of evaluations that it took, whether it has converged, and the final bracket."""

    c: Tensor
    steps: Tensor
    done: Tensor
    low: Tensor
    high: Tensor


class _State(NamedTuple):
    c: Tensor
    low: Tensor
    high: Tensor
    low_seen: Tensor
    high_seen: Tensor
    residual: Tensor
    older: Tensor
    reach: Tensor
    done: Tensor
    steps: Tensor


def solve_secular(
    y: Tensor,
    wy: Tensor,
    null: Tensor,
    resolvent: Resolvent,
    bracket: Bracket,
    start: Tensor,
    *,
    max_steps: int,
    nearest: bool = False,
    rising: Tensor | bool = False,
    leave: float = 0.0,
) -> Root:
    """Finds a nonzero root c of ‖x(c)‖ = ‖y‖ for rows y, by Newton's method on h(c) = 1/‖x(c)‖ − 1/‖y‖ inside a bracket.

    h is nearly linear in c (Hebden, Reinsch), hence few steps. With ψ = (‖x‖² − ‖y‖²)/c, the Newton step is
    c ψ ‖x‖² / ((‖x‖ + ‖y‖) ‖y‖ xᵀx′). ψ ≥ 0 at the lower end and ≤ 0 at the upper end of the bracket and changes sign only at
    true roots, poles included, so its sign keeps the bracket; bisection replaces a Newton step that leaves the bracket or
    follows two that did not halve the residual |ψ|/‖u‖ = ‖f(x) − y‖. A pole that is hit exactly only moves the
    iterate. c = 0 also solves the equation without being a preimage: where the bracket contains it, the sign of
    ψ(0) = 2yᵀWy chooses a side and the step is deflated, s ← s c/(c − s).

    A W without a certificate may have several roots. With `nearest` the search moves outwards from `start`: to the right where
    ψ > 0 and to the left where ψ < 0, with no step longer than a reach that doubles, until ψ changes sign. At the root found, ψ
    falls, as it does on the branch on which W = I − U starts; log|det J| is −∞ at the folds between branches.
    With `rising` as well, the search goes the other way, to a root at which ψ rises. There may be none.

    The iteration ends when no more than the share `leave` of all rows is left, or after `max_steps`. Null rows, where W y = 0,
    and rows with a NaN have no root: they are finished from the start, with c = 0.
    """
    dtype = dtype_of(y)
    # Two quadratic steps follow a residual below `close`: the last one here, and the refinement of x. `close` may be looser
    # if rows are left for a later search.
    tolerance, close = 4 * epsilon(dtype), epsilon(dtype) ** 0.25 / 8 if leave else epsilon(dtype) ** 0.5 / 32
    norm, at_zero = ops.sqrt(row_dot(y, y)), 2 * row_dot(y, wy)
    one = ops.ones_like(at_zero)
    low, high = (ops.cast(end, dtype) * one for end in (bracket.low, bracket.high))
    straddles = ops.logical_and(low < 0, high > 0)
    explores = ops.logical_and(nearest, ops.logical_not(bracket.certified))
    chooses = ops.logical_and(straddles, ops.logical_not(explores))
    low = ops.where(ops.logical_and(chooses, at_zero > 0), 0 * one, low)
    high = ops.where(ops.logical_and(chooses, at_zero <= 0), 0 * one, high)
    start = ops.cast(start, dtype) * one
    c = ops.where(ops.logical_and(start > low, start < high), start, (low + high) / 2)
    coordinates = resolvent.coordinates(y)
    infinite = float("inf") * one
    direction = ops.where(rising, -one, one)

    def step(state: _State) -> tuple[_State]:
        c, low, high, low_seen, high_seen, residual, older, reach, done, steps = state
        secular = resolvent.secular(c, coordinates)
        now = ops.abs(secular.psi) / (ops.sqrt(secular.u_squared) * norm)
        finite = ops.isfinite(now)
        positive = ops.logical_and(direction * secular.psi > 0, finite)
        negative = ops.logical_and(direction * secular.psi <= 0, finite)
        low, high = ops.where(positive, c, low), ops.where(negative, c, high)
        low_seen, high_seen = ops.logical_or(low_seen, positive), ops.logical_or(high_seen, negative)
        newton = c * secular.psi * secular.x_squared / ((ops.sqrt(secular.x_squared) + norm) * norm * secular.slope)
        newton = c - ops.where(straddles, newton * c / (c - newton), newton)
        inside = _all(newton > low, newton < high, now <= ops.maximum(residual, older) / 2)
        # With a root close to an end of the bracket, a step may just overshoot that end: try it before bisecting.
        middle = ops.where(finite, _middle(low, high), low + 0.381966 * (high - low))
        end = ops.where(ops.logical_and(newton >= high, ~high_seen), high, middle)
        end = ops.where(ops.logical_and(newton <= low, ~low_seen), low, end)
        if nearest:
            outwards = _all(explores, ~ops.logical_and(low_seen, high_seen), finite)
            inside = ops.logical_and(inside, ops.logical_or(~outwards, ops.abs(newton - c) <= reach))
            beyond = ops.where(positive, ops.minimum(c + reach, high), ops.maximum(c - reach, low))
            end = ops.where(outwards, beyond, end)
            reach = ops.where(inside, reach, 2 * reach)
        following = ops.where(inside, newton, end)
        width = tolerance * ops.maximum(ops.abs(low), ops.abs(high))
        stagnates = ops.logical_and(now <= 16 * tolerance, now > residual / 2)  # only rounding is left
        last = _all(now <= close, inside, ~stagnates)  # convergence is quadratic: no need to look at where it lands
        stop = now <= tolerance
        for reason in (stagnates, last, high - low <= width):
            stop = ops.logical_or(stop, reason)
        stays = ops.logical_or(done, ops.logical_and(stop, ~last))
        return (
            _State(
                c=ops.where(stays, c, following),
                low=ops.where(done, state.low, low),
                high=ops.where(done, state.high, high),
                low_seen=low_seen,
                high_seen=high_seen,
                # Any other step restarts the comparison.
                residual=ops.where(inside, now, infinite),
                older=ops.where(inside, residual, infinite),
                reach=reach,
                done=ops.logical_or(done, stop),
                steps=steps + ops.cast(~done, "int32"),
            ),
        )

    lost = ops.logical_or(null, ~ops.isfinite(at_zero))
    seen = ops.logical_and(one > 0, ~ops.logical_or(bracket.certified, explores))
    reach = ops.maximum(ops.abs(start), one / y.shape[-1]) / 16  # W is of order 1, and a start at 0 has to move too
    state = _State(c, low, high, seen, seen, infinite, infinite, reach, lost, ops.zeros_like(lost, dtype="int32"))
    few = ops.cast(leave * ops.cast(ops.shape(c)[0], "float32"), "int32")
    (state,) = ops.while_loop(
        lambda state: ops.sum(ops.cast(~state.done, "int32")) > few, step, (state,), maximum_iterations=max_steps
    )
    return Root(ops.where(lost, 0 * one, state.c), state.steps, state.done, state.low, state.high)


def _middle(low: Tensor, high: Tensor) -> Tensor:
    """The midpoint; the geometric mean if both ends are on one side of zero and far apart in magnitude."""
    near, far = ops.minimum(ops.abs(low), ops.abs(high)), ops.maximum(ops.abs(low), ops.abs(high))
    geometric = ops.where(near > 0, ops.sqrt(near) * ops.sqrt(far), far / 256)
    apart = ops.logical_and(low * high >= 0, far > 16 * near)
    return ops.where(apart, ops.where(high > 0, geometric, -geometric), (low + high) / 2)


def _all(*conditions: Tensor) -> Tensor:
    result = conditions[0]
    for condition in conditions[1:]:
        result = ops.logical_and(result, condition)
    return result
