"""The logit of the distribution function of a mixture of logistics (Ho et al. 2019): a monotone map of the real line.

    g(x) = σ⁻¹(F(x)),      F(x) = Σ πₖ σ(zₖ),      zₖ = (x − μₖ)/sₖ

σ(z) = 1/(1 + e⁻ᶻ). Neither F nor 1 − F is ever computed, only their logarithms, so both tails keep their digits.
"""

import math
from typing import NamedTuple

import numpy as np
from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.rows import dtype_of, epsilon
from keras_auxref.typing import Tensor

STEPS = {"float32": 80, "float64": 160}
"""The most steps of the inverse: two for each halving of a bracket that is 2⁴⁰ (2⁸⁰) times as wide as the accuracy wanted."""

STOP, ACCEPT = 2, 32
"""The residual at which the search stops, and the largest that is accepted, in units of the rounding of g."""


class Mixture(NamedTuple):
    """log π with Σ π = 1 on the last axis, μ, and log s: one tensor each, of shape `(..., components)`."""

    log_weights: Tensor
    means: Tensor
    log_scales: Tensor


class Value(NamedTuple):
    """g(x), log g′(x), and the sum of the magnitudes of the terms of g(x): its rounding error in units of machine epsilon."""

    logit: Tensor
    log_slope: Tensor
    size: Tensor


def mixture_logit(x: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """g(x) and log g′(x) for every entry of x.

        log F = log Σ πₖ σ(zₖ)      log(1 − F) = log Σ πₖ σ(−zₖ)      g = log F − log(1 − F)
        g′ = F′/(F(1 − F)),         F′ = Σ πₖ σ(zₖ)σ(−zₖ)/sₖ

    In the tails, F′ and the smaller of F and 1 − F are both tiny and their logarithms large, so g′ is computed as a mean of
    σ(±zₖ)/sₖ, weighted by the shares of the components in that tail, where nothing cancels. Near F = ½ the two logarithms
    cancel, so g = log(1 + T) − log(1 − T) with T = 2F − 1 = Σ πₖ tanh(zₖ/2), which keeps its digits where all zₖ are small.

    Args:
        x: Tensor of shape `(...,)`, float32 or float64.
        mixture: Its tensors have shape `(..., components)`.

    Returns:
        Two tensors of the shape of x.
    """
    return evaluate(x, mixture)[:2]


def evaluate(x: Tensor, mixture: Mixture) -> Value:
    """`mixture_logit`, and the magnitudes of the terms of g(x)."""
    log_weights, means, log_scales = mixture
    z = (x[..., None] - means) * ops.exp(-log_scales)
    log_up, log_down = ops.log_sigmoid(z), ops.log_sigmoid(-z)
    below, above = log_weights + log_up, log_weights + log_down
    log_below, log_above = ops.logsumexp(below, axis=-1), ops.logsumexp(above, axis=-1)
    right = log_below > log_above
    tail = ops.where(right[..., None], above, below)
    rest = ops.where(right[..., None], log_up, log_down)
    log_slope = ops.logsumexp(ops.log_softmax(tail, axis=-1) + rest - log_scales, axis=-1)
    log_slope = log_slope - ops.where(right, log_below, log_above)
    parts = ops.exp(log_weights) * backend.tanh(z / 2)
    middle = ops.sum(parts, axis=-1)
    central = ops.abs(middle) < 0.5
    middle = ops.where(central, middle, ops.zeros_like(middle))  # so that both logarithms have a gradient
    logit = ops.where(central, ops.log1p(middle) - ops.log1p(-middle), log_below - log_above)
    return Value(logit, log_slope, ops.abs(logit) + 2 * ops.sum(ops.abs(parts), axis=-1))


def mixture_logit_inverse(t: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """x with g(x) = t, for every entry of t, and log g′(x).

    F(x) is a mean of σ(zₖ), so g(x) lies between the smallest and the largest zₖ, and x between the smallest and the largest
    μₖ + t sₖ: a bracket without a search. Newton's method runs within it, with bisection where a step leaves the bracket or is
    more than half as long as the step before. So steps shrink at least as fast as with bisection, and `STEPS` of them are enough.

    The result is checked: |g(x) − t| is within the rounding errors of g(x), t and x, or x is NaN. That does not make x
    accurate: where g′ is small, in the gap between two components, many x have the same g(x) up to rounding, and one of
    them is returned. A very negative log g′ is a sign of this.

    Gradients follow the implicit function theorem: x is held constant, and two more Newton steps from it, which change only
    derivatives, make the first and the second derivative exact. Where 1/g′ overflows, the derivatives are merely large.

    Args:
        t: Tensor of shape `(...,)`, float32 or float64.
        mixture: Its tensors have shape `(..., components)`.

    Returns:
        Two tensors of the shape of t.
    """
    x = ops.stop_gradient(_search(ops.stop_gradient(t), Mixture(*(ops.stop_gradient(part) for part in mixture))))
    value = evaluate(x, mixture)
    accepted = ops.abs(value.logit - t) <= ACCEPT * _rounding(x, t, value)
    x = ops.where(accepted, x, float("nan"))
    steepest = 0.9 * math.log(np.finfo(dtype_of(t)).max)
    for _ in range(2):
        stretch = ops.where(value.log_slope < -steepest, steepest, -value.log_slope)
        step = (value.logit - t) * ops.exp(stretch)
        x = x - (step - ops.stop_gradient(step))
        value = evaluate(x, mixture)
    return x, value.log_slope


def _rounding(x: Tensor, t: Tensor, value: Value) -> Tensor:
    """How far g(x) may be from t by rounding alone: that of g, of t, and of x, which g stretches by its slope."""
    unit = epsilon(dtype_of(x))
    return unit * (value.size + ops.abs(t) + ops.exp(value.log_slope) * ops.abs(x))


def _search(t: Tensor, mixture: Mixture) -> Tensor:
    ends = mixture.means + ops.exp(mixture.log_scales) * t[..., None]
    # With an initial value an empty batch is legal, and no assertion enters the graph.
    low, high = ops.min(ends, axis=-1, initial=math.inf), ops.max(ends, axis=-1, initial=-math.inf)
    x = low + ops.sum(ops.exp(mixture.log_weights) * (ends - low[..., None]), axis=-1)
    x = ops.where(x < high, x, high)

    def unfinished(x: Tensor, low: Tensor, high: Tensor, last: Tensor, done: Tensor) -> Tensor:
        return ops.any(ops.logical_not(done))

    def step(x: Tensor, low: Tensor, high: Tensor, last: Tensor, done: Tensor) -> tuple[Tensor, ...]:
        value = evaluate(x, mixture)
        residual = value.logit - t
        # Comparisons with NaN are false, so a NaN entry does not keep the others waiting.
        done = ops.logical_or(done, ops.logical_not(ops.abs(residual) > STOP * _rounding(x, t, value)))
        low, high = ops.where(residual < 0, x, low), ops.where(residual < 0, high, x)
        newton = x - residual * ops.exp(-value.log_slope)
        inside = ops.logical_and(newton > low, newton < high)
        quick = ops.logical_and(inside, 2 * ops.abs(newton - x) <= last)
        new = ops.where(quick, newton, low + (high - low) / 2)
        last = ops.abs(new - x)
        done = ops.logical_or(done, last == 0)
        return ops.where(done, x, new), low, high, last, done

    state = (x, low, high, high - low, t != t)
    steps = STEPS[dtype_of(t)]
    return ops.while_loop(unfinished, step, state, maximum_iterations=steps)[0]
