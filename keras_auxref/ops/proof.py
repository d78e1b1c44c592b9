"""When f(x) = H(Wx) x is a bijection: W⁻¹ = S + K, S symmetric and definite with κ(S) < 2, K skew."""

from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.rows import dtype_of, epsilon
from keras_auxref.typing import Tensor

SINGULAR = 1e15  # |c| for which I − cW is numerically −cW, for a W with max|W| = 1
_SINGULAR_NARROW = 1e6  # the same where there is no float64
_MILD = 16  # ‖W‖‖W⁻¹‖/d up to which the rounding of W x is harmless


class Bracket(NamedTuple):
    """Every preimage has its c in [low, high] = [2λmin(S), 2λmax(S)], S the symmetric part of W⁻¹, for a W with max|W| ≈ 1.

    `certified` is True when S or −S is positive definite with condition below 2, rounding included: then the root is unique.
    `mild` is True when W is also well conditioned: then the inverse may be computed in the precision of the input.
    """

    low: Tensor
    high: Tensor
    certified: Tensor
    mild: Tensor


class Spectrum(NamedTuple):
    """The extreme eigenvalues of S, a bound on their error, and what they prove."""

    low: Any
    high: Any
    error: Any
    regular: Any  # W⁻¹ exists and was computed with some accuracy
    definite: Any  # S or −S is positive definite
    certified: Any  # and κ(S) < 2


def spectrum(w: Any, inverse: Any, eigenvalues: Any, xp: Any, unit: float) -> Spectrum:
    """The proof, in the arithmetic of the module `xp` (`numpy` or `keras.ops`), for a W with max|W| ≈ 1.

    Args:
        w: W.
        inverse: The computed W⁻¹ = M; any value if W has no inverse.
        eigenvalues: The computed eigenvalues of (M + Mᵀ)/2.
        xp: The module with `sum`, `sqrt`, `min`, ….
        unit: The accuracy of one matrix operation: ε, or the accuracy of the eigensolver in use.

    The exact inverse differs from M by at most ‖M‖ ρ/(1 − ρ), ρ = ‖I − MW‖ including its rounding error, and eigenvalues move by
    no more than the matrix does. All norms are Frobenius norms.
    """
    d = w.shape[0]

    def norm(a: Any) -> Any:
        return xp.sqrt(xp.sum(xp.square(a)))

    rounding = 8 * d * unit
    size = norm(inverse)
    residual = norm(xp.eye(d, dtype=w.dtype) - inverse @ w) + rounding * size * norm(w)
    regular = residual < 0.5  # false for NaN
    error = size * residual / xp.where(regular, 1 - residual, 1) + rounding * size
    low, high = xp.min(eigenvalues), xp.max(eigenvalues)
    # f does not depend on the sign of W: use −S where S is negative.
    near, far = xp.where(high < 0, -high, low), xp.where(high < 0, -low, high)
    definite = xp.logical_and(regular, near - error > 0)
    certified = xp.logical_and(definite, far + error < 2 * (near - error))
    return Spectrum(low, high, error, regular, definite, certified)


def spectrum_in_numpy(w: np.ndarray) -> Spectrum | None:
    """`spectrum` of a float64 matrix with max|W| = 1; None where W has no inverse."""
    try:
        inverse = np.linalg.inv(w)
    except np.linalg.LinAlgError:
        return None
    if not np.isfinite(inverse).all():
        return None
    return spectrum(w, inverse, np.linalg.eigvalsh((inverse + inverse.T) / 2), np, float(np.finfo(np.float64).eps))


def bracket_of(w: Tensor, inverse: Tensor, eigenvalues: Tensor | None = None) -> Bracket:
    """The bracket of a W with max|W| ≈ 1 from its computed inverse, as tensors; also works in graphs."""
    limit = SINGULAR if dtype_of(w) == "float64" else _SINGULAR_NARROW
    unit = epsilon(dtype_of(w))
    # An eigensolver may raise or never return if the input is not finite.
    inverse = ops.where(ops.all(ops.abs(inverse) < limit), inverse, limit * ops.eye(w.shape[0], dtype=w.dtype))
    if eigenvalues is None:
        eigenvalues = ops.eigh((inverse + ops.transpose(inverse)) / 2)[0]
    # XLA in TensorFlow gives eigenvalues to six digits whatever the dtype.
    proof = spectrum(w, inverse, eigenvalues, ops, max(unit, 1e-7) if backend.inside_xla() else unit)
    # Rounding must not push a root out of the bracket.
    low, high = 2 * (proof.low - proof.error), 2 * (proof.high + proof.error)
    condition = ops.sqrt(ops.sum(ops.square(w)) * ops.sum(ops.square(inverse))) / w.shape[0]
    low, high = ops.where(proof.regular, low, -2 * limit), ops.where(proof.regular, high, 2 * limit)
    return Bracket(low, high, proof.certified, ops.logical_and(proof.certified, condition <= _MILD))


def inverse_by_qr(a: Tensor) -> Tensor:
    """A⁻¹ of one matrix or a batch of them. Unlike `inv` it never raises: a zero pivot shows as infinity or NaN."""
    q, r = ops.qr(a)
    return ops.solve_triangular(r, ops.swapaxes(q, -1, -2))
