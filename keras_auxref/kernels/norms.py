"""Spectral norms that are never underestimated, and differentiable."""

import keras
from keras import ops

from keras_auxref.ops.rows import epsilon, largest
from keras_auxref.typing import Tensor

EXACT_UP_TO = 128
"""The largest d for which the eigendecomposition is used: beyond that, six squarings cost less."""

_SQUARINGS = 6
_POWER = 2**_SQUARINGS + 1


def slack(d: int) -> float:
    """The largest factor by which `top_eigenvalue` may exceed λmax, apart from rounding."""
    return 1.0 if d <= EXACT_UP_TO else d ** (1 / _POWER)


def top_eigenvalue(gram: Tensor) -> Tensor:
    """An upper bound on λmax of a symmetric positive semidefinite matrix, tight to rounding for d ≤ 128.

    Power iteration approaches λmax from below, so dividing by it would break the guarantee. Up to d = 128 this is
    the exact value, v₁ᵀGv₁ with v₁ held constant, whose gradient v₁v₁ᵀ is right without differentiating an eigendecomposition.
    Beyond that, it is the power iteration of the whole matrix by repeated squaring,

        λmax(G) ≤ t = (tr Gᵖ)^(1/p) ≤ d^(1/p) λmax(G),      p = 2⁶ + 1,      ∂t/∂G = (G/t)^(p − 1),

    which is smooth and always above λmax, by at most 11 % at d = 784. It takes six matrix products, which also give the gradient.
    """
    size = ops.stop_gradient(largest(gram, axis=None))
    size = ops.where(size > 0, size, 1)
    gram = gram / size
    value, gradient = _top(ops.stop_gradient(gram))
    return size * _linear(value, gradient, gram)


def spectral_norm(a: Tensor) -> Tensor:
    """An upper bound on ‖A‖₂, tight to rounding for d ≤ 128: the root of λmax(AᵀA). ∂‖A‖₂/∂A = A (∂λmax/∂AᵀA)/‖A‖₂."""
    size = ops.stop_gradient(largest(a, axis=None))
    size = ops.where(size > 0, size, 1)
    a = a / size
    fixed = ops.stop_gradient(a)
    top, gradient = _top(ops.transpose(fixed) @ fixed)
    value = ops.sqrt(ops.maximum(top, epsilon("float32") ** 2))
    return size * _linear(value, (fixed @ gradient) / value, a)


def shrink_to(a: Tensor, bound: float) -> Tensor:
    """A · min(1, bound/‖A‖₂): while ‖A‖₂ ≤ bound, this is the identity, and so is its gradient.

    For large d, ‖A‖₂ ≤ ‖A‖_F and ‖A‖₂² ≤ ‖A‖₁‖A‖_∞ are tried first: if they prove ‖A‖₂ ≤ bound, ‖A‖₂ is not computed.
    """
    if not bound > 0:
        return 0 * a
    if a.shape[0] <= EXACT_UP_TO:
        return a / ops.maximum(1.0, spectral_norm(a) / bound)
    return ops.cond(_cheap_bound(a) <= bound, lambda: a * 1, lambda: a / ops.maximum(1.0, spectral_norm(a) / bound))


def _cheap_bound(a: Tensor) -> Tensor:
    """min(‖A‖_F, √(‖A‖₁‖A‖_∞)) ≥ ‖A‖₂, with room for rounding. NaN for NaN, so that every comparison is false."""
    sizes = ops.abs(ops.stop_gradient(a))
    size = ops.max(sizes)
    sizes = sizes / ops.where(size > 0, size, 1)
    frobenius = ops.sqrt(ops.sum(ops.square(sizes)))
    mixed = ops.sqrt(ops.max(ops.sum(sizes, axis=0)) * ops.max(ops.sum(sizes, axis=1)))
    return 1.001 * size * ops.minimum(frobenius, mixed)


def _linear(value: Tensor, gradient: Tensor, at: Tensor) -> Tensor:
    """A value and its gradient as a function of `at`: the gradient is a constant and is not differentiated itself."""
    value, gradient = ops.stop_gradient(value), ops.stop_gradient(gradient)
    return value + ops.sum(gradient * (at - ops.stop_gradient(at)))


def _top(gram: Tensor) -> tuple[Tensor, Tensor]:
    """The bound of `top_eigenvalue` and its gradient, both with room for rounding, for a matrix with entries of size 1."""
    d = gram.shape[0]
    # If an eigenvector is accurate to six digits, as from XLA, its Rayleigh quotient is accurate to twelve.
    rounding = 1 + max(4 * d**0.5 * epsilon(keras.backend.standardize_dtype(gram.dtype)), 1e-11)
    if d > EXACT_UP_TO:
        value, gradient = _trace_of_power(gram)
        return rounding * value, rounding * gradient
    # `eigh` raises on NaN in the middle of training: give it zeros; the product below brings the NaN back.
    _, vectors = ops.eigh(ops.where(ops.isfinite(gram), gram, 0))
    top = vectors[:, -1]
    return rounding * ops.sum((gram @ top[:, None])[:, 0] * top), rounding * ops.outer(top, top)


def _trace_of_power(gram: Tensor) -> tuple[Tensor, Tensor]:
    """t = (tr Gᵖ)^(1/p), p = 2⁶ + 1, and (G/t)^(p − 1), each squaring normalised so that nothing over- or underflows."""
    tiny = epsilon(keras.backend.standardize_dtype(gram.dtype)) ** 2
    power, logarithm = gram, 0.0  # G^(2ᵏ) = power · exp(2ᵏ logarithm)
    for step in range(_SQUARINGS):
        norm = ops.sqrt(ops.maximum(ops.sum(ops.square(power)), tiny**2))
        logarithm = logarithm + ops.log(norm) / 2**step
        power = power / norm
        power = power @ power
    # tr Gᵖ = ⟨G^(p − 1), G⟩: no further product.
    trace = ops.maximum(ops.sum(power * gram), tiny**2)
    log_value = (ops.log(trace) + (_POWER - 1) * logarithm) / _POWER
    return ops.exp(log_value), power * ops.exp((_POWER - 1) * (logarithm - log_value))
