"""What a flow takes for vectors and for a context: finite floating-point numbers. Everything else is refused."""

import keras
import numpy as np

from keras_auxref.ops.checks import is_concrete
from keras_auxref.ops.rows import epsilon
from keras_auxref.typing import Tensor


def check_vectors(x: Tensor, d: int) -> None:
    """Refuses a batch that is not one of vectors of d finite floating-point numbers. Values are not checked inside graphs."""
    if not hasattr(x, "shape"):
        raise ValueError(f"Vectors do not fit this model. Expected an array of shape (batch, {d}). Received: {type(x).__name__}")
    if len(x.shape) != 2 or x.shape[-1] != d:
        raise ValueError(f"Vectors do not fit this model. Expected shape (batch, {d}). Received: {tuple(x.shape)}")
    dtype = str(x.dtype) if isinstance(x, np.ndarray) else keras.backend.standardize_dtype(x.dtype)
    if dtype.startswith(("int", "uint", "bool")):
        raise ValueError(
            "Vectors do not fit this model: integers have no density. Expected floating-point numbers. "
            f"Received: {dtype}. To spread whole numbers: `x + np.random.default_rng(0).random(x.shape)`; if they are "
            "measurements: `x.astype('float32')`."
        )
    if not dtype.startswith(("float", "bfloat")):
        raise ValueError(f"Vectors do not fit this model. Expected floating-point numbers. Received: {dtype}")
    check_finite_columns(x, "Vectors do not fit this model.")


def check_finite_columns(x: Tensor, what: str) -> None:
    """Refuses numbers that are NaN or infinite, where numbers can be seen, and names their columns."""
    if not isinstance(x, np.ndarray) and not is_concrete(x):
        return
    values = x if isinstance(x, np.ndarray) else keras.ops.convert_to_numpy(x)
    finite = np.isfinite(values)
    if not finite.all():
        columns = np.flatnonzero(~finite.reshape(-1, values.shape[-1]).all(axis=0))
        raise ValueError(
            f"{what} Expected finite numbers. Received: {int(values.size - finite.sum())} that are NaN or infinite, in "
            f"{named(columns)}"
        )


def check_varies(x: Tensor, dtype: str) -> None:
    """Refuses vectors with a column that is constant to rounding: no scale standardises it, and its density is infinite."""
    values = np.asarray(keras.ops.convert_to_numpy(x), "float64")
    if len(values) < 2:
        raise ValueError(f"ActNorm starts from the spread of data. Expected 2 or more vectors. Received: {len(values)}")
    spread, size = np.ptp(values, axis=0), np.abs(values).max(axis=0)
    constant = np.flatnonzero(spread <= 8 * epsilon(dtype) * size)
    if len(constant):
        raise ValueError(
            "A column that is constant has no density. Expected columns that vary. Received: "
            f"{named(constant)}, constant over {len(values)} vectors. Leave it out, or add noise."
        )


def named(columns: np.ndarray) -> str:
    """`column 3`, or `columns 0, 3, 5`."""
    words = ", ".join(str(column) for column in columns[:8]) + (", …" if len(columns) > 8 else "")
    return f"column {words}" if len(columns) == 1 else f"columns {words}"
