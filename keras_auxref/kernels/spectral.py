"""The paper's invertible family: symmetric W by spectral normalisation."""

from collections.abc import Callable

import keras
from keras import ops

from keras_auxref.certificate import condition_for
from keras_auxref.initializers import OrthogonalMatrix, ReflectionOf, UniformFanIn
from keras_auxref.kernels.base import Kernel, require_alone, require_room, shift_by_rounding, wide
from keras_auxref.kernels.norms import top_eigenvalue
from keras_auxref.ops.rows import dtype_of
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class Spectral(Kernel):
    """W = I + bound · VVᵀ/σmax(VVᵀ): symmetric, with eigenvalues in [1, 1 + bound].

    f is a bijection for every V and every 0 < bound < 1. The paper proves this for bound ≤ 1/2; κ(W) < 2 is enough, and sharp.
    σmax is never underestimated, so the guarantee holds after any number of optimiser steps at any learning rate. V = 0 gives
    W = I.

    `kernel_initializer` means V; the default is the paper's U(−1/√d, 1/√d). The paper's flow uses V = I.

    Args:
        bound: Number in (0, 1), by default 0.5.
        lipschitz: Number L in (1, 3), instead of `bound`: f increases no distance by more than the factor L. This sets
            bound = (L − 1)/2, minus room for rounding. The certificate then has `lipschitz` ≤ L for all weights. W is
            computed in float64 and rounded.

    Example:
    >>> import numpy as np
    >>> from keras_auxref import AuxReflection
    >>> from keras_auxref.kernels import Spectral
    >>> layer, x = AuxReflection(kernel=Spectral(bound=0.9)), np.ones((2, 4), "float32")
    >>> np.allclose(layer.inverse(layer(x)), x, atol=1e-4), layer.certificate().invertible
    (True, True)
    """

    symmetric = True
    promises = True
    weight_names = ("kernel",)

    def __init__(self, bound: float | None = None, lipschitz: float | None = None) -> None:
        self.lipschitz = lipschitz
        if lipschitz is not None:
            require_alone("bound", bound, lipschitz)
            bound = condition_for(lipschitz) - 1
        bound = 0.5 if bound is None else bound
        if not 0 < bound < 1:
            raise ValueError(f"`bound` must lie strictly between 0 and 1. Expected 0 < bound < 1. Received: {bound}")
        self.bound = float(bound)

    def default_initializer(self) -> keras.initializers.Initializer:
        return UniformFanIn()

    def initial_weights(self, d: int, initializer: Callable[..., Tensor], dtype: str) -> dict[str, Tensor]:
        if isinstance(initializer, OrthogonalMatrix | ReflectionOf):
            raise ValueError(
                "f(x) = H(Wx) x with a symmetric W of condition below 2 is no orthogonal map but x ↦ −x, and cannot start as "
                f"one. Expected an initializer for V. Received: {type(initializer).__name__}. Put the orthogonal map before it, "
                'or take kernel="relaxed_cayley".'
            )
        self._bound_in(d, dtype)
        return super().initial_weights(d, initializer, dtype)

    def _bound_in(self, d: int, dtype: str) -> float:
        """The bound with room for the rounding of W and of its certificate, where a Lipschitz constant is promised."""
        if self.lipschitz is None:
            return self.bound
        # The eigenvalues of W⁻¹ lie in [1/(1 + b), 1] and move by s: (1 + s)/(1/(1 + b) − s) ≤ 1 + bound gives b.
        s = shift_by_rounding(d, dtype, 1 + self.bound, 1.0)
        bound = (1 + self.bound) / (1 + (2 + self.bound) * s) - 1
        require_room(bound > 0, self.lipschitz, 1 + 4 * s, dtype)
        return bound

    def __call__(self, weights: dict[str, Tensor]) -> Tensor:
        v = weights["kernel"]
        dtype, bound = dtype_of(v), self._bound_in(v.shape[0], dtype_of(v))
        if self.lipschitz is not None:
            v = wide(v)
        # VVᵀ/σmax(VVᵀ) does not depend on the scale of V: scale V to 1 before squaring it.
        size = ops.stop_gradient(ops.max(ops.abs(v)))
        v = v / ops.where(size > 0, size, 1)
        gram = v @ ops.transpose(v)
        top = top_eigenvalue(gram)
        normalised = gram / ops.where(top > 0, top, 1)
        return ops.cast(ops.eye(v.shape[0], dtype=v.dtype) + bound * normalised, dtype)

    def get_config(self) -> Config:
        return {"bound": self.bound if self.lipschitz is None else None, "lipschitz": self.lipschitz}
