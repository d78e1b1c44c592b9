"""The paper's invertible family: symmetric W by spectral normalisation."""

from typing import Any

import keras
from keras import ops

from keras_auxref._keras import PACKAGE
from keras_auxref.initializers import OrthogonalMatrix, ReflectionOf, UniformFanIn
from keras_auxref.kernels.base import Kernel
from keras_auxref.kernels.norms import top_eigenvalue
from keras_auxref.typing import Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class Spectral(Kernel):
    """W = I + bound · VVᵀ/σmax(VVᵀ): symmetric, with eigenvalues in [1, 1 + bound].

    f is a bijection for every V and every 0 < bound < 1. The paper proves this for bound ≤ 1/2; κ(W) < 2 is enough, and sharp.
    σmax is never underestimated, so the guarantee holds after any number of optimiser steps at any learning rate. V = 0 gives
    W = I.

    `kernel_initializer` means V; the default is the paper's U(−1/√d, 1/√d). The paper's flow uses V = I.

    Args:
        bound: Number in (0, 1).
    """

    symmetric = True
    promises = True
    weight_names = ("kernel",)

    def __init__(self, bound: float = 0.5) -> None:
        if not 0 < bound < 1:
            raise ValueError(f"`bound` must lie strictly between 0 and 1. Expected 0 < bound < 1. Received: {bound}")
        self.bound = float(bound)

    def default_initializer(self) -> keras.initializers.Initializer:
        return UniformFanIn()

    def initial_weights(self, d: int, initializer: Any, dtype: str) -> dict[str, Tensor]:
        if isinstance(initializer, OrthogonalMatrix | ReflectionOf):
            raise ValueError(
                "f(x) = H(Wx) x with a symmetric W of condition below 2 is no orthogonal map but x ↦ −x, and cannot start as "
                f"one. Expected an initializer for V. Received: {type(initializer).__name__}. Put the orthogonal map before it, "
                'or take kernel="relaxed_cayley".'
            )
        return super().initial_weights(d, initializer, dtype)

    def __call__(self, weights: dict[str, Tensor]) -> Tensor:
        v = weights["kernel"]
        # VVᵀ/σmax(VVᵀ) ignores the length of V: scale V to 1 before squaring it.
        size = ops.stop_gradient(ops.max(ops.abs(v)))
        v = v / ops.where(size > 0, size, 1)
        gram = ops.matmul(v, ops.transpose(v))
        top = top_eigenvalue(gram)
        normalised = gram / ops.where(top > 0, top, 1)
        return ops.eye(v.shape[0], dtype=v.dtype) + self.bound * normalised

    def get_config(self) -> dict[str, Any]:
        return {"bound": self.bound}
