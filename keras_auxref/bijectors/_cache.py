"""A cache that follows the variables and the tape, and the base classes of all bijectors here."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
import tensorflow_probability as tfp
from tensorflow_probability.python.internal.cache_util import BijectorCache


class TapeCache(BijectorCache):
    """TFP's cache, except for a value that the active tape has not recorded, of an input that it has.

    Such a value is from before the tape. As far as the tape knows, it does not depend on the input: used in a loss, it would
    leave out its part of the gradient. It is computed again. Bijectors with trainable variables need none of this, as their hash
    changes with the tape.
    """

    def _get_or_create_edge(self, input: Any, forward_name: str, kwargs: Any) -> Any:
        edge = super()._get_or_create_edge(input, forward_name, kwargs)
        if not _recording() or self.bijector.trainable_variables or not _follows(input):
            return edge
        output = edge.output_ref() if edge.output_ref else None
        stale = output is not None and not _recorded(output)
        kept = {key: value for key, value in edge.attributes.items() if self.bijector.is_constant_jacobian or _recorded(value)}
        if stale or len(kept) < len(edge.attributes):
            edge = edge._replace(output_ref=None if stale else edge.output_ref, attributes=kept)
            self.storage[edge.input_ref] = edge
        return edge


class FreshBijector(tfp.bijectors.Bijector):
    """A bijector whose cached values never outlive the values of its variables.

    TFP remembers forward(x), inverse(y) and log-determinants by the identity of the tensor and the hash of the bijector, and
    answers the next call with the same tensor from its cache. With variables the cache goes stale: after an assignment
    log_prob(x) mixes old log-determinants with new values; under a `tf.GradientTape` a value from before the tape has no
    gradient, and the result is silently wrong; a value from another graph cannot be used at all. So the hash of this bijector
    covers all three: the values of the variables, the tape and the graph, and `TapeCache` looks at the input. log_prob still
    gets from the cache what it needs: it saves a second inverse. Inside a graph an assignment is noticed if it consumes the
    variable; a second tape opened inside the first is not noticed.
    """

    _cache = TapeCache()

    def __hash__(self) -> int:
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        variables = self.variables
        state = _contents(variables) if graph is None else _writes(graph, variables)
        return hash((super().__hash__(), id(graph), state, self._tape(graph)))

    def _tape(self, graph: tf.Graph | None) -> int:
        """A number that changes with the recording tape; 0 if there is none."""
        trainable = self.trainable_variables if _recording() else ()
        if not trainable:
            return 0
        # Setting attributes of a tf.Module makes it track them.
        memory = self.__dict__.setdefault("_tape_memory", {"number": 0, "probe": None, "graph": None})
        if memory["probe"] is None or memory["graph"] is not graph or not _recorded(memory["probe"]):
            # One entry of a variable, read now: only the current tape has recorded it.
            memory["probe"] = tf.reshape(tf.convert_to_tensor(trainable[0]), [-1])[:1]
            memory["graph"] = graph
            memory["number"] += 1
        return memory["number"]


class CompositeBijector(FreshBijector, tfp.experimental.AutoCompositeTensor):
    """A bijector whose parameters are all tensors, variables and settings: it may enter and leave a `tf.function` or a loop.

    The counterpart of `tfp.bijectors.AutoCompositeTensorBijector`, which would register the types of its subclasses under the
    names of TFP's own bijectors: there is a `Householder` in both.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        tfp.experimental.auto_composite_tensor(cls, omit_kwargs=("parameters",), non_identifying_kwargs=("name",))


def _contents(variables: Iterable[tf.Variable]) -> tuple[int, ...]:
    return tuple(hash(variable.numpy().tobytes()) for variable in variables)


def _writes(graph: tf.Graph, variables: Iterable[tf.Variable]) -> tuple[int, ...]:
    """How many operations of this graph may have written to each variable so far."""
    inner = {id(outer): placeholder for outer, placeholder in getattr(graph, "captures", [])}

    def writes(handle: tf.Tensor) -> int:
        # A variable that came in as an argument has its handle in this graph.
        handle = handle if getattr(handle, "graph", None) is graph else inner.get(id(handle))
        return 0 if handle is None else sum(op.type != "ReadVariableOp" for op in handle.consumers())

    return tuple(writes(variable.handle) for variable in variables)


def _recording() -> bool:
    """Whether a tape is active. TensorFlow has no public function for this; if unknown, assume one."""
    try:
        from tensorflow.python.eager import record
    except ImportError:
        return True
    return bool(record.could_possibly_record())


def _recorded(nest: Any, unknown: bool = False) -> bool:
    """Whether an active tape has recorded all of these tensors. If unknown, assume not."""
    try:
        from tensorflow.python.eager import record
    except ImportError:
        return unknown
    return all(record.should_record_backprop([tensor]) for tensor in tf.nest.flatten(nest))


def _follows(nest: Any) -> bool:
    """Whether an active tape may differentiate with respect to these tensors, or to what they come from."""
    return any(_recorded(tensor, unknown=True) for tensor in tf.nest.flatten(nest))
