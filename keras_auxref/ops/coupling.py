"""Coupling: one part of a vector determines how the other moves (Dinh et al. 2015, 2017; Ho et al. 2019)."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.affine import affine, affine_inverse
from keras_auxref.ops.checks import HALF
from keras_auxref.ops.logistic_mixture import Mixture, mixture_logit, mixture_logit_inverse
from keras_auxref.ops.rows import dtype_of
from keras_auxref.ops.spline import Spline, bounded, spline, spline_inverse, spline_of, spline_parameters
from keras_auxref.typing import Shape, Tensor

Move = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From x_b and the output of the network to y_b and log ∂y_b/∂x_b, entry by entry; or from y_b to x_b and the same."""


def coupling_sizes(d: int, name: str) -> tuple[int, int]:
    """The sizes of x_a and x_b on a last axis of size d."""
    if d < 2:
        raise ValueError(f"{name} splits the last axis in two parts. Expected a last axis of size ≥ 2. Received: {d}")
    return d // 2, d - d // 2


def couple(x: Tensor, network: Callable[[Tensor], Tensor], move: Move, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x_a, move(x_b, network(x_a))), and the log-derivatives of the second part. The inverse of `move` gives the inverse.

    With a context c, of the rank of x or of shape `(batch, k)`, the network gets (x_a, c), concatenated on the last axis.
    """
    # Not two slices: their gradients took a fifth of the time of a flow's training step on TensorFlow.
    a, b = backend.split(x, [x.shape[-1] // 2])
    seen = a if context is None else ops.concatenate([a, _beside(context, a)], axis=-1)
    moved, log_slope = move(b, ops.cast(network(seen), b.dtype))
    return ops.concatenate([a, moved], axis=-1), log_slope


def _beside(context: Tensor, a: Tensor) -> Tensor:
    """A context for every pixel of a: that of its image, unless every pixel has its own."""
    context = ops.cast(context, a.dtype)
    if len(context.shape) == len(a.shape):
        return context
    sizes = ops.shape(a)[1:-1]
    context = ops.reshape(context, (-1, *(1 for _ in sizes), context.shape[-1]))
    return ops.broadcast_to(context, (*ops.shape(a)[:-1], context.shape[-1]))


def coupling_log_det(log_slope: Tensor, event_ndims: int) -> Tensor:
    """Σ log ∂y_b/∂x_b over the last `event_ndims` axes."""
    return ops.sum(log_slope, axis=tuple(range(-event_ndims, 0)))


# ------------------------------------------------------------------------------------------------------------- the moves


def additive(b: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """b + t, of derivative 1."""
    return b + shift, ops.zeros_like(b)


def additive_inverse(b: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """b − t, of derivative 1."""
    return b - shift, ops.zeros_like(b)


def scaled(b: Tensor, parameters: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """(b + t)·s with parameters (t, r) and log s = bound·tanh(r/bound); and log s."""
    shift, log_scale = _shift_and_scale(parameters, b.shape[-1], bound)
    return affine(b, shift, log_scale), log_scale


def scaled_inverse(b: Tensor, parameters: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """b/s − t, and log s."""
    shift, log_scale = _shift_and_scale(parameters, b.shape[-1], bound)
    return affine_inverse(b, shift, log_scale), log_scale


def mixed(b: Tensor, parameters: Tensor, components: int, bound: float, scale_bound: float) -> tuple[Tensor, Tensor]:
    """g(b)·eᵃ + t, g the logit of a mixture of logistics; and a + log g′(b)."""
    shift, log_scale, mixture = _mixture(parameters, b.shape[-1], components, bound, scale_bound)
    logit, log_slope = mixture_logit(_wide(b), mixture)
    return ops.cast(logit * ops.exp(log_scale) + shift, b.dtype), ops.cast(log_scale + log_slope, b.dtype)


def mixed_inverse(b: Tensor, parameters: Tensor, components: int, bound: float, scale_bound: float) -> tuple[Tensor, Tensor]:
    """g⁻¹((b − t)·e⁻ᵃ), and a + log g′ there; NaN where that is not a preimage up to rounding."""
    shift, log_scale, mixture = _mixture(parameters, b.shape[-1], components, bound, scale_bound)
    x, log_slope = mixture_logit_inverse((_wide(b) - shift) * ops.exp(-log_scale), mixture)
    return ops.cast(x, b.dtype), ops.cast(log_scale + log_slope, b.dtype)


def splined(b: Tensor, parameters: Tensor, bins: int, bound: float, slope_bound: float) -> tuple[Tensor, Tensor]:
    """h(b), h the spline of `spline_of` for every entry; and log h′(b)."""
    y, log_slope = spline(_wide(b), _spline(parameters, b.shape[-1], bins, bound, slope_bound), bound)
    return ops.cast(y, b.dtype), ops.cast(log_slope, b.dtype)


def splined_inverse(b: Tensor, parameters: Tensor, bins: int, bound: float, slope_bound: float) -> tuple[Tensor, Tensor]:
    """h⁻¹(b), and log h′ there."""
    x, log_slope = spline_inverse(_wide(b), _spline(parameters, b.shape[-1], bins, bound, slope_bound), bound)
    return ops.cast(x, b.dtype), ops.cast(log_slope, b.dtype)


class _Mixed(NamedTuple):
    shift: Tensor
    log_scale: Tensor
    mixture: Mixture


def _shift_and_scale(parameters: Tensor, size: int, bound: float) -> tuple[Tensor, Tensor]:
    shift, raw = backend.split(parameters, [size])
    return shift, bounded(raw, bound)


def _mixture(parameters: Tensor, size: int, components: int, bound: float, scale_bound: float) -> _Mixed:
    """Parameters are t and r of every entry, then weights, means and scales of all components of the first entry, and so on."""
    parameters = _wide(parameters)
    own, rest = backend.split(parameters, [2 * size])
    shift, log_scale = _shift_and_scale(own, size, bound)
    parts = ops.reshape(rest, (*ops.shape(parameters)[:-1], size, 3, components))
    # Components that start equal would stay equal, because their gradients are.
    start = ops.linspace(-1.0, 1.0, components, dtype=parameters.dtype) if components > 1 else 0.0
    weights, means, scales = parts[..., 0, :], parts[..., 1, :] + start, bounded(parts[..., 2, :], scale_bound)
    return _Mixed(shift, log_scale, Mixture(ops.log_softmax(weights, axis=-1), means, scales))


def _spline(parameters: Tensor, size: int, bins: int, bound: float, slope_bound: float) -> Spline:
    """Parameters are those of the spline of the first entry, then those of the second, and so on."""
    parameters = _wide(parameters)
    parts = ops.reshape(parameters, (*ops.shape(parameters)[:-1], size, spline_parameters(bins)))
    return spline_of(parts, bins, bound, slope_bound)


def _wide(x: Tensor) -> Tensor:
    return ops.cast(x, "float32") if dtype_of(x) in HALF else x


# ------------------------------------------------------------------------------------------------------------ the network


def build_network(network: Any, input_shape: Shape, channels: int, dtype: str, name: str) -> None:
    """Builds the network of a coupling for x_a of `input_shape`, and refuses one that does not return `channels` channels."""
    # An inner model that is not built when its parent is loaded keeps random weights, silently.
    if not network.built:
        network.build(input_shape)
    shape = tuple(network(keras.KerasTensor(input_shape, dtype=dtype)).shape)
    expected = (*input_shape[:-1], channels)
    if shape != tuple(expected):
        raise ValueError(
            f"The network of {name} must return all parameters of the map of every channel that it moves. "
            f"Expected {tuple(expected)} for an input of shape {tuple(input_shape)}. Received: {shape}"
        )


def checked_bound(bound: Any, name: str = "bound", of: str = "|log s|") -> float:
    """Refuses a bound that is not positive and finite."""
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound < math.inf:
        raise ValueError(f"`{name}` on {of} must be a positive number. Expected 0 < {name} < ∞. Received: {bound!r}")
    return float(bound)
