"""What the bijectors have in common: parameters by reference, and a cache that follows them."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
import tensorflow_probability as tfp


class FreshBijector(tfp.bijectors.Bijector):
    """A bijector whose cached values never outlive the values of its variables.

    TFP remembers forward(x), inverse(y) and log-determinants by the identity of the tensor and the hash of the bijector, and
    answers the next question about the same tensor from memory. With variables that memory goes stale: after an assignment
    log_prob(x) mixes old log-determinants with new values; under a `tf.GradientTape` a value from before the tape has no
    gradient, and the result is silently wrong; a value of another graph may not be used at all. So the hash of this bijector
    covers all three: the values of the variables, the tape and the graph. What log_prob needs of the cache, the second
    inverse that it saves, still works. Inside a graph an assignment is seen where it consumes the variable; a second tape
    opened inside a first is not seen.
    """

    def __hash__(self) -> int:
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        variables = self.variables
        state = _contents(variables) if graph is None else _writes(graph, variables)
        return hash((super().__hash__(), id(graph), state, self._tape(graph)))

    def _batch_shape(self, x_event_ndims: Any) -> tf.TensorShape:
        # No bijector here takes batches of parameters.
        return tf.TensorShape([])

    def _batch_shape_tensor(self, x_event_ndims: Any) -> tf.Tensor:
        return tf.zeros([0], tf.int32)

    def _tape(self, graph: Any) -> int:
        """A number that changes with the tape that records, 0 where none does."""
        trainable = self.trainable_variables if _recording() else ()
        if not trainable:
            return 0
        # Setting attributes of a tf.Module makes it track them.
        memory = self.__dict__.setdefault("_tape_memory", {"number": 0, "probe": None, "graph": None})
        if memory["probe"] is None or memory["graph"] is not graph or not _recorded(memory["probe"]):
            # One entry of a variable, read now: what the tape of now has recorded, and no other.
            memory["probe"] = tf.reshape(tf.convert_to_tensor(trainable[0]), [-1])[:1]
            memory["graph"] = graph
            memory["number"] += 1
        return memory["number"]


def _contents(variables: Any) -> Any:
    return tuple(hash(variable.numpy().tobytes()) for variable in variables)


def _writes(graph: Any, variables: Any) -> Any:
    """How many operations of this graph may have written to each variable so far."""
    inner = {id(outer): placeholder for outer, placeholder in getattr(graph, "captures", [])}
    handles = [inner.get(id(variable.handle)) for variable in variables]
    return tuple(0 if h is None else sum(op.type != "ReadVariableOp" for op in h.consumers()) for h in handles)


def _recording() -> bool:
    """Whether a tape is active. TensorFlow offers no public question for this; not knowing, assume one."""
    try:
        from tensorflow.python.eager import record
    except ImportError:
        return True
    return bool(record.could_possibly_record())


def _recorded(tensor: tf.Tensor) -> bool:
    """Whether an active tape has recorded this tensor. Not knowing, assume not."""
    try:
        from tensorflow.python.eager import record
    except ImportError:
        return False
    return bool(record.should_record_backprop([tensor]))


def reference(value: Any, name: str) -> Any:
    """A parameter that stays a variable if it is one: the `tf.Variable` behind a Keras variable, anything else a tensor."""
    if isinstance(value, keras.Variable):
        value = value.value
    if not isinstance(value, tf.Variable | tfp.util.DeferredTensor):
        value = tf.convert_to_tensor(value, name=name)
    if not value.dtype.is_floating:
        raise ValueError(f"`{name}` must have a floating-point dtype. Expected float32 or float64. Received: {value.dtype.name}")
    return value


def require_rank(value: Any, rank: int, name: str, shape: str) -> None:
    """Refuses a parameter of another rank, batches of parameters among them."""
    if value.shape.rank != rank:
        raise ValueError(f"`{name}` must have {rank} axes. Expected shape {shape}. Received: {tuple(value.shape)}")


def require_one_dtype(**values: Any) -> tf.DType:
    """The dtype of all parameters."""
    dtypes = {name: value.dtype.name for name, value in values.items()}
    if len(set(dtypes.values())) > 1:
        raise ValueError(f"The parameters must share one dtype. Expected one of float32, float64 for all. Received: {dtypes}")
    return tf.as_dtype(next(iter(dtypes.values())))


def on_events(function: Callable[[tf.Tensor], Any], x: tf.Tensor, event_ndims: int) -> Any:
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
