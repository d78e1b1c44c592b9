"""Soft orthogonality: penalties that pull a kernel towards orthogonal columns. The layers here are orthogonal by construction."""

import math

import keras
import numpy as np
from keras import ops

from keras_auxref.ops.checks import HALF, whole_number
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, Tensor

__all__ = ["MODES", "SoftOrthogonal"]
MODES = ("so", "dso", "mc", "srip")


@keras.saving.register_keras_serializable(PACKAGE)
class SoftOrthogonal(keras.regularizers.Regularizer):
    """The four penalties of Bansal et al. for a kernel W of shape (n, m), n the product of all axes but the last.

        so     strength · ‖WᵀW − I‖²_F
        dso    strength · (‖WᵀW − I‖²_F + ‖WWᵀ − I‖²_F)
        mc     strength · max |(WᵀW − I)_ij|
        srip   strength · σmax(WᵀW − I)

    For n < m the columns cannot be orthonormal: `"so"`, `"mc"` and `"srip"` then take WWᵀ − I, which can be zero. σmax comes
    from power iteration with two products per step, from a fixed start; its gradient is that of ‖A v‖ at the last v.

    Args:
        mode: `"so"`, `"dso"`, `"mc"` or `"srip"`.
        strength: Number ≥ 0.
        iterations: Steps of the power iteration. The paper takes 1 step of two products; more get closer to σmax, from below.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.regularizers import SoftOrthogonal
    >>> float(SoftOrthogonal("so", 0.5)(np.array([[2.0, 0.0], [0.0, 1.0]])))
    4.5

    Reference: Bansal, Chen & Wang, "Can We Gain More from Orthogonality Regularizations in Training Deep CNNs?", NeurIPS 2018.
    """

    def __init__(self, mode: str = "srip", strength: float = 1e-2, iterations: int = 4) -> None:
        if mode not in MODES:
            raise ValueError(f"Unknown mode of soft orthogonality. Expected one of {list(MODES)}. Received: {mode!r}")
        if isinstance(strength, bool) or not isinstance(strength, int | float) or not 0 <= strength < math.inf:
            raise ValueError(f"`strength` must be a number. Expected 0 ≤ strength < ∞. Received: {strength!r}")
        self.mode, self.strength, self.iterations = mode, float(strength), whole_number("iterations", iterations)

    def __call__(self, x: Tensor) -> Tensor:
        w = ops.convert_to_tensor(x)
        if len(w.shape) < 2:
            raise ValueError(f"Soft orthogonality is for kernels. Expected shape (..., n, m). Received: {tuple(w.shape)}")
        if keras.backend.standardize_dtype(w.dtype) in HALF:
            w = ops.cast(w, "float32")
        w = ops.reshape(w, (-1, w.shape[-1]))
        tall = w if w.shape[0] >= w.shape[1] else ops.transpose(w)
        defect = _defect(tall)
        if self.mode == "mc":
            value = ops.max(ops.abs(defect))
        elif self.mode == "srip":
            value = _largest_singular_value(defect, self.iterations)
        else:
            value = ops.sum(ops.square(defect))
            if self.mode == "dso":
                value = value + ops.sum(ops.square(_defect(ops.transpose(tall))))
        return self.strength * value

    def get_config(self) -> Config:
        return {"mode": self.mode, "strength": self.strength, "iterations": self.iterations}


def _defect(w: Tensor) -> Tensor:
    """WᵀW − I."""
    return ops.matmul(ops.transpose(w), w) - ops.eye(w.shape[1], dtype=w.dtype)


def _largest_singular_value(a: Tensor, iterations: int) -> Tensor:
    """‖A v‖ for a symmetric A and the v of power iteration with A², a constant to the gradient. 0, with gradient 0, for A = 0."""
    fixed = ops.stop_gradient(a)
    v = ops.convert_to_tensor(np.random.default_rng(0).normal(size=(a.shape[0], 1)), dtype=a.dtype)
    for _ in range(iterations):
        v = ops.matmul(fixed, ops.matmul(fixed, v / _length(v)))
    image = ops.matmul(a, v / _length(v))
    squared = ops.sum(ops.square(image))
    positive = squared > 0
    return ops.where(positive, ops.sqrt(ops.where(positive, squared, 1)), 0)


def _length(v: Tensor) -> Tensor:
    """‖v‖, and 1 for v = 0."""
    size = ops.max(ops.abs(v))
    size = ops.where(size > 0, size, 1)
    length = size * ops.sqrt(ops.sum(ops.square(v / size)))
    return ops.where(length > 0, length, 1)
