"""Validation shared by every function of `ops`: what was expected, then what was received."""

import numbers
from typing import Any

import keras
import numpy as np

from keras_auxref.ops import backend
from keras_auxref.ops.backend import require_tensorflow as require_tensorflow
from keras_auxref.ops.rows import HALF as HALF
from keras_auxref.ops.rows import dtype_of, working_dtype
from keras_auxref.typing import Tensor


def is_symbolic(*tensors: Any) -> bool:
    """True when any argument is a placeholder of a functional Keras model."""
    return any(isinstance(tensor, keras.KerasTensor) for tensor in tensors)


def whole_number(name: str, value: object, least: int = 1, *, also: str = "") -> int:
    """An argument that has to be an integer, Python's or NumPy's, of at least `least`; `also` names what else is allowed."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        kind, several = "a positive integer" if least == 1 else "a whole number", f"{least}, {least + 1}, {least + 2}, …"
        if also:
            kind, several = f"{also} or {kind}", f"{also}, {several}"
        raise ValueError(f"`{name}` must be {kind}. Expected {several} Received: {value!r}")
    return int(value)


def whole_number_or_none(name: str, value: object, least: int = 1) -> int | None:
    """`whole_number`, or None."""
    return None if value is None else whole_number(name, value, least, also="None")


def check_one_tensor(value: Any, name: str) -> None:
    """Refuses None, several tensors, and sparse or ragged ones, before a backend raises an error of its own."""
    received = None
    if value is None:
        received = "None"
    elif isinstance(value, dict) or (isinstance(value, list | tuple) and any(getattr(v, "shape", ()) for v in value)):
        received = f"{len(value)} tensors in a {type(value).__name__}"
    elif backend.kind_of(value) != "dense":
        received = f"a {backend.kind_of(value)} tensor"
    if received:
        raise ValueError(f"`{name}` needs one dense tensor. Expected shape (..., d). Received: {received}")


def as_tensor(value: Any, name: str) -> Tensor:
    """Converts to a backend tensor and refuses anything that is not floating point."""
    check_one_tensor(value, name)
    tensor = value if is_symbolic(value) else backend.as_tensor(value)
    dtype = dtype_of(tensor)
    if not dtype.startswith(("float", "bfloat")):
        raise ValueError(
            f"`{name}` must have a floating-point dtype. Expected one of float16, bfloat16, float32, float64. Received: {dtype}"
        )
    return tensor


def check_vector(x: Tensor, name: str) -> None:
    """Vectors are on the last axis, so scalars and tensors of unknown rank are refused."""
    if not _rank(x):
        received = "unknown rank" if _rank(x) is None else tuple(x.shape)
        raise ValueError(f"`{name}` must have at least one axis. Expected shape (..., d). Received: {received}")


def _rank(x: Tensor) -> int | None:
    """The number of axes, where it is known."""
    rank = getattr(x.shape, "rank", 0)
    return None if rank is None else len(x.shape)


def check_square(w: Tensor, name: str) -> None:
    """`w` of shape (d, d), d known."""
    if _rank(w) != 2 or w.shape[0] is None or w.shape[0] != w.shape[1]:
        received = "unknown rank" if _rank(w) is None else tuple(w.shape)
        raise ValueError(f"`{name}` must be a square matrix of known size. Expected shape (d, d). Received: {received}")


def check_vectors_and_matrix(x: Tensor, w: Tensor, name: str) -> None:
    """`x` of shape (..., d) and `w` of shape (d, d), one dtype, and finite where that can be seen."""
    check_vector(x, name)
    check_square(w, "w")
    if x.shape[-1] is not None and x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"The last axis of `{name}` must match `w`. Expected shape (..., {w.shape[0]}) for a `w` of shape {tuple(w.shape)}. "
            f"Received: {tuple(x.shape)}"
        )
    x_dtype, w_dtype = (dtype_of(t) for t in (x, w))
    if x_dtype != w_dtype:
        raise ValueError(
            f"`{name}` and `w` must share one dtype. Expected {x_dtype} for both. Received: {name} {x_dtype}, w {w_dtype}"
        )
    check_finite(w, "w")


def check_finite(w: Tensor, name: str) -> None:
    """Refuses NaN and infinity in a concrete tensor; inside a graph there is nothing to look at and NaN flows through."""
    if not is_concrete(w):
        return
    # In NumPy: while JAX traces, even operations on concrete arrays are traced.
    bad = int(np.sum(~np.isfinite(keras.ops.convert_to_numpy(w))))
    if bad:
        raise ValueError(f"`{name}` must be finite. Expected no NaN and no infinity. Received: {bad} non-finite entries")


def is_concrete(tensor: Tensor) -> bool:
    """True when the values of `tensor` can be read now: not symbolic, not inside a traced function."""
    return not is_symbolic(tensor) and backend.is_concrete(tensor)


def prepare(x: Tensor, w: Tensor, name: str) -> tuple[Tensor, Tensor, str]:
    """Checked tensors, in float32 at least, and the dtype of the result."""
    x, w = as_tensor(x, name), as_tensor(w, "w")
    check_vectors_and_matrix(x, w, name)
    dtype = dtype_of(x)
    x, w = (keras.ops.cast(t, working_dtype(dtype)) for t in (x, w))
    return x, w, dtype


def check_orthogonal(matrix: np.ndarray) -> None:
    """Refuses a matrix with a ‖UᵀU − I‖ that float32 rounding cannot explain."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"An orthogonal matrix is square. Expected shape (d, d). Received: {matrix.shape}")
    exact = matrix.astype(np.float64)
    error = float(np.abs(exact.T @ exact - np.eye(len(exact))).max())
    if not error < 1e-4:
        raise ValueError(f"Expected an orthogonal matrix, max|UᵀU − I| < 1e-4. Received: max|UᵀU − I| = {error:.2e}")


def check_orthonormal(matrix: np.ndarray) -> None:
    """Refuses a matrix of any shape if neither its rows nor its columns are orthonormal up to float32 rounding."""
    if matrix.ndim != 2:
        raise ValueError(f"Expected a matrix with orthonormal rows or columns. Received: an array of shape {matrix.shape}")
    thin = (matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T).astype(np.float64)
    error = float(np.abs(thin.T @ thin - np.eye(thin.shape[1])).max())
    if not error < 1e-4:
        raise ValueError(
            "Expected a matrix Q with orthonormal rows or columns, max|QᵀQ − I| < 1e-4. Received: "
            f"max|QᵀQ − I| = {error:.2e} for shape {matrix.shape}"
        )
