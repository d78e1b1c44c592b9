"""`tf.vectorized_map` of a function of rows: all iterations become rows of one call."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def let_vectorise(outputs: object, call: Callable[..., object], arguments: tuple[object, ...], rows: int) -> None:
    """Tells TensorFlow how to vectorise `outputs = call(*arguments)`, where the first `rows` arguments are (n, …).

    TensorFlow vectorises a function operation by operation. It cannot handle operations of variable size, such as picking
    rows; for others it falls back to loops, with a page of warnings. An operation may have its own converter, as here.
    Iterations that differ only in rows become one call with (iterations · n, …); iterations that differ in anything else, such
    as W, are called one after the other. If the operation is not the one expected here, TensorFlow vectorises it as usual.

    Args:
        outputs: A nest of tensors, all of them (n, …), each row made of the same row of the arguments.
        call: The `tf.function` that was called.
        arguments: Its arguments: nests of tensors and constants.
        rows: How many of the arguments are nests of (n, …).
    """
    places = [place for place, leaf in enumerate(tf.nest.flatten(arguments)) if tf.is_tensor(leaf)]
    own = sum(tf.is_tensor(leaf) for leaf in tf.nest.flatten(arguments[:rows]))
    operation = tf.nest.flatten(outputs)[0].op
    while operation.type == "Identity":
        operation = operation.inputs[0].op
    if len(operation.inputs) != len(places):
        return
    # The converter outlives this call as an attribute of the operation. It must not hold a tensor of the graph: Python's garbage
    # collector does not see through operations, and the graph would never be freed.
    structure = tf.nest.map_structure(lambda leaf: None if tf.is_tensor(leaf) else leaf, arguments)
    leaves, dtypes = tf.nest.flatten(structure), [output.dtype for output in operation.outputs]

    def again(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        results = tf.nest.flatten(call(*tf.nest.pack_sequence_as(structure, given)))
        return [result for result in results if result is not None]

    def convert(pfor_input: Any) -> list[object]:
        from tensorflow.python.ops.parallel_for.pfor import wrap

        tensors = [wrapped.t for wrapped in pfor_input.inputs]
        stacked = [place for place, wrapped in enumerate(pfor_input.inputs) if wrapped.is_stacked]
        if max(stacked) < own:
            results = _as_rows(again, tensors, stacked, own, pfor_input.pfor.loop_len_vector[0])
        else:
            results = _one_by_one(again, tensors, stacked, dtypes)
        return [wrap(result, True) for result in results]

    operation.pfor_converter = convert


def _as_rows(again: Any, tensors: list[tf.Tensor], stacked: list[int], own: int, iterations: tf.Tensor) -> list[tf.Tensor]:
    whole = [t if place in stacked else tf.repeat(t[None], iterations, axis=0) for place, t in enumerate(tensors[:own])]
    lead = tf.shape(whole[0])[:2]

    def flat(t: tf.Tensor) -> tf.Tensor:
        known = t.shape[:2].num_elements()
        return tf.reshape(t, tf.concat([[-1 if known is None else known], tf.shape(t)[2:]], axis=0))

    results = again([*map(flat, whole), *tensors[own:]])
    return [tf.reshape(t, tf.concat([lead, tf.shape(t)[1:]], axis=0)) for t in results]


def _one_by_one(again: Any, tensors: list[tf.Tensor], stacked: list[int], dtypes: list[tf.DType]) -> list[tf.Tensor]:
    def iteration(parts: list[tf.Tensor]) -> list[tf.Tensor]:
        given = list(tensors)
        for place, part in zip(stacked, parts, strict=True):
            given[place] = part
        return again(given)

    return tf.map_fn(iteration, [tensors[place] for place in stacked], fn_output_signature=dtypes)
