"""What the maps from skew to orthogonal matrices share."""

from typing import Any

import numpy as np
from keras import ops

from keras_auxref.ops._checks import HALF, as_tensor, check_orthogonal
from keras_auxref.ops._rows import dtype_of, nonzero


def square_matrix(a: Any) -> tuple[Any, str]:
    """A square matrix, in float32 at least, and the dtype it came in."""
    a = as_tensor(a, "a")
    if len(a.shape) != 2 or a.shape[0] != a.shape[1]:
        raise ValueError(f"`a` must be a square matrix. Expected shape (d, d). Received: {tuple(a.shape)}")
    dtype = dtype_of(a)
    return (ops.cast(a, "float32") if dtype in HALF else a), dtype


def skew_part(a: Any) -> Any:
    """(A − Aᵀ)/2, halved first: the difference of two entries near the largest float would overflow."""
    half = 0.5 * a
    return half - ops.transpose(half)


def one_norm(k: Any) -> Any:
    """‖K‖₁ ≥ ‖K‖₂ as a constant, and 1 for K = 0."""
    return nonzero(ops.max(ops.sum(ops.abs(ops.stop_gradient(k)), axis=0)))


def polish(u: Any, needed: Any = None, steps: int = 1) -> Any:
    """Newton–Schulz steps towards the nearest orthogonal matrix, a rounding correction and so a constant to the gradient."""

    def polished() -> Any:
        v = ops.stop_gradient(u)
        for _ in range(steps):
            v = 1.5 * v - 0.5 * ops.matmul(v, ops.matmul(ops.transpose(v), v))
        return u + ops.stop_gradient(v - u)

    return polished() if needed is None else ops.cond(needed, polished, lambda: u)


def as_orthogonal(u: Any) -> np.ndarray:
    """U in float64, checked, and with the rounding of a lower precision removed by two Newton–Schulz steps."""
    u = np.asarray(ops.convert_to_numpy(u))
    check_orthogonal(u)
    u = u.astype(np.float64)
    for _ in range(2):
        u = 1.5 * u - 0.5 * u @ (u.T @ u)
    return u


def determinant(u: np.ndarray) -> int:
    """±1 of an orthogonal matrix."""
    return round(float(np.linalg.slogdet(u)[0]))
