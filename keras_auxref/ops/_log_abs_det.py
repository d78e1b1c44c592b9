"""log|det W| and W⁻¹y of one square matrix: what a flow needs of a plain linear map."""

from typing import Any

import keras
from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops._checks import as_tensor
from keras_auxref.ops._rows import dtype_of, epsilon, map_rows


def log_abs_det(w: Any) -> Any:
    """log|det W| = Σ log|R_ii| of W = QR, with the gradient W⁻ᵀ.

    QR has an XLA kernel where LU and `slogdet` have none. On TensorFlow it is computed in float64, −∞ where a column of W
    lies in the span of the columns before it to the rounding of float64 (there the gradient does not exist, and is NaN), and
    the gradient is one inverse; other backends use their own `slogdet`.

    Args:
        w: Tensor of shape `(d, d)`.

    Returns:
        A scalar tensor of the dtype of `w`.
    """
    w = as_tensor(w, "w")
    dtype = w.dtype
    w = ops.cast(w, _wide(w))
    if keras.backend.backend() != "tensorflow":
        return ops.cast(ops.slogdet(w)[1], dtype)
    return ops.cast(backend.closed_form(_value, _gradient, _reference, (w,), plain=_plain), dtype)


def solve_rows(w: Any, y: Any) -> Any:
    """x with W x = y for every vector on the last axis of y, in float64 on TensorFlow whatever the dtype.

    Args:
        w: Tensor of shape `(d, d)`.
        y: Tensor of shape `(..., d)`.
    """
    w, y = as_tensor(w, "w"), as_tensor(y, "y")
    wide = _wide(w)
    w, rows = ops.cast(w, wide), ops.cast(y, wide)
    x = map_rows(lambda rows: ops.transpose(ops.solve(w, ops.transpose(rows))), rows)
    return ops.cast(x, y.dtype)


def inverse_matrix(w: Any) -> Any:
    """W⁻¹, in float64 on TensorFlow whatever the dtype; NaN for a singular W."""
    w = as_tensor(w, "w")
    return _inverse_where(ops.isfinite(log_abs_det(w)), ops.cast(w, _wide(w)))


def _inverse_where(regular: Any, w: Any) -> Any:
    """W⁻¹, and NaN where W is not regular. `inv` raises on a singular matrix, also in the branch that is not taken."""
    return ops.where(regular, ops.inv(ops.where(regular, w, ops.eye(w.shape[0], dtype=w.dtype))), float("nan"))


def multiply_rows(matrix: Any, y: Any) -> Any:
    """M y for every vector on the last axis of y, in the precision of M, as a tensor of the dtype of y."""
    wide = ops.cast(y, matrix.dtype)
    return ops.cast(map_rows(lambda rows: ops.matmul(rows, ops.transpose(matrix)), wide), y.dtype)


def _wide(w: Any) -> str:
    if keras.backend.backend() == "tensorflow":
        return "float64"
    dtype = dtype_of(w)
    return dtype if dtype == "float64" else "float32"


def _value(w: Any, _: Any) -> tuple[Any, Any]:
    """Σ log|R_ii|, and whether W is regular."""
    diagonal = ops.abs(ops.diagonal(ops.qr(w)[1]))
    # Householder QR is exact up to a few ε times the length of each column: below that R_ii is noise and not a number.
    noise = 4 * w.shape[0] * epsilon(dtype_of(w)) * ops.norm(w, axis=0)
    diagonal = ops.where(diagonal <= noise, ops.zeros_like(diagonal), diagonal)
    return ops.sum(ops.log(diagonal)), ops.all(diagonal > 0)


def _gradient(g: Any, regular: Any, w: Any, _: Any) -> tuple[Any]:
    """g W⁻ᵀ."""
    return (g * ops.transpose(_inverse_where(regular, w)),)


def _reference(g: Any, w: Any, _: Any) -> tuple[Any]:
    return _gradient(g, _value(ops.stop_gradient(w), ())[1], w, ())


def _plain(w: Any) -> Any:
    return ops.sum(ops.log(ops.abs(ops.diagonal(ops.qr(w)[1]))))
