"""log|det W| and W⁻¹y of one square matrix: what a flow needs from a plain linear map."""

from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.checks import as_tensor
from keras_auxref.ops.rows import dtype_of, epsilon, map_rows
from keras_auxref.typing import Tensor


def log_abs_det(w: Tensor) -> Tensor:
    """log|det W| = Σ log|R_ii| of W = QR, with the gradient W⁻ᵀ.

    Unlike LU and `slogdet`, QR has an XLA kernel. It is computed in float64 if the backend has it. On TensorFlow the result
    is −∞ where a column of W lies in the span of the columns before it up to float64 rounding (there the gradient does not
    exist, and is NaN), and the gradient takes one inverse; other backends use their own `slogdet`.

    Args:
        w: Tensor of shape `(d, d)`.

    Returns:
        A scalar tensor of the dtype of `w`.
    """
    w = as_tensor(w, "w")
    dtype = w.dtype
    w = ops.cast(w, backend.wide_dtype())
    return ops.cast(backend.closed_or_plain(_value, _gradient, _reference, (w,), _plain), dtype)


def solve_rows(w: Tensor, y: Tensor) -> Tensor:
    """x with W x = y for every vector on the last axis of y, in float64 if the backend has it, whatever the dtype.

    Args:
        w: Tensor of shape `(d, d)`.
        y: Tensor of shape `(..., d)`.
    """
    w, y = as_tensor(w, "w"), as_tensor(y, "y")
    w, rows = (ops.cast(t, backend.wide_dtype()) for t in (w, y))
    x = map_rows(lambda rows: ops.transpose(ops.solve(w, ops.transpose(rows))), rows)
    return ops.cast(x, y.dtype)


def inverse_matrix(w: Tensor) -> Tensor:
    """W⁻¹, in float64 if the backend has it, whatever the dtype; NaN for a singular W."""
    w = as_tensor(w, "w")
    return _inverse_where(ops.isfinite(log_abs_det(w)), ops.cast(w, backend.wide_dtype()))


def _inverse_where(regular: Tensor, w: Tensor) -> Tensor:
    """W⁻¹, and NaN where W is not regular. `inv` raises on a singular matrix, also in the branch that is not taken."""
    return ops.where(regular, ops.inv(ops.where(regular, w, ops.eye(w.shape[0], dtype=w.dtype))), float("nan"))


def multiply_rows(matrix: Tensor, y: Tensor) -> Tensor:
    """M y for every vector on the last axis of y, in the precision of M, as a tensor of the dtype of y."""
    x = map_rows(lambda rows: ops.matmul(rows, ops.transpose(matrix)), ops.cast(y, matrix.dtype))
    return ops.cast(x, y.dtype)


def _value(w: Tensor, _: object) -> tuple[Tensor, Tensor]:
    """Σ log|R_ii|, and whether W is regular."""
    diagonal = ops.abs(ops.diagonal(ops.qr(w)[1]))
    # Householder QR is exact up to a few ε times the length of each column: an R_ii below that is only noise.
    noise = 4 * w.shape[0] * epsilon(dtype_of(w)) * ops.norm(w, axis=0)
    diagonal = ops.where(diagonal <= noise, ops.zeros_like(diagonal), diagonal)
    return ops.sum(ops.log(diagonal)), ops.all(diagonal > 0)


def _gradient(g: Tensor, regular: Tensor, w: Tensor, _: object) -> tuple[Tensor]:
    """g W⁻ᵀ."""
    return (g * ops.transpose(_inverse_where(regular, w)),)


def _reference(g: Tensor, w: Tensor, _: object) -> tuple[Tensor]:
    return _gradient(g, _value(ops.stop_gradient(w), ())[1], w, ())


def _plain(w: Tensor) -> Tensor:
    return ops.slogdet(w)[1]
