"""Proof, or not, that a map is invertible, and by how much it bends distances."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from keras import ops

from keras_auxref.ops.proof import spectrum_in_numpy
from keras_auxref.typing import Tensor

NOWHERE = (math.nan, math.nan)
"""The bracket of a map that has no c(x)."""
_UNIT = float(np.finfo(np.float64).eps)


class Bounds(NamedTuple):
    """Upper bounds on how far a map f moves points apart and together, for all x and x′; None where nothing is proven.

    ‖f(x) − f(x′)‖ ≤ lipschitz ‖x − x′‖        ‖x − x′‖ ≤ inverse_lipschitz ‖f(x) − f(x′)‖
    """

    lipschitz: float | None = None
    inverse_lipschitz: float | None = None

    def then(self, after: "Bounds") -> "Bounds":
        """The bounds of x ↦ after(this(x)): the products, rounded upwards."""
        return Bounds(_product(self[0], after[0]), _product(self[1], after[1]))


ISOMETRY = Bounds(1.0, 1.0)


@dataclass(frozen=True)
class Certificate:
    """What is proven about the invertibility of a map, for the weights that it has.

    For f(x) = H(Wx) x split W⁻¹ = S + K, S symmetric and K skew. If S or −S is positive definite and its condition κ(S) is below
    2, then f is a bijection of ℝᵈ for every K, and a diffeomorphism off 0. The bound is sharp, and so are the two that follow:

        (2/κ − 1) ‖x − x′‖  ≤  ‖f(x) − f(x′)‖  ≤  (2κ − 1) ‖x − x′‖

    All of this is about the map in exact arithmetic, with the weights as the layer uses them, rounded to its dtype. The layer
    computes that map to rounding: outputs are off by a few ε ‖x‖, so that in half precision the distance of two neighbours is
    known only to about 1 % of their norm.

    Attributes:
        invertible: True when that is proven for this very map, rounding of its weights included. False means only that no proof
            was found.
        condition: κ(S), or infinity where S is indefinite or W singular. For a linear map the condition of its matrix, for any
            other NaN.
        bracket: (2λmin(S), 2λmax(S)): the scalar c(x) = 2(Wx)ᵀx/‖Wx‖² lies in it for every x. NaN for maps without c.
        reason: One sentence.
        lipschitz: An upper bound on ‖f(x) − f(x′)‖/‖x − x′‖, or None where there is none or none is proven. It may be known of a
            map that is not invertible.
        inverse_lipschitz: An upper bound on ‖x − x′‖/‖f(x) − f(x′)‖, the Lipschitz constant of f⁻¹, or None.

    Example:
    >>> import numpy as np
    >>> from keras_auxref import AuxReflection
    >>> layer = AuxReflection("spectral")
    >>> layer.build((None, 4))
    >>> layer.certificate().invertible
    True
    """

    invertible: bool
    condition: float
    bracket: tuple[float, float]
    reason: str
    lipschitz: float | None = None
    inverse_lipschitz: float | None = None


def proven(reason: str, condition: float = math.nan, bounds: Bounds | None = None) -> Certificate:
    """The certificate of a map that is a bijection for a reason of its own."""
    return Certificate(True, condition, NOWHERE, f"Proven: {reason}.", *(bounds or Bounds()))


def not_proven(reason: str, bounds: Bounds | None = None) -> Certificate:
    """The certificate of a map that is not proven to be invertible."""
    return Certificate(False, math.inf, NOWHERE, f"Not proven: {reason}.", *(bounds or Bounds()))


def bounds_of(certificate: Certificate) -> Bounds:
    """The two constants of a certificate."""
    return Bounds(certificate.lipschitz, certificate.inverse_lipschitz)


def upwards(value: float) -> float | None:
    """A bound with room for the rounding of a few operations, never 0 by underflow; None where it is no number."""
    bound = math.nextafter(value * (1 + 8 * _UNIT), math.inf)
    return bound if 0 < bound < math.inf else None


def reflection_bounds(near: float, far: float) -> Bounds:
    """The constants of f(x) = H(Wx) x for eigenvalues of ±S in [near, far], near > 0: 2κ − 1 and, for κ < 2, κ/(2 − κ).

    The first holds for every κ. See docs/mathematics.md.
    """
    gap = 2 * near - far - 8 * _UNIT * near
    return Bounds(upwards(2 * (far / near) - 1), upwards(far / gap) if gap > 0 else None)


def condition_for(lipschitz: float) -> float:
    """The largest κ with 2κ − 1 ≤ L, which is (L + 1)/2, for a Lipschitz constant that a user asks for."""
    if isinstance(lipschitz, bool) or not isinstance(lipschitz, int | float) or not 1 < lipschitz < 3:
        raise ValueError(
            "`lipschitz` must lie strictly between 1, where only orthogonal maps are, and 3, where κ(S) = 2. Expected "
            f"1 < lipschitz < 3. Received: {lipschitz!r}"
        )
    return (lipschitz + 1) / 2


def linear_bounds(matrix: Tensor) -> Bounds:
    """The constants of x ↦ W x, W of any shape: σmax and, where no direction is lost, 1/σmin, with the error of the SVD."""
    w = _float64(matrix)
    return _by_singular_values(np.linalg.svd(w, compute_uv=False), w.shape) if np.isfinite(w).all() else Bounds()


def _by_singular_values(singular: np.ndarray, shape: tuple[int, ...]) -> Bounds:
    error = 8 * max(shape) * _UNIT * float(singular[0])
    low = float(singular[-1]) - error
    return Bounds(upwards(float(singular[0]) + error), upwards(1 / low) if low > 0 and shape[0] >= shape[1] else None)


def diagonal_bounds(scales: np.ndarray) -> Bounds:
    """The constants of x ↦ s ⊙ x: max|s| and 1/min|s|."""
    sizes = np.abs(np.asarray(scales, np.float64))
    if not np.isfinite(sizes).all():
        return Bounds()
    return Bounds(upwards(float(sizes.max())), upwards(1 / float(sizes.min())) if sizes.min() > 0 else None)


def orthogonal_bounds(matrix: Tensor) -> Bounds:
    """The constants of a matrix with orthonormal rows or columns, by its defect δ = ‖UᵀU − I‖₂: √(1 + δ) and 1/√(1 − δ).

    The second is also above ‖Uᵀ‖₂. There is none for fewer rows than columns, which lose directions.
    """
    u = _float64(matrix)
    tall = u.shape[0] >= u.shape[1]
    gram = u.T @ u if tall else u @ u.T
    if not np.isfinite(gram).all():
        return Bounds()
    defect = float(np.abs(np.linalg.eigvalsh(gram - np.eye(len(gram)))).max()) + 8 * max(u.shape) * _UNIT
    return Bounds(upwards(math.sqrt(1 + defect)), upwards(1 / math.sqrt(1 - defect)) if tall and defect < 1 else None)


def _product(a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return None
    return a * b if 1 in (a, b) else upwards(a * b)


def _float64(x: Tensor) -> np.ndarray:
    return np.asarray(ops.convert_to_numpy(x)).astype(np.float64)


def certify_linear(matrix: Tensor) -> Certificate:
    """Proves or declines to prove that x ↦ W x is invertible: by its singular values in float64, with a margin for rounding."""
    w = _float64(matrix)
    if not np.isfinite(w).all():
        return not_proven("the matrix has entries that are not finite")
    singular = np.linalg.svd(w, compute_uv=False)
    bounds = _by_singular_values(singular, w.shape)
    if bounds.inverse_lipschitz is None:
        return not_proven("the matrix is singular to working precision", bounds)
    condition = float(singular[0] / singular[-1])
    return proven(f"linear, with a matrix of condition {condition:.6g}", condition, bounds)


def certify(w: Tensor) -> Certificate:
    """Proves or declines to prove that f(x) = H(Wx) x is invertible.

    The eigenvalues of S are computed in float64 and widened by a bound on their error, from the residual ‖I − MW‖ of the
    computed inverse M, so that rounding cannot turn a "no" into a "yes".

    Args:
        w: Square matrix.

    Returns:
        A `Certificate`.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.kernels import certify
    >>> certify(np.diag([1.0, 1.5])).invertible, certify(np.diag([1.0, 3.0])).invertible
    (True, False)
    """
    w = _float64(w)
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
    near, far = sorted((abs(float(proof.low)), abs(float(proof.high))))
    bounds = reflection_bounds(near - float(proof.error), far + float(proof.error))
    if not proof.certified:
        reason = f"Not proven: κ(S) = {condition:.6g} is not below 2, S the symmetric part of W⁻¹."
        return Certificate(False, condition, bracket, reason, bounds.lipschitz)
    return Certificate(True, condition, bracket, f"Proven: κ(S) = {condition:.6g} < 2, S the symmetric part of W⁻¹.", *bounds)
