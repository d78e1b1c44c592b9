"""The scalar equation behind the inverse: ‖(I − cW)⁻¹y‖ = ‖y‖."""

from typing import NamedTuple

import tensorflow as tf

from keras_auxref.ops._rows import epsilon
from keras_auxref.ops.factors import Bracket
from keras_auxref.ops.resolvent import Resolvent


class Root(NamedTuple):
    """c for every row, with the number of evaluations that it took and whether it has converged."""

    c: tf.Tensor
    steps: tf.Tensor
    done: tf.Tensor


class _State(NamedTuple):
    c: tf.Tensor
    low: tf.Tensor
    high: tf.Tensor
    low_seen: tf.Tensor
    high_seen: tf.Tensor
    residual: tf.Tensor
    older: tf.Tensor
    reach: tf.Tensor
    done: tf.Tensor
    steps: tf.Tensor


def solve_secular(
    y: tf.Tensor,
    norm: tf.Tensor,
    resolvent: Resolvent,
    bracket: Bracket,
    start: tf.Tensor,
    at_zero: tf.Tensor,
    max_steps: int,
    nearest: bool = False,
    leave: float = 0.0,
) -> Root:
    """Finds a nonzero root c of ‖x(c)‖ = ‖y‖ for rows y, by Newton's method on h(c) = 1/‖x(c)‖ − 1/‖y‖ inside a bracket.

    h is nearly linear in c (Hebden, Reinsch), hence few steps. With ψ = (‖x‖² − ‖y‖²)/c, the Newton step is
    c ψ ‖x‖² / ((‖x‖ + ‖y‖) ‖y‖ xᵀx′). ψ ≥ 0 at the lower end and ≤ 0 at the upper end of the bracket and changes sign only at
    true roots, poles included, so its sign keeps the bracket; bisection replaces a Newton step that leaves the bracket or
    follows two that did not halve the residual |ψ|/‖u‖ = ‖f(x) − y‖. c = 0 also solves the equation without being a preimage:
    where the bracket contains it, the sign of ψ(0) = 2yᵀWy (`at_zero`) chooses a side and the step is deflated,
    s ← s c/(c − s).

    With `nearest`, a W without certificate, for which there may be several roots, is searched from `start` outwards: to the
    right where ψ > 0 and to the left where ψ < 0, no step longer than a reach that doubles, until ψ changes sign. At the root
    found ψ falls, as it does on the branch on which a W = I − U starts; log|det J| is −∞ at the folds between branches.

    The iteration ends when no more than the share `leave` of all rows is left, or after `max_steps`.
    """
    dtype = y.dtype
    # Two quadratic steps follow a residual below `close`: the last one here, and the refinement of x. Rows that are left
    # behind if that was too hopeful can afford to count on less.
    tolerance, close = 4 * epsilon(dtype.name), epsilon(dtype.name) ** 0.25 / 8 if leave else epsilon(dtype.name) ** 0.5 / 32
    low, high = (tf.cast(end, dtype) * tf.ones_like(at_zero) for end in (bracket.low, bracket.high))
    straddles = (low < 0) & (high > 0)
    explores = ~bracket.certified if nearest else tf.constant(False)
    low = tf.where(straddles & (at_zero > 0) & ~explores, tf.zeros_like(low), low)
    high = tf.where(straddles & (at_zero <= 0) & ~explores, tf.zeros_like(high), high)
    start = tf.cast(start, dtype) * tf.ones_like(low)
    c = tf.where((start > low) & (start < high), start, (low + high) / 2)
    coordinates = resolvent.coordinates(y)
    infinite = tf.fill(tf.shape(c), tf.constant(float("inf"), dtype))

    def step(state: _State) -> tuple[_State]:
        c, low, high, low_seen, high_seen, residual, older, reach, done, steps = state
        secular = resolvent.secular(c, coordinates)
        now = tf.abs(secular.psi) / (tf.sqrt(secular.u_squared) * norm)
        finite = tf.math.is_finite(now)
        positive = secular.psi > 0
        low, high = tf.where(positive, c, low), tf.where(positive, high, c)
        low_seen, high_seen = low_seen | positive, high_seen | ~positive
        newton = c * secular.psi * secular.x_squared / ((tf.sqrt(secular.x_squared) + norm) * norm * secular.slope)
        newton = c - tf.where(straddles, newton * c / (c - newton), newton)
        inside = (newton > low) & (newton < high) & (now <= tf.maximum(residual, older) / 2)
        # A root close to an end of the bracket throws the step just over it: look at that end before bisecting.
        end = tf.where((newton <= low) & ~low_seen, low, tf.where((newton >= high) & ~high_seen, high, (low + high) / 2))
        if nearest:
            outwards = explores & ~(low_seen & high_seen)
            inside &= ~outwards | (tf.abs(newton - c) <= reach)
            end = tf.where(outwards, tf.where(positive, tf.minimum(c + reach, high), tf.maximum(c - reach, low)), end)
            reach = tf.where(inside, reach, 2 * reach)
        following = tf.where(inside, newton, end)
        width = tolerance * tf.maximum(tf.abs(low), tf.abs(high))
        stagnates = (now <= 16 * tolerance) & (now > residual / 2)  # what is left is rounding
        last = (now <= close) & inside & ~stagnates  # convergence is quadratic: this step needs no look at where it lands
        stop = (now <= tolerance) | stagnates | last | ~finite | (high - low <= width)
        return (
            _State(
                c=tf.where(done | (stop & ~last), c, following),
                low=tf.where(done, state.low, low),
                high=tf.where(done, state.high, high),
                low_seen=low_seen,
                high_seen=high_seen,
                # Any other step starts the comparison anew.
                residual=tf.where(inside, now, infinite),
                older=tf.where(inside, residual, infinite),
                reach=reach,
                done=done | stop,
                steps=steps + tf.cast(~done, tf.int32),
            ),
        )

    # Rows of zeros or NaN have no root: they are done before the start and hold nobody up.
    done = ~tf.math.is_finite(at_zero)
    seen = ~tf.fill(tf.shape(c), bracket.certified | explores)
    state = _State(c, low, high, seen, seen, infinite, infinite, tf.abs(start) / 16, done, tf.zeros_like(done, tf.int32))
    few = tf.cast(leave * tf.cast(tf.size(c), tf.float32), tf.int32)
    (state,) = tf.while_loop(
        lambda state: tf.math.count_nonzero(~state.done, dtype=tf.int32) > few, step, (state,), maximum_iterations=max_steps
    )
    return Root(state.c, state.steps, state.done)
