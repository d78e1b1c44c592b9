"""What the bijectors have in common: parameters by reference, and events after any number of leading axes."""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import keras
import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref.typing import Shape, Tensor

Parameter: TypeAlias = tf.Tensor | tf.Variable | tfp.util.DeferredTensor
T = TypeVar("T")


def reference(value: Tensor, name: str) -> Parameter:
    """A parameter by reference: a `tf.Variable` unchanged, the one behind a Keras variable, or a tensor of anything else."""
    if isinstance(value, keras.Variable):
        value = value.value
    if not isinstance(value, tf.Variable | tfp.util.DeferredTensor):
        value = tf.convert_to_tensor(value)
    if not value.dtype.is_floating:
        raise ValueError(f"`{name}` must have a floating-point dtype. Expected float32 or float64. Received: {value.dtype.name}")
    return value


def require_event(value: Parameter, event_ndims: int, name: str, shape: str, square: bool = False) -> None:
    """Refuses a parameter that is not a batch of vectors or matrices, or has an unknown size where it must be known."""
    rank = value.shape.rank
    if rank is None or rank < event_ndims:
        received = "unknown rank" if rank is None else tuple(value.shape)
        raise ValueError(f"`{name}` must have {event_ndims} axes or more. Expected shape {shape}. Received: {received}")
    event = tuple(value.shape[rank - event_ndims :])
    if None in event:
        raise ValueError(f"`{name}` must have a known size. Expected shape {shape}. Received: {tuple(value.shape)}")
    if square and event[0] != event[1]:
        raise ValueError(f"`{name}` must be square. Expected shape {shape}. Received: {tuple(value.shape)}")


def square_shape(shape: tf.Tensor | Shape) -> tf.Tensor:
    """(..., d) → (..., d, d): the shape of the matrices of a bijector for inputs of this shape."""
    shape = tf.convert_to_tensor(shape, tf.int32)
    return tf.concat([shape, shape[-1:]], axis=0)


def require_one_dtype(**values: Parameter) -> tf.DType:
    """The dtype of all parameters."""
    dtypes = {name: value.dtype.name for name, value in values.items()}
    if len(set(dtypes.values())) > 1:
        raise ValueError(f"The parameters must share one dtype. Expected one of float32, float64 for all. Received: {dtypes}")
    return tf.as_dtype(next(iter(dtypes.values())))


def map_events(function: Callable[[tf.Tensor], T], x: tf.Tensor, event_ndims: int) -> T:
    """Applies a function of (n, *event) to x of shape (..., *event); every output gets the leading axes of x back."""
    rank = x.shape.rank
    if rank is None:
        raise ValueError(f"Expected an input of known rank ≥ {event_ndims}. Received: unknown rank")
    if rank == event_ndims + 1:
        return function(x)
    if rank < event_ndims:
        raise ValueError(f"Expected an input of rank ≥ {event_ndims}. Received: shape {tuple(x.shape)}")
    shape, lead = tf.shape(x), x.shape[: rank - event_ndims]
    flat = tf.reshape(x, tf.concat([[-1], shape[rank - event_ndims :]], axis=0))
    flat = tf.ensure_shape(flat, [None, *x.shape[rank - event_ndims :]])

    def restore(t: tf.Tensor) -> tf.Tensor:
        whole = tf.reshape(t, tf.concat([shape[: rank - event_ndims], tf.shape(t)[1:]], axis=0))
        return tf.ensure_shape(whole, [*lead, *t.shape[1:]])

    return tf.nest.map_structure(restore, function(flat))
