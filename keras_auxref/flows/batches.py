"""Data of every kind that `fit` takes, and how to look at their first batch without using it up."""

import itertools
from collections.abc import Iterable, Iterator
from types import GeneratorType
from typing import Any

import keras

from keras_auxref.typing import Tensor


def inputs_of(batch: Any) -> Tensor:
    """The inputs of a batch as Keras gives them: alone, or first in a tuple with labels and weights."""
    if isinstance(batch, dict):
        keys = ", ".join(repr(key) for key in batch)
        first = next((key for key in batch if "image" in str(key)), next(iter(batch), "image"))
        raise ValueError(
            f"A flow learns from one tensor of data. Expected a tensor. Received: a dictionary with the keys {keys}. "
            f"To convert: `dataset.map(lambda example: example[{first!r}])`."
        )
    return inputs_of(batch[0]) if isinstance(batch, tuple | list) and batch else batch


def first_batch(data: Any, size: int) -> tuple[Any, Any]:
    """The first batch of data for `fit`, or None if it cannot be read, and the data, still with that batch.

    For an array or a list of arrays, these are the first rows.
    """
    if data is None:
        return None, data
    if isinstance(data, dict):
        return data, data
    if hasattr(data, "shape"):
        return data[:size], data
    if isinstance(data, list | tuple):
        whole = bool(data) and all(hasattr(part, "shape") for part in data)
        return (tuple(part[:size] for part in data) if whole else None), data
    if isinstance(data, keras.utils.PyDataset):
        return data[0], data
    if isinstance(data, GeneratorType):
        batch = next(data, None)
        return (None, data) if batch is None else (batch, _again(batch, data))
    # A `tf.data.Dataset` or a torch `DataLoader` begins anew with every iterator. Distributed data are not to be read ahead.
    once = isinstance(data, Iterator) or "Distributed" in type(data).__name__
    if isinstance(data, Iterable) and not once:
        return next(iter(data), None), data
    return None, data


def _again(first: Tensor | tuple[Tensor, ...], rest: Iterator[Tensor | tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """All batches, each as a tuple, as Keras expects them from a generator."""
    for batch in itertools.chain([first], rest):
        yield batch if isinstance(batch, tuple) else (batch,)


def spec_of(data: object) -> Any:
    """An object with the shape and dtype of the inputs, or None if only reading the data would tell."""
    spec = getattr(data, "element_spec", data)
    spec = spec[0] if isinstance(spec, tuple | list) and spec else spec
    return spec if hasattr(spec, "dtype") and hasattr(spec, "shape") else None
