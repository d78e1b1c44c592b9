"""Proof, or not, that an auxiliary reflection is invertible."""

import math
from dataclasses import dataclass

import numpy as np
from keras import ops

from keras_auxref.ops.proof import spectrum_in_numpy
from keras_auxref.typing import Tensor

NOWHERE = (math.nan, math.nan)
"""The bracket of a map that has no c(x)."""


@dataclass(frozen=True)
class Certificate:
    """What is proven about the invertibility of a map, for the weights that it has.

    For f(x) = H(Wx) x split W⁻¹ = S + K, S symmetric and K skew. If S or −S is positive definite and its condition κ(S) is below
    2, then f is a bijection of ℝᵈ, whatever K, and a diffeomorphism off 0. The bound is sharp.

    Attributes:
        invertible: True when that is proven for this very map, rounding of its weights included; False says only that it is not.
        condition: κ(S), or infinity where S is indefinite or W singular. For a linear map the condition of its matrix, for any
            other NaN.
        bracket: (2λmin(S), 2λmax(S)): the scalar c(x) = 2(Wx)ᵀx/‖Wx‖² lies in it for every x. NaN for maps without c.
        reason: One sentence.
    """

    invertible: bool
    condition: float
    bracket: tuple[float, float]
    reason: str


def proven(reason: str, condition: float = math.nan) -> Certificate:
    """The certificate of a map that is a bijection for a reason of its own."""
    return Certificate(True, condition, NOWHERE, f"Proven: {reason}.")


def not_proven(reason: str) -> Certificate:
    """The certificate of a map of which nothing is proven."""
    return Certificate(False, math.inf, NOWHERE, f"Not proven: {reason}.")


def certify_linear(matrix: Tensor) -> Certificate:
    """Proves or declines to prove that x ↦ W x is invertible: by its singular values in float64, with a margin for rounding."""
    w = np.asarray(ops.convert_to_numpy(matrix)).astype(np.float64)
    if not np.isfinite(w).all():
        return not_proven("the matrix has entries that are not finite")
    singular = np.linalg.svd(w, compute_uv=False)
    if not singular[-1] > 8 * len(w) * np.finfo(np.float64).eps * singular[0]:
        return not_proven("the matrix is singular to working precision")
    condition = float(singular[0] / singular[-1])
    return proven(f"linear, with a matrix of condition {condition:.6g}", condition)


def certify(w: Tensor) -> Certificate:
    """Proves or declines to prove that f(x) = H(Wx) x is invertible.

    The eigenvalues of S are computed in float64 and widened by a bound on their error, from the residual ‖I − MW‖ of the
    computed inverse M, so that rounding cannot turn a "no" into a "yes".

    Args:
        w: Square matrix.

    Returns:
        A `Certificate`.
    """
    w = np.asarray(ops.convert_to_numpy(w)).astype(np.float64)
    if w.ndim != 2 or w.shape[0] != w.shape[1]:
        raise ValueError(f"`w` must be a square matrix. Expected shape (d, d). Received: {w.shape}")
    nothing = (-np.inf, np.inf)
    if not np.isfinite(w).all():
        return Certificate(False, np.inf, nothing, "Not proven: W has entries that are not finite.")
    size = float(np.abs(w).max())
    proof = spectrum_in_numpy(w / size) if size > 0 else None
    if proof is None:
        return Certificate(False, np.inf, nothing, "Not proven: W is singular.")
    if not proof.regular:
        return Certificate(False, np.inf, nothing, "Not proven: W is singular to working precision.")
    bracket = (2 * float(proof.low) / size, 2 * float(proof.high) / size)
    if not proof.definite:
        return Certificate(False, np.inf, bracket, "Not proven: the symmetric part S of W⁻¹ is not definite.")
    condition = float(max(proof.high / proof.low, proof.low / proof.high))
    if not proof.certified:
        return Certificate(
            False, condition, bracket, f"Not proven: κ(S) = {condition:.6g} is not below 2, S the symmetric part of W⁻¹."
        )
    return Certificate(True, condition, bracket, f"Proven: κ(S) = {condition:.6g} < 2, S the symmetric part of W⁻¹.")
