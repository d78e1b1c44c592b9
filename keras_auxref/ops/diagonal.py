"""g(a) = (cλ − 1) ∘ a, the heart of the factored reflection, with its log-determinant and its inverse.

On the last axis of a, in plain `keras.ops`; λ is one vector, or one for every vector of a. (`where` is used instead of
`ops.maximum`, which on torch passes float64 through float32.)
"""

import functools
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.rows import dtype_of, epsilon
from keras_auxref.typing import Tensor

LARGEST_CONDITION = 1.99999
"""The largest κ for which the inverse is computed: at κ = 2 it ceases to exist."""

_STEPS = {
    1.3: 2,
    1.65: 3,
    1.88: 4,
    1.96: 5,
    1.99: 6,
    1.997: 7,
    1.999: 8,
    1.9997: 9,
    1.9999: 10,
    1.99998: 11,
    LARGEST_CONDITION: 12,
}
"""Newton steps in float32 for κ up to a bound; float64 takes one more. The remaining error is below ε/4, see the tests."""


class Gains(NamedTuple):
    """cλ − 1 for every entry of a, and what the log-determinant needs: λ²a² and its sum, for max|a| = 1; and whether a = 0."""

    gain: Tensor
    squares: Tensor
    total: Tensor
    zero: Tensor


def diagonal_reflect(a: Tensor, eigenvalues: Tensor) -> Tensor:
    """g(a) = (cλ − 1) ∘ a, c = 2 Σ λᵢaᵢ² / Σ λᵢ²aᵢ²."""
    return _gains(a, eigenvalues).gain * a


def diagonal_reflect_and_log_det(a: Tensor, eigenvalues: Tensor) -> tuple[Tensor, Tensor]:
    """g(a) and log|det ∂g/∂a| = Σ log(cλᵢ − 1) + log(2r − 1), r = Σ λᵢ²aᵢ²/(cλᵢ − 1) / Σ λᵢ²aᵢ² ≥ 1."""
    gain, squares, total, zero = _gains(a, eigenvalues)
    r = ops.sum(squares / gain, axis=-1, keepdims=True) / total
    return gain * a, ops.sum(ops.log(gain), axis=-1) + ops.log(2 * r + (2 * zero - 1))[..., 0]


def coefficient(a: Tensor, eigenvalues: Tensor) -> Tensor:
    """c = 2 Σ λᵢaᵢ² / Σ λᵢ²aᵢ², of shape `(...,)`."""
    return (_gains(a, eigenvalues).gain[..., 0] + 1) / eigenvalues[..., 0]


def _gains(a: Tensor, eigenvalues: Tensor) -> Gains:
    # c depends neither on the scale of λ nor on that of a: both scales are constants to the gradient, and keep squares in range.
    lam = eigenvalues / ops.stop_gradient(ops.max(eigenvalues, axis=-1, keepdims=True))
    scaled, zero = _normalised(a)
    weighted = lam * scaled
    squares = ops.square(weighted)
    total = ops.sum(squares, axis=-1, keepdims=True) + zero
    c = 2 * ops.sum(weighted * scaled, axis=-1, keepdims=True) / total
    return Gains(c * lam + (2 * zero - 1), squares, total, zero)  # with a gain of 1 at a = 0


def newton_steps(condition: float, dtype: str) -> int:
    """The number of Newton steps that bring the inverse to the last digit for every λ with κ ≤ `condition` and every vector."""
    if not 1 <= condition <= LARGEST_CONDITION:
        raise ValueError(f"`condition` must be a bound on κ. Expected 1 ≤ condition ≤ {LARGEST_CONDITION}. Received: {condition}")
    return next(steps for bound, steps in _STEPS.items() if condition <= bound) + (dtype == "float64")


def diagonal_inverse(b: Tensor, eigenvalues: Tensor, condition: float = LARGEST_CONDITION) -> Tensor:
    """g⁻¹(b) on the last axis of b."""
    steps, bind = newton_steps(condition, dtype_of(b)), functools.partial
    forward = bind(_forward, condition=condition, steps=steps)
    backward = bind(_backward, condition=condition, steps=steps)
    reference = bind(_reference, condition=condition, steps=steps)
    plain = bind(_differentiable, condition=condition, steps=steps)
    return backend.closed_or_plain(forward, backward, reference, (b, eigenvalues), plain)


def _forward(b: Tensor, eigenvalues: Tensor, _: object, **static: Any) -> tuple[Tensor, tuple[()]]:
    return backend.shared(_inverse, b, eigenvalues, differentiable=False, **static), ()


def _backward(g: Tensor, saved: Any, b: Tensor, eigenvalues: Tensor, _: object, **static: Any) -> Any:
    return backend.shared(_vjp, g, b, eigenvalues, **static)


def _reference(g: Tensor, b: Tensor, eigenvalues: Tensor, _: object, **static: Any) -> Any:
    return _vjp(g, b, eigenvalues, **static)


def _vjp(g: Tensor, b: Tensor, eigenvalues: Tensor, **static: Any) -> Any:
    return backend.vjp(functools.partial(_differentiable, **static))(g, b, eigenvalues)


def _differentiable(b: Tensor, eigenvalues: Tensor, **static: Any) -> Tensor:
    return _inverse(b, eigenvalues, differentiable=True, **static)


def _inverse(b: Tensor, eigenvalues: Tensor, *, condition: float, steps: int, differentiable: bool) -> Tensor:
    low, high = (extreme(eigenvalues, axis=-1, keepdims=True) for extreme in (ops.min, ops.max))
    lam = eigenvalues / ops.stop_gradient(high)
    scaled, zero = _normalised(b)
    squares = ops.square(scaled)
    sign = 2 * zero - 1  # makes cλ − 1 equal to 1 at b = 0, where c = 0

    def newton(c: Tensor, lam: Tensor, squares: Tensor, total: Tensor) -> Tensor:
        # With N = Σ b²p², M = Σ λb²p³ and p = 1/(cλ − 1): c − h/h′ = c + (√(N/‖b‖²) − 1) N/M.
        p = 1 / (c * lam + sign)
        terms = squares * ops.square(p)
        n = ops.sum(terms, axis=-1, keepdims=True) + zero
        m = ops.sum(terms * (lam * p), axis=-1, keepdims=True) + zero
        return c + (ops.sqrt(n / total) - 1) * n / m

    total = ops.sum(squares, axis=-1, keepdims=True) + zero
    constants = [ops.stop_gradient(t) for t in (lam, squares, total)]
    weighted = constants[0] * constants[1]
    c = 2 * ops.sum(weighted, axis=-1, keepdims=True) / (ops.sum(constants[0] * weighted, axis=-1, keepdims=True) + zero)
    for step in range(steps):
        c = newton(c, *constants)
        if step == 0:  # the only step that may overshoot the root and leave the domain: 2/λmax is left of every root
            c = ops.where(c < 2 - 2 * zero, 2 - 2 * zero, c)
    if differentiable:
        c = ops.stop_gradient(c)
        for _ in range(2):
            c = newton(c, lam, squares, total)
    allowed = condition * (1 + 16 * epsilon(dtype_of(b)))
    known = ops.logical_and(low > 0, high <= allowed * low)
    return b / (c * lam + sign) * ops.where(known, ops.ones_like(low), float("nan"))


def _normalised(a: Tensor) -> tuple[Tensor, Tensor]:
    """a / max|a| on the last axis, so that squares neither over- nor underflow, and 1 where a is zero, else 0."""
    fixed = ops.stop_gradient(a)
    # With an initial value an empty batch is legal, and no assertion enters the graph.
    high, low = ops.max(fixed, axis=-1, keepdims=True, initial=0), -ops.min(fixed, axis=-1, keepdims=True, initial=0)
    size = ops.where(high > low, high, low)
    zero = ops.cast(size < np.finfo(dtype_of(a)).tiny, a.dtype)
    return a * ((1 - zero) / (size + zero)), zero
