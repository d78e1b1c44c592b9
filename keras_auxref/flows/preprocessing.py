"""Images in [0, 1] to the whole real line and back."""

import math
from typing import Unpack

import keras

from keras_auxref.invertible import Invertible
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, DType, LayerArguments, Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class Logit(Invertible, keras.layers.Layer):
    """y = logit(p), p = ½ + s (x − ½), for every pixel: [0, 1] becomes [logit((1 − s)/2), logit((1 + s)/2)].

        log|dy/dx| = log s − log p − log(1 − p)

    A pixel with |x − ½| ≥ 1/(2s) is impossible. Its log-determinant is −∞, and so is the log-density of an image that has one;
    y = 0 stands for it.

    Args:
        squash: Number s in (0, 1) that keeps p away from 0 and 1, where the logit is infinite.
        **kwargs: Arguments of `keras.layers.Layer`.
    """

    def __init__(self, squash: float = 0.9, **kwargs: Unpack[LayerArguments]) -> None:
        super().__init__(**kwargs)
        if not 0 < squash < 1:
            raise ValueError(f"`squash` must lie strictly between 0 and 1. Received: {squash}")
        self.squash = float(squash)

    def inverse(self, y: Tensor) -> Tensor:
        """x = ½ + (sigmoid(y) − ½)/s, beyond [0, 1] by at most (1/s − 1)/2."""
        y = keras.ops.convert_to_tensor(y, dtype=self.compute_dtype)
        return 0.5 + (keras.ops.sigmoid(y) - 0.5) / self.squash

    def impossible(self, x: Tensor, axis: tuple[int, ...] | None = None) -> Tensor:
        """Whether a pixel lies outside the support or, given axes, whether any of these pixels does."""
        outside = keras.ops.abs(self.squash * (x - 0.5)) >= 0.5  # not NaN, which stays NaN
        return outside if axis is None else keras.ops.any(outside, axis=axis)

    def forward_and_log_det(self, x: Tensor, training: bool | None = None) -> tuple[Tensor, Tensor]:
        x = keras.ops.convert_to_tensor(x, dtype=self.compute_dtype)
        outside, centred = self.impossible(x), self.squash * (x - 0.5)
        centred = keras.ops.where(outside, keras.ops.zeros_like(centred), centred)
        # 1 − p by its own formula: subtracting p from 1 would lose digits near 1.
        log_p, log_q = keras.ops.log(0.5 + centred), keras.ops.log(0.5 - centred)
        log_det = keras.ops.where(outside, -float("inf"), math.log(self.squash) - log_p - log_q)
        return log_p - log_q, keras.ops.sum(log_det, axis=-1)

    def get_config(self) -> Config:
        return {**super().get_config(), "squash": self.squash}


def dequantise(images: Tensor, noise: Tensor, bits: int, dtype: DType) -> Tensor:
    """(k + noise − ½)/(2ᵇ − 1) for the values k = 0 … 2ᵇ − 1 of images given as integers k or as numbers k/(2ᵇ − 1) in [0, 1].

    With noise uniform in [0, 1) the density p of the result bounds the probability of the image from below (uniform
    dequantisation): log P(k) ≥ E log p − D log(2ᵇ − 1) for D pixels, each of width 1/(2ᵇ − 1). Numbers between two values
    become the nearest. A value out of range is impossible: ∞, where p is 0.
    """
    whole, peak = _whole(images, bits, dtype), 2**bits - 1
    return keras.ops.where(_impossible(whole, peak), float("inf"), (whole + (noise - 0.5)) / peak)


def nearest_values(images: Tensor, bits: int, dtype: DType) -> Tensor:
    """The values k/(2ᵇ − 1) that `dequantise` spreads; ½ for one that is impossible."""
    whole, peak = _whole(images, bits, dtype), 2**bits - 1
    return keras.ops.where(_impossible(whole, peak), 0.5, whole / peak)


def _whole(images: Tensor, bits: int, dtype: DType) -> Tensor:
    """The integers k, as floating-point numbers."""
    if keras.backend.is_int_dtype(images.dtype) or keras.backend.standardize_dtype(images.dtype) == "bool":
        return keras.ops.cast(images, dtype)
    return keras.ops.round(keras.ops.cast(images, dtype) * (2**bits - 1))


def _impossible(whole: Tensor, peak: int) -> Tensor:
    return keras.ops.logical_or(whole < 0, whole > peak)


def as_fractions(images: Tensor, bits: int, dtype: DType) -> Tensor:
    """k/(2ᵇ − 1) for integers k, and other numbers as they are."""
    fractions = keras.ops.cast(images, dtype)
    if keras.backend.is_int_dtype(images.dtype) or keras.backend.standardize_dtype(images.dtype) == "bool":
        return fractions / (2**bits - 1)
    return fractions
