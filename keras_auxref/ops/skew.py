"""What the maps from skew to orthogonal matrices share."""

import numpy as np
from keras import ops

from keras_auxref.ops.checks import as_tensor, check_orthogonal
from keras_auxref.ops.rows import dtype_of, nonzero, working_dtype
from keras_auxref.typing import Tensor


def square_matrix(a: Tensor) -> tuple[Tensor, str]:
    """A square matrix, in float32 at least, and the dtype it came in."""
    a = as_tensor(a, "a")
    if len(a.shape) != 2 or a.shape[0] != a.shape[1]:
        raise ValueError(f"`a` must be a square matrix. Expected shape (d, d). Received: {tuple(a.shape)}")
    dtype = dtype_of(a)
    return ops.cast(a, working_dtype(dtype)), dtype


def skew_part(a: Tensor) -> Tensor:
    """(A − Aᵀ)/2, halved first: the difference of two entries near the largest float would overflow."""
    half = 0.5 * a
    return half - ops.transpose(half)


def one_norm(k: Tensor) -> Tensor:
    """‖K‖₁ ≥ ‖K‖₂ as a constant, and 1 for K = 0."""
    return nonzero(ops.max(ops.sum(ops.abs(ops.stop_gradient(k)), axis=0)))


def polish(u: Tensor, needed: Tensor | None = None, steps: int = 1) -> Tensor:
    """Newton–Schulz steps towards the nearest orthogonal matrix: a rounding correction, so a constant to the gradient."""

    def polished() -> Tensor:
        v = ops.stop_gradient(u)
        for _ in range(steps):
            v = 1.5 * v - 0.5 * ops.matmul(v, ops.matmul(ops.transpose(v), v))
        return u + ops.stop_gradient(v - u)

    return polished() if needed is None else ops.cond(needed, polished, lambda: u)


def as_orthogonal(u: Tensor) -> np.ndarray:
    """U in float64, checked, and with the rounding of a lower precision removed by two Newton–Schulz steps."""
    array = np.asarray(ops.convert_to_numpy(u))
    check_orthogonal(array)
    array = array.astype(np.float64)
    for _ in range(2):
        array = 1.5 * array - 0.5 * array @ (array.T @ array)
    return array


def determinant(u: np.ndarray) -> int:
    """The determinant of an orthogonal matrix, ±1."""
    return round(float(np.linalg.slogdet(u)[0]))
