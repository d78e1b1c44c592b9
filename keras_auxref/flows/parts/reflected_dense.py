"""A reflection before an invertible matrix: what a 1×1 convolution gains for the price of one more product."""

from dataclasses import replace
from typing import Any, Unpack

import keras
import numpy as np

from keras_auxref.certificate import Certificate, bounds_of
from keras_auxref.flows.parts.invertible_dense import InvertibleDense
from keras_auxref.invertible import Invertible
from keras_auxref.layers.checks import as_input, last_axis, require_floating
from keras_auxref.layers.factored_reflection import FactoredReflection, fixed_start
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, DType, Initializer, LayerArguments, Shape, Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class ReflectedDense(Invertible, keras.layers.Layer):
    """y = B g(Vᵀx) on the last axis: an invertible matrix B after a reflection that is provably invertible.

        g(a) = (cλ − 1) ∘ a,      c = 2 Σ λᵢaᵢ² / Σ λᵢ²aᵢ²,      κ = max λ / min λ < 2
        log|det ∂y/∂x| = log|det B| + log|det ∂g/∂a|

    With λ = 1 this is the matrix BVᵀ, Glow's 1×1 convolution; with B orthogonal it is a factored reflection. So it contains
    both, and it is invertible wherever B is. It starts as the orthogonal map Q = BVᵀ.

    Args:
        map: How weights become V: `"householder"`, `"cayley"` or `"exp"`, see `OrthogonalDense`.
        margin: See `FactoredReflection`.
        eigenvalue_rate: See `FactoredReflection`.
        kernel_initializer: The matrix BVᵀ that the layer starts as: an orthogonal start as for `OrthogonalDense`, or any other
            initializer.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: Tensor of shape `(batch, ..., d)`.

    Output: A tensor of the same shape.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.flows import ReflectedDense
    >>> layer, x = ReflectedDense(), np.ones((2, 8), "float32")
    >>> np.allclose(layer.inverse(layer(x)), x, atol=1e-5)
    True
    """

    def __init__(
        self,
        map: str = "householder",
        margin: float = 0.1,
        eigenvalue_rate: float = 10.0,
        kernel_initializer: Initializer = "orthogonal",
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        super().__init__(**kwargs)
        require_floating(self, self.compute_dtype)
        common = {"dtype": self.dtype_policy, "trainable": self.trainable}
        self.reflection = FactoredReflection(
            map, "right", margin, _Start(map), eigenvalue_rate=eigenvalue_rate, name="reflection", **common
        )
        self.dense = _Rotated(map, kernel_initializer=kernel_initializer, name="dense", **common)
        self.supports_masking = True

    def build(self, input_shape: Shape) -> None:
        d = last_axis(self, input_shape)
        self.reflection.build(input_shape)
        self.dense.build(input_shape)
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: d})

    def call(self, inputs: Tensor) -> Tensor:
        return self.dense(self.reflection(as_input(self, inputs)))

    def forward_and_log_det(self, x: Tensor, training: bool | None = None) -> tuple[Tensor, Tensor]:
        """y and log|det ∂y/∂x|, from one pass."""
        h, first = self.reflection.forward_and_log_det(x)
        y, second = self.dense.forward_and_log_det(h)
        return y, first + second

    def inverse(self, y: Tensor) -> Tensor:
        """x = V g⁻¹(B⁻¹y)."""
        return self.reflection.inverse(self.dense.inverse(self._tensor(y, "inverse")))

    def inverse_parts(self) -> list[Invertible]:
        return [self.reflection, self.dense]

    def certificate(self) -> Certificate:
        """g is proven by its form; of B its condition is measured."""
        reflection, dense = self.reflection.certificate(), self.dense.certificate()
        if not (reflection.invertible and dense.invertible):
            return dense if reflection.invertible else reflection
        reason = f"{reflection.reason[:-1]}; B is {dense.reason.removeprefix('Proven: ')}"
        lipschitz, inverse_lipschitz = bounds_of(reflection).then(bounds_of(dense))
        return replace(reflection, reason=reason, lipschitz=lipschitz, inverse_lipschitz=inverse_lipschitz)

    def get_config(self) -> Config:
        return {
            **super().get_config(),
            "map": self.reflection.map,
            "margin": self.reflection.margin,
            "eigenvalue_rate": self.reflection.eigenvalue_rate,
            "kernel_initializer": keras.initializers.serialize(self.dense.kernel_initializer),
        }


class _Start(keras.initializers.Initializer):
    """Vᵀ at the start: one matrix for every size, because reflections train best away from the identity."""

    def __init__(self, map: str) -> None:
        self.map = map

    def __call__(self, shape: tuple[int, ...], dtype: DType | None = None) -> np.ndarray:
        return fixed_start(shape[0], self.map).T

    def get_config(self) -> Config:
        return {"map": self.map}


class _Rotated(InvertibleDense):
    """B, started so that BVᵀ is what was asked for."""

    def __init__(self, map: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.map = map

    def _initial_kernel(self, shape: tuple[int, ...], dtype: DType | None = None) -> Tensor:
        wanted = super()._initial_kernel(shape, dtype)
        return keras.ops.matmul(wanted, keras.ops.cast(fixed_start(shape[0], self.map), wanted.dtype))

    def get_config(self) -> Config:
        return {**super().get_config(), "map": self.map}
