"""What a flow takes for an image: integers 0 … 2ᵇ − 1, or numbers in [0, 1]. Everything else is refused."""

import warnings
from typing import NamedTuple

import keras
import numpy as np

from keras_auxref.flows.batches import inputs_of, spec_of
from keras_auxref.ops.checks import is_concrete
from keras_auxref.typing import Data, Shape, Tensor

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


def check_shape(x: Tensor, image_shape: tuple[int, ...]) -> None:
    """Refuses a batch that is not one of images of this shape."""
    shape = tuple(x.shape)
    if len(shape) != 4 or shape[1:] != image_shape:
        expected, advice = ", ".join(map(str, ("batch", *image_shape))), _reshaping(shape, image_shape)
        raise ValueError(f"Images do not fit this model. Expected shape ({expected}). Received: {shape}{advice}")


def check_spec(spec: Tensor, image_shape: tuple[int, ...]) -> None:
    """Refuses what has a shape that is not one of images, as far as it is known."""
    known = getattr(spec.shape, "rank", 0) is not None
    if known and None not in tuple(spec.shape)[1:]:
        check_shape(spec, image_shape)


def _reshaping(shape: Shape, image_shape: tuple[int, ...]) -> str:
    """The line that converts, where there is one."""
    channels = image_shape[-1]
    if shape == image_shape:
        line = "`images[None]` for one image, `np.stack(images)` for a list of them, `dataset.batch(64)` for a dataset"
    elif len(shape) == 3 and channels == 1 and shape[1:] == image_shape[:-1]:
        line = "`images[..., None]`"
    elif len(shape) != 4 or shape[1:3] != image_shape[:2]:
        return ""
    elif shape[-1] == 4 and channels == 3:
        line = "`images[..., :3]` drops the fourth channel of RGBA"
    elif shape[-1] == 1 and channels == 3:
        line = "`np.repeat(images, 3, axis=-1)`"
    else:
        return ""
    return f". To convert them: {line}."


def as_batch(images: Tensor | list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """A list of images, or of numbers, as one array; the images of a tuple that begins with a batch of them."""
    if not isinstance(images, list) or not images:
        return inputs_of(images)
    axes = [len(getattr(image, "shape", ())) for image in images]
    if axes.count(4) > 1:
        raise ValueError(
            f"Images do not fit this model. Expected one batch of images. Received: a list of {len(images)} batches. "
            "To convert them: `np.concatenate(images)`."
        )
    if all(n == 3 for n in axes):
        return np.stack([keras.ops.convert_to_numpy(image) for image in images])
    return np.array(images) if all(isinstance(image, list) for image in images) else inputs_of(images)


def warn_if_dark(x: Tensor, bits: int) -> None:
    """Warns of whole numbers of which the largest is far below that of a pixel: images of 0 and 1 would be near black."""
    if not keras.backend.is_int_dtype(x.dtype) or not (isinstance(x, np.ndarray) or is_concrete(x)):
        return
    values, peak = (x if isinstance(x, np.ndarray) else keras.ops.convert_to_numpy(x)), 2**bits - 1
    most = int(values.max()) if values.size else peak
    if 16 * most <= peak:
        advice = f"give the model `bits={max(most.bit_length(), 1)}`, or multiply them by {peak // max(most, 1)}"
        warnings.warn(
            f"The largest value of the first images is {most}, where pixels of bits={bits} reach {peak}: they are almost black. "
            f"If {most} means white, {advice}.",
            UserWarning,
            stacklevel=3,
        )


def check_values(x: Tensor, bits: int, floats: Range) -> None:
    """Refuses images with values out of range, where values can be seen: not inside a graph."""
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


def sure_to_fit(data: Data, bits: int) -> bool:
    """True for data of `fit` that need no look, by their dtype."""
    spec = spec_of(data)
    return spec is not None and fits_always(keras.backend.standardize_dtype(spec.dtype), bits)


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
