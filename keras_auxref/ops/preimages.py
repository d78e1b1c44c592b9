"""Every preimage of a vector, for a W without a guarantee."""

from typing import Any

import numpy as np

from keras_auxref.ops.checks import as_tensor, check_vectors_and_matrix
from keras_auxref.ops.proof import spectrum_in_numpy


def preimages(y: Any, w: Any, tolerance: float = 1e-8) -> np.ndarray:
    """Every x with f(x) = H(Wx) x = y, for one vector y.

    x = (I − cW)⁻¹y where c is a real, nonzero root of ‖(I − cW)⁻¹y‖ = ‖y‖, and these are the generalised eigenvalues of a
    linear pencil of size 2d,

        det(N₀ − c N₁) = 0,      N₀ = [[−yyᵀ/‖y‖², I], [I, −I]],      N₁ = [[0, W], [Wᵀ, 0]].

    One root means one preimage. Where I − cW is singular at a root, x is a least-norm solution plus a null vector of the length
    that norms require. Computed in float64 with NumPy in O(d³): for counting and diagnosis, not for training.

    Args:
        y: Vector of shape `(d,)`.
        w: Tensor of shape `(d, d)`.
        tolerance: Largest ‖f(x) − y‖/‖y‖ of a preimage, and half the least distance between two different ones.

    Returns:
        A float64 array of shape `(count, d)`, sorted by c; y = 0 has the one preimage 0.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import preimages
    >>> len(preimages(np.array([0.0, 1.0]), np.diag([1.0, 1.5]))), len(preimages(np.array([0.0, 1.0]), np.diag([1.0, 3.0])))
    (1, 3)
    """
    y, w = as_tensor(y, "y"), as_tensor(w, "w")
    check_vectors_and_matrix(y, w, "y")
    if len(y.shape) != 1:
        raise ValueError(f"`y` must be one vector. Expected shape ({w.shape[0]},). Received: {tuple(y.shape)}")
    y, w = (np.asarray(t).astype(np.float64) for t in (y, w))
    length, size = np.linalg.norm(y), np.abs(w).max()
    if length == 0 or size == 0:
        return y[None]
    unit, w = y / length, w / size
    proof = spectrum_in_numpy(w)
    if proof is not None and proof.certified:  # there is exactly one, inside the bracket
        return length * _search(unit, w, 2 * proof.low, 2 * proof.high)[None]
    found: list[np.ndarray] = []
    if np.abs(w @ unit).max() <= tolerance**2:
        found.append(unit)  # W y = 0, where f is the identity
    for c in _roots(unit, w):
        for candidate in _candidates(unit, w, c):
            x = _polish(candidate, unit, w)
            close = x is not None and np.linalg.norm(_f(x, w) - unit) <= tolerance
            if x is not None and close and all(np.linalg.norm(x - other) > 2 * tolerance for other in found):
                found.append(x)
    if not found and proof is not None and proof.regular:  # f is onto for every invertible W
        x = _search(unit, w, *_side(unit, w, 2 * proof.low, 2 * proof.high))
        found = [x] if np.linalg.norm(_f(x, w) - unit) <= tolerance else []
    return length * np.array(found).reshape(-1, len(y))


def _side(y: np.ndarray, w: np.ndarray, low: float, high: float) -> tuple[float, float]:
    """The bracket without c = 0, which solves the secular equation but is not a preimage: ψ(0) = 2yᵀWy gives the side."""
    if not low < 0 < high:
        return low, high
    return (0.0, high) if y @ w @ y > 0 else (low, 0.0)


def _search(y: np.ndarray, w: np.ndarray, low: float, high: float) -> np.ndarray:
    """x = (I − cW)⁻¹y for the c where ψ = 2uᵀx − c‖u‖², u = Wx, changes sign, by bisection, and polished."""
    x = y
    for _ in range(200):
        c = (low + high) / 2
        if not low < c < high:
            break
        try:
            u = np.linalg.solve(np.eye(len(y)) - c * w, w @ y)
        except np.linalg.LinAlgError:  # a pole: look next to it
            low = np.nextafter(c, low)
            continue
        x = y + c * u
        if 2 * u @ y + c * (u @ u) > 0:
            low = c
        else:
            high = c
    polished = _polish(x, y, w)
    return x if polished is None else polished


def _f(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    u = w @ x
    squared = u @ u
    return x - 2 * u * (u @ x) / squared if squared > 0 else x


def _roots(y: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The real eigenvalues c ≠ 0 of the pencil, by shift and invert: (N₀ − σN₁)⁻¹N₁ has the eigenvalues 1/(c − σ)."""
    d = len(y)
    identity, zero = np.eye(d), np.zeros((d, d))
    n0 = np.block([[-np.outer(y, y), identity], [identity, -identity]])
    n1 = np.block([[zero, w], [w.T, zero]])
    shifts = np.array([0.5772, -1.4142, 2.7183, -0.3679])  # generic; the best-conditioned one is used
    shift = min(shifts, key=lambda s: np.linalg.cond(n0 - s * n1))
    mu = np.linalg.eigvals(np.linalg.solve(n0 - shift * n1, n1))
    mu = mu[np.abs(mu) > 1e-13]
    c = shift + 1 / mu
    # A nearly double root shows as a close complex pair: its real part is tried, and the residual decides.
    c = c[np.abs(c.imag) <= 1e-5 * (1 + np.abs(c))].real
    return np.sort(c[np.abs(c) > 1e-10])


def _candidates(y: np.ndarray, w: np.ndarray, c: float) -> list[np.ndarray]:
    u, s, vt = np.linalg.svd(np.eye(len(y)) - c * w)
    if s[-1] > 1e-9 * s[0]:
        return [vt.T @ ((u.T @ y) / s)]
    keep = s > 1e-9 * s[0]
    least = vt[keep].T @ ((u.T @ y)[keep] / s[keep])
    rest = 1 - least @ least
    if rest < -1e-9 or keep.sum() < len(y) - 1:
        return [least]
    step = np.sqrt(max(rest, 0.0)) * vt[-1]
    return [least + step, least - step]


def _polish(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> np.ndarray | None:
    """Newton steps on f(x) = y: the eigenvalue gave c to about half the digits where roots are close."""
    for _ in range(4):
        u, v = w @ x, w.T @ x
        squared = u @ u
        if not np.isfinite(squared) or squared == 0:
            return None
        a = np.eye(len(x)) - 2 * (u @ x) / squared * w
        jacobian = a - 2 * np.outer(u, u @ a + v) / squared
        error = _f(x, w) - y
        if np.linalg.norm(error) <= 1e-14:
            break
        step = np.linalg.lstsq(jacobian, error, rcond=1e-12)[0]
        if np.linalg.norm(_f(x - step, w) - y) >= np.linalg.norm(error):
            break
        x = x - step
    return x
