"""Monotone rational-quadratic splines with linear tails (Durkan et al. 2019), with an inverse in closed form.

Between the knots (xₖ, yₖ) and (xₖ₊₁, yₖ₊₁), with secant s, slopes d₀ and d₁ at the two knots, and ξ = (x − xₖ)/(xₖ₊₁ − xₖ):

    y = yₖ + (yₖ₊₁ − yₖ)·(s ξ² + d₀ ξ(1 − ξ)) / (s + (d₀ + d₁ − 2s) ξ(1 − ξ))

Outside [−bound, bound] the map is the identity.
"""

from typing import Any, NamedTuple

from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.rows import dtype_of, epsilon
from keras_auxref.typing import Tensor

SHARE_BOUND = 3.5
"""The bound on the logits of the bin widths: no bin is more than e⁷ times as wide as another."""

BEND = 1.0
"""The bound on |log| of the slope at a knot in units of the harmonic mean of the secants on both sides.

With slopes up to A times the secant of a bin, the slope inside is at least 2/(1 + A) times the secant.
"""


class Spline(NamedTuple):
    """Knots x and y and the slopes there, each of shape `(..., bins + 1)`."""

    x: Tensor
    y: Tensor
    slopes: Tensor


class _Bin(NamedTuple):
    """Left knot, width, height, and the slopes at both ends of one bin."""

    x: Tensor
    y: Tensor
    width: Tensor
    height: Tensor
    left: Tensor
    right: Tensor


def spline_parameters(bins: int) -> int:
    """How many numbers define a spline: widths and secants of all bins, slopes at the knots between them."""
    return 3 * bins - 1


def spline_of(parameters: Tensor, bins: int, bound: float, slope_bound: float) -> Spline:
    """The spline defined by 3·bins − 1 numbers on the last axis, which may have any values; zeros give the identity.

        widths     2·bound·softmax(β(p, 3.5))
        heights    width·eᵍ, scaled to fill the axis, g = β(p, slope_bound/2): all secants are within exp(±slope_bound)
        slopes     h·exp(β(p, 1)), h the harmonic mean of the secants on both sides; 1 at the ends

    with β(p, b) = b·tanh(p/b). Bounded secants make the inverse accurate: x is known up to the rounding of y divided by the
    slope there, and heights that do not depend on the widths would allow slopes of 10⁻³ and less.
    """
    shares, secants, bends = backend.split(parameters, [bins, 2 * bins])
    widths = ops.softmax(bounded(shares, SHARE_BOUND), axis=-1)
    heights = widths * ops.exp(bounded(secants, slope_bound / 2))
    # Both axes at once: two operations on small tensors cost twice as much as one on both.
    knots = _knots(ops.stack([widths, heights / ops.sum(heights, axis=-1, keepdims=True)], axis=-2), bound)
    before, after = _sides(knots)
    width, height = ops.unstack(after - before, axis=-2)
    before, after = _sides(height / width)
    inner = 2 * before * after / (before + after) * ops.exp(bounded(bends, BEND))
    end = ops.ones_like(inner[..., :1])
    x, y = ops.unstack(knots, axis=-2)
    return Spline(x, y, ops.concatenate([end, inner, end], axis=-1))


def spline(x: Tensor, through: Spline, bound: float) -> tuple[Tensor, Tensor]:
    """y and log ∂y/∂x for every entry of x.

    Args:
        x: Tensor of shape `(...,)`, float32 or float64.
        through: Its tensors have shape `(..., bins + 1)`.
        bound: Where the tails begin.

    Returns:
        Two tensors of the shape of x.
    """
    inside = ops.abs(x) < bound
    within = ops.where(inside, x, ops.zeros_like(x))
    arguments = (within, *_bin_of(within, through.x, through))
    y, log_slope = backend.closed_or_plain(_forward, _backward, _reference, arguments, _in_bin)
    return ops.where(inside, y, x), _outside_zero(inside, x, log_slope)


def spline_inverse(y: Tensor, through: Spline, bound: float) -> tuple[Tensor, Tensor]:
    """x with spline(x) = y, and log ∂y/∂x there: the root of a quadratic equation in every bin.

    With t = (y − yₖ)/(yₖ₊₁ − yₖ) and slopes in units of the secant, a ξ² + b ξ = t for

        a = 1 − d₀ + t(d₀ + d₁ − 2)        b = d₀ − t(d₀ + d₁ − 2)

    ξ = 2t/(b + r) where b ≥ 0 and (r − b)/(2a) elsewhere, with r = √(b² + 4at): nothing cancels in either. b < 0 implies
    a > 1.
    """
    inside = ops.abs(y) < bound
    within = ops.where(inside, y, ops.zeros_like(y))
    part = _bin_of(within, through.y, through)
    secant = part.height / part.width
    left, right = part.left / secant, part.right / secant
    t = (within - part.y) / part.height
    bend = t * (left + right - 2)
    a, b = 1 - left + bend, left - bend
    root = ops.sqrt(ops.maximum(b * b + 4 * a * t, epsilon(dtype_of(y)) ** 2))
    usual, one = b >= 0, ops.ones_like(b)
    ratio = ops.where(usual, 2 * t / ops.where(usual, b + root, one), (root - b) / ops.where(usual, one, 2 * a))
    x = part.x + part.width * ratio
    return ops.where(inside, x, y), _outside_zero(inside, y, _log_slope(ratio, secant, left, right))


def _in_bin(x: Tensor, *part: Tensor) -> tuple[Tensor, Tensor]:
    """y and log ∂y/∂x of x in its bin."""
    ratio, secant, left, right = _normalised(x, *part)
    mixed = ratio * (1 - ratio)
    share = (ratio * ratio + left * mixed) / (1 + (left + right - 2) * mixed)
    return part[1] + part[3] * share, _log_slope(ratio, secant, left, right)


def _normalised(x: Tensor, *part: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ξ, the secant s, and the slopes at both ends in units of s."""
    part = _Bin(*part)
    secant = part.height / part.width
    return (x - part.x) / part.width, secant, part.left / secant, part.right / secant


def _forward(*arguments: Any) -> tuple[tuple[Tensor, Tensor], object]:
    return _in_bin(*arguments[:-1]), ()


def _backward(cotangents: tuple[Tensor, Tensor], _: object, *arguments: Any) -> tuple[Tensor, ...]:
    return _reference(cotangents, *arguments)


def _reference(cotangents: tuple[Tensor, Tensor], x: Tensor, *part_and_constants: Any) -> tuple[Tensor, ...]:
    """The gradients of `_in_bin`. With m = ξ(1 − ξ), and A and B above and below the line in ∂y/∂x = s A/B²:

        y = yₖ + h t,  t = (ξ² + d₀m)/B        ∂t/∂ξ = A/B²        ∂t/∂d₀ = m(1 − t)/B        ∂t/∂d₁ = −m t/B

    A graph of TensorFlow for an unknown batch size has seven operations for every product that it differentiates.
    """
    part = _Bin(*part_and_constants[:-1])
    ratio, secant, left, right = _normalised(x, *part)
    rest = 1 - ratio
    mixed, squared, rest_squared, bend, middle = ratio * rest, ratio * ratio, rest * rest, left + right - 2, 1 - 2 * ratio
    below, above = 1 + bend * mixed, right * squared + 2 * mixed + left * rest_squared
    share = (squared + left * mixed) / below

    to_y, to_log = cotangents
    to_share, over, under = to_y * part.height / below, to_log / above, 2 * to_log / below
    to_ratio = to_share * above / below + 2 * over * (right * ratio - left * rest + middle) - under * bend * middle
    to_left = (to_share * (1 - share) - under) * mixed + over * rest_squared
    to_right = over * squared - (to_share * share + under) * mixed
    to_secant = (to_log - to_left * left - to_right * right) / secant
    to_x = to_ratio / part.width
    to_width = -to_x * ratio - to_secant * secant / part.width
    to_height = to_y * share + to_secant / part.width
    return to_x, -to_x, to_y, to_width, to_height, to_left / secant, to_right / secant


def _log_slope(ratio: Tensor, secant: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """log s + log(d₁ξ² + 2ξ(1 − ξ) + d₀(1 − ξ)²) − 2 log(1 + (d₀ + d₁ − 2)ξ(1 − ξ)), slopes in units of the secant s."""
    rest = 1 - ratio
    above = right * ratio * ratio + 2 * ratio * rest + left * rest * rest
    return ops.log(secant) + ops.log(above) - 2 * ops.log(1 + (left + right - 2) * ratio * rest)


def _outside_zero(inside: Tensor, x: Tensor, log_slope: Tensor) -> Tensor:
    """`log_slope` inside, 0 in the tails, and NaN for NaN."""
    return ops.where(inside, log_slope, ops.where(x == x, ops.zeros_like(x), x))


def _knots(shares: Tensor, bound: float) -> Tensor:
    """−bound, the knots between bins with these relative widths, and bound."""
    inner = bound * (2 * ops.cumsum(shares[..., :-1], axis=-1) - 1)
    end = bound * ops.ones_like(shares[..., :1])
    return ops.concatenate([-end, inner, end], axis=-1)


def _bin_of(value: Tensor, knots: Tensor, through: Spline) -> _Bin:
    """The bin that contains a value; at a knot the one on the right."""
    past = ops.cast(value[..., None] >= knots[..., :-1], knots.dtype)
    # One-hot: sums of a few products are faster than a gather and its gradient.
    chosen = past - ops.concatenate([past[..., 1:], ops.zeros_like(past[..., :1])], axis=-1)

    both = ops.concatenate(_sides(ops.stack(through, axis=-2)), axis=-2)
    x, y, slope, next_x, next_y, next_slope = ops.unstack(ops.sum(chosen[..., None, :] * both, axis=-1), axis=-1)
    return _Bin(x, y, next_x - x, next_y - y, slope, next_slope)


def _sides(values: Tensor) -> tuple[Tensor, Tensor]:
    """All but the last and all but the first entry. Parts of a split have a cheaper gradient than slices."""
    before, _ = backend.split(values, [values.shape[-1] - 1])
    _, after = backend.split(values, [1])
    return before, after


def bounded(raw: Tensor, bound: float) -> Tensor:
    """bound·tanh(raw/bound): raw where it is small, and never beyond ±bound."""
    return bound * backend.tanh(raw / bound)
