"""What a flow takes for an image: integers 0 … 2ᵇ − 1, or numbers in [0, 1]. Everything else is refused."""

import itertools
from collections.abc import Iterable, Iterator
from types import GeneratorType
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_auxref.ops._checks import is_concrete

INITIAL_IMAGES = 256
_HALF_A_LEVEL = 0.4999


class Range(NamedTuple):
    """The numbers that floating-point images may have, and the words for them."""

    low: float
    high: float
    words: str


def levels(bits: int) -> Range:
    """Numbers that round to one of the values k/(2ᵇ − 1)."""
    slack = _HALF_A_LEVEL / (2**bits - 1)
    return Range(-slack, 1 + slack, "numbers in [0, 1]")


def support(squash: float) -> Range:
    """Where the density is positive, |x − ½| < 1/(2s): a little more than [0, 1]."""
    half = 0.5 / squash
    return Range(0.5 - half, 0.5 + half, "numbers in [0, 1]")


def check_shape(x: Any, image_shape: tuple[int, ...]) -> None:
    """Refuses a batch that is not one of images of this shape."""
    if len(x.shape) != 4 or tuple(x.shape[1:]) != image_shape:
        expected = ", ".join(map(str, ("batch", *image_shape)))
        raise ValueError(f"Images do not fit this model. Expected shape ({expected}). Received: {tuple(x.shape)}")


def check_values(x: Any, bits: int, floats: Range) -> None:
    """Refuses images with values out of range, where values can be seen: not inside of a graph."""
    dtype, peak = keras.backend.standardize_dtype(x.dtype), 2**bits - 1
    if fits_always(dtype, bits):
        return
    if not keras.backend.is_int_dtype(dtype) and not keras.backend.is_float_dtype(dtype):
        _refuse(bits, floats, dtype, "`images.astype('uint8')`" if bits == 1 else "`images.astype('float32')`")
    if not isinstance(x, np.ndarray) and not is_concrete(x):
        return
    values = x if isinstance(x, np.ndarray) else keras.ops.convert_to_numpy(x)
    if not values.size:
        return
    if keras.backend.is_int_dtype(dtype):
        least, most = int(values.min()), int(values.max())
        if least < 0 or most > peak:
            _refuse(bits, floats, f"{dtype} from {least} to {most}", _integers(least, most, bits))
        return
    low, high = float(values.min()), float(values.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        bad = int(np.size(values) - np.isfinite(values).sum())
        _refuse(
            bits, floats, f"{dtype} with {bad} values that are NaN or infinite", "`np.nan_to_num(images)`, if these mean black"
        )
    if low < floats.low or high > floats.high:
        _refuse(bits, floats, f"{dtype} from {low:g} to {high:g}", _fractions(low, high))


def sure_to_fit(data: Any, bits: int) -> bool:
    """True for data of `fit` that need no look, by their dtype."""
    spec = getattr(data, "element_spec", data)
    spec = spec[0] if isinstance(spec, tuple | list) and spec else spec
    return hasattr(spec, "dtype") and fits_always(keras.backend.standardize_dtype(spec.dtype), bits)


def fits_always(dtype: str, bits: int) -> bool:
    """True for a dtype that holds nothing but the values of a pixel."""
    return (dtype == "uint8" and bits >= 8) or (dtype == "uint16" and bits >= 16) or (dtype == "bool" and bits == 1)


def _refuse(bits: int, floats: Range, received: str, conversion: str) -> None:
    raise ValueError(
        f"Images do not fit this model, whose pixels have bits={bits}. Expected integers 0 … {2**bits - 1}, or {floats.words}. "
        f"Received: {received}. To convert them: {conversion}."
    )


def _integers(low: int, high: int, bits: int) -> str:
    if low < 0:
        return "`images.astype('int32') + 128`" if low >= -128 and high < 128 and bits == 8 else "`images - images.min()`"
    given = next(n for n in (8, 16, 32, 64) if high < 2**n)
    advice = f"`images // {2 ** (given - bits)}`"
    return f"{advice}, or give all of them to the model with `bits={given}`" if given <= 16 else advice


def _fractions(low: float, high: float) -> str:
    if low < 0:
        return "`(images + 1) / 2`" if low >= -1.01 and high <= 1.01 else "`(images - images.min()) / np.ptp(images)`"
    peak = next((n for n in (255, 65535) if high <= n), None)
    if high < 1.5:
        return "`images.clip(0, 1)`"
    return f"`images / {peak}`" if peak else "`images / images.max()`"


# ------------------------------------------------------------------------------------------------- the data of `fit`


def images_of(batch: Any) -> Any:
    """The images of a batch as Keras gives them: alone, or first in a tuple with labels and weights."""
    if isinstance(batch, dict):
        keys = ", ".join(repr(key) for key in batch)
        first = next((key for key in batch if "image" in str(key)), next(iter(batch), "image"))
        raise ValueError(
            f"A flow learns from images alone. Expected a tensor of images. Received: a dictionary with the keys {keys}. "
            f"To convert: `dataset.map(lambda example: example[{first!r}])`."
        )
    return images_of(batch[0]) if isinstance(batch, tuple | list) and batch else batch


def first_images(data: Any) -> tuple[Any, Any]:
    """Some images of whatever `fit` takes, or None where there is no telling, and the data with nothing used up."""
    if data is None:
        return None, data
    if isinstance(data, dict):
        return images_of(data), data
    if hasattr(data, "shape"):
        return data[:INITIAL_IMAGES], data
    if isinstance(data, list | tuple):
        some = images_of(data)
        return (some[:INITIAL_IMAGES] if hasattr(some, "shape") else None), data
    if isinstance(data, keras.utils.PyDataset):
        return images_of(data[0]), data
    if isinstance(data, GeneratorType):
        batch = next(data, None)
        return (None, data) if batch is None else (images_of(batch), _again(batch, data))
    # A `tf.data.Dataset` or a torch `DataLoader` begins anew with every iterator. Distributed data are not to be read ahead.
    once = isinstance(data, Iterator) or "Distributed" in type(data).__name__
    if isinstance(data, Iterable) and not once:
        batch = next(iter(data), None)
        return None if batch is None else images_of(batch), data
    return None, data


def _again(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield from itertools.chain([first], rest)
