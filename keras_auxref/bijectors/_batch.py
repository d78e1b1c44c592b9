"""Batches of parameters: one map for each member, on vectors of any batch shape that broadcasts with theirs."""

from collections.abc import Callable
from functools import reduce

import tensorflow as tf

Members = Callable[..., tf.Tensor]
"""A function of x of shape (..., d) and of the parameters of one member, or of the latter alone."""

Events = int | dict[str, int]
"""How many trailing axes of a parameter belong to one member: of all parameters, or of each by name."""


def batch_shape(parameters: dict[str, tf.Tensor | tf.Variable], events: Events) -> tf.TensorShape:
    """The shape to which the batch axes of all parameters broadcast, as far as it is known."""
    leads = [value.shape[: value.shape.rank - _ndims(events, name)] for name, value in parameters.items()]
    try:
        return reduce(tf.broadcast_static_shape, leads, tf.TensorShape([]))
    except ValueError:
        received = ", ".join(f"{name} {tuple(value.shape)}" for name, value in parameters.items())
        raise ValueError(
            "The batches of the parameters do not fit each other. Expected shapes that broadcast before the axes of one "
            f"member, the last {events}. Received: {received}"
        ) from None


def map_members(function: Members, parameters: dict[str, tf.Tensor], events: Events, dtype: tf.DType | None = None) -> tf.Tensor:
    """function(**parameters) for every member of a batch: a tensor of shape (*batch, *output)."""
    shape = batch_shape(parameters, events)
    if shape.rank == 0:
        return function(**parameters)
    batch = _batch_tensor(parameters, events)
    members = {name: _flat(value, batch, _ndims(events, name)) for name, value in parameters.items()}
    signature = dtype or next(iter(parameters.values())).dtype
    output = tf.map_fn(lambda one: function(**one), members, fn_output_signature=signature)
    output = tf.reshape(output, tf.concat([batch, tf.shape(output)[1:]], axis=0))
    return tf.ensure_shape(output, shape.concatenate([None] * (output.shape.rank - shape.rank)))


def map_member_rows(function: Members, x: tf.Tensor, parameters: dict[str, tf.Tensor], events: Events) -> tf.Tensor:
    """function(x, **parameters), where each vector of x goes to the member that it belongs to.

    The axes of x before the last one broadcast against the batch of the parameters, aligned on the right. The function is called
    once per member, on all of its vectors: what depends on the parameters alone, such as a factorisation, is computed only
    once. An axis of size 1 in the batch of the parameters does not count: all vectors along it belong to the same member.
    """
    shape = batch_shape(parameters, events)
    if shape.rank == 0:
        return function(x, **parameters)
    if x.shape.rank is None:
        raise ValueError("Expected an input of known rank, as the parameters have a batch. Received: unknown rank")
    static = _broadcast(x.shape[:-1], shape, x)
    batch = _batch_tensor(parameters, events)
    lead = tf.broadcast_dynamic_shape(tf.shape(x)[:-1], batch)
    rank, offset = static.rank, static.rank - shape.rank
    own = [axis for axis in range(offset, rank) if shape[axis - offset] != 1]
    order = [*own, *(axis for axis in range(rank) if axis not in own)]  # first the axes that choose a member

    x = tf.broadcast_to(x, tf.concat([lead, tf.shape(x)[-1:]], axis=0))
    moved = tf.gather(lead, order)
    vectors = tf.reshape(tf.transpose(x, [*order, rank]), tf.concat([_sizes(moved, len(own)), [x.shape[-1]]], axis=0))
    members = {name: _flat(value, batch, _ndims(events, name)) for name, value in parameters.items()}
    if own:
        output = tf.map_fn(lambda one: function(one[0], **one[1]), (vectors, members), fn_output_signature=x.dtype)
    else:
        output = function(vectors[0], **{name: value[0] for name, value in members.items()})[None]
    rest = tf.shape(output)[2:]
    output = tf.reshape(output, tf.concat([moved, rest], axis=0))
    back = [order.index(axis) for axis in range(rank)]
    output = tf.transpose(output, [*back, *range(rank, output.shape.rank)])
    return tf.ensure_shape(output, static.concatenate(x.shape[-1:] if output.shape.rank > rank else []))


def _ndims(events: Events, name: str) -> int:
    return events if isinstance(events, int) else events[name]


def _sizes(moved: tf.Tensor, own: int) -> tf.Tensor:
    """(members, vectors of each)."""
    return tf.stack([tf.reduce_prod(moved[:own]), tf.reduce_prod(moved[own:])])


def _batch_tensor(parameters: dict[str, tf.Tensor], events: Events) -> tf.Tensor:
    leads = [tf.shape(value)[: value.shape.rank - _ndims(events, name)] for name, value in parameters.items()]
    return reduce(tf.broadcast_dynamic_shape, leads)


def _flat(value: tf.Tensor, batch: tf.Tensor, event_ndims: int) -> tf.Tensor:
    """The parameter with one axis for all members."""
    event = value.shape[value.shape.rank - event_ndims :]
    value = tf.broadcast_to(value, tf.concat([batch, event], axis=0))
    return tf.reshape(value, [-1, *event])


def _broadcast(lead: tf.TensorShape, batch: tf.TensorShape, x: tf.Tensor) -> tf.TensorShape:
    try:
        return tf.broadcast_static_shape(lead, batch)
    except ValueError:
        raise ValueError(
            "The batch of the input does not fit the batch of the parameters. Expected a shape that broadcasts with "
            f"{tuple(batch)} before the last axis. Received: {tuple(x.shape)}"
        ) from None
