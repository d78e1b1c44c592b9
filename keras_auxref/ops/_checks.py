"""Validation shared by every function of `ops`: what was expected, then what was received."""

from typing import Any

import keras

HALF = ("float16", "bfloat16")


def is_symbolic(*tensors: Any) -> bool:
    """True when any argument is a placeholder of a functional Keras model."""
    return any(isinstance(tensor, keras.KerasTensor) for tensor in tensors)


def as_tensor(value: Any, name: str) -> Any:
    """Converts to a backend tensor and refuses anything that is not floating point."""
    tensor = value if is_symbolic(value) else keras.ops.convert_to_tensor(value)
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if not dtype.startswith(("float", "bfloat")):
        raise ValueError(
            f"`{name}` must have a floating-point dtype. Expected one of float16, bfloat16, float32, float64. Received: {dtype}"
        )
    return tensor


def check_vector(x: Any, name: str) -> None:
    """Vectors live on the last axis, so a scalar has none."""
    if len(x.shape) < 1:
        raise ValueError(f"`{name}` must have at least one axis. Expected shape (..., d). Received: {tuple(x.shape)}")


def check_vectors_and_matrix(x: Any, w: Any, name: str) -> None:
    """`x` of shape (..., d) and `w` of shape (d, d), one dtype, and finite where that can be seen."""
    check_vector(x, name)
    if len(w.shape) != 2 or w.shape[0] != w.shape[1]:
        raise ValueError(f"`w` must be a square matrix. Expected shape (d, d). Received: {tuple(w.shape)}")
    if x.shape[-1] is not None and x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"The last axis of `{name}` must match `w`. Expected shape (..., {w.shape[0]}) for a `w` of shape {tuple(w.shape)}. "
            f"Received: {tuple(x.shape)}"
        )
    x_dtype, w_dtype = (keras.backend.standardize_dtype(t.dtype) for t in (x, w))
    if x_dtype != w_dtype:
        raise ValueError(
            f"`{name}` and `w` must share one dtype. Expected {x_dtype} for both. Received: {name} {x_dtype}, w {w_dtype}"
        )
    check_finite(w, "w")


def check_finite(w: Any, name: str) -> None:
    """Refuses NaN and infinity in a concrete tensor; inside a graph there is nothing to look at and NaN flows through."""
    if is_concrete(w) and not bool(keras.ops.all(keras.ops.isfinite(w))):
        raise ValueError(
            f"`{name}` must be finite. Expected no NaN and no infinity. Received: {_count_non_finite(w)} non-finite entries"
        )


def is_concrete(tensor: Any) -> bool:
    """True when the values of `tensor` can be read now: not symbolic, not inside a traced function."""
    if is_symbolic(tensor):
        return False
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.executing_eagerly()
    if backend == "jax":
        import jax

        return not isinstance(tensor, jax.core.Tracer)
    return True


def require_tensorflow(function: str) -> None:
    """Factorisations and scalar root finding are written in TensorFlow only."""
    if keras.backend.backend() != "tensorflow":
        raise NotImplementedError(
            f"`{function}` needs the TensorFlow backend of Keras. Received: KERAS_BACKEND={keras.backend.backend()!r}. "
            "`householder`, `reflect`, `jacobian` and `newton_inverse` run on every backend."
        )


def _count_non_finite(w: Any) -> int:
    return int(keras.ops.sum(keras.ops.cast(~keras.ops.isfinite(w), "int32")))
