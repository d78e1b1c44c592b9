"""A square matrix in the form of its QR decomposition, and the same with an auxiliary reflection in place of Q."""

import math
from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import keras
import numpy as np

from keras_auxref import initializers
from keras_auxref.certificate import Certificate, bounds_of, linear_bounds, not_proven, proven
from keras_auxref.invertible import Invertible
from keras_auxref.layers.checks import as_input, at_least_float32, last_axis, require_built, require_floating
from keras_auxref.layers.factored_reflection import FactoredReflection
from keras_auxref.layers.orthogonal_dense import OrthogonalDense
from keras_auxref.ops.rows import map_rows
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, Initializer, LayerArguments, Regularizer, Shape, Tensor

ROTATIONS = ("householder", "factored")

T = TypeVar("T")


@keras.saving.register_keras_serializable(PACKAGE)
class QRDense(Invertible, keras.layers.Layer):
    """A square map with a triangular factor on the last axis: y = Q R x, log|det ∂y/∂x| = Σ log R_ii.

        householder:  y = Q (R x),   Q = H(v₁) … H(v_k)
        factored:     y = R f(x),    f a `FactoredReflection`, whose log-determinant is added

    R is upper triangular with the positive diagonal exp(ℓ), so the layer is invertible for all weights: x comes from a
    triangular solve. It starts at R = I, as an orthogonal map.

    Args:
        rotation: `"householder"`, an orthogonal matrix, or `"factored"`, an auxiliary reflection instead.
        reflections: The number k of Householder reflections; by default d. Only for `"householder"`.
        kernel_initializer: The orthogonal start, see `OrthogonalDense`; by default random.
        kernel_regularizer: Keras regularizer for the weights of the rotation and for the entries of R above the diagonal.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: Tensor of shape `(batch, ..., d)`.

    Output: A tensor of the same shape. Half precision is computed in float32.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.flows import QRDense
    >>> layer, x = QRDense(), np.ones((2, 8), "float32")
    >>> np.allclose(layer.inverse(layer(x)), x, atol=1e-5)
    True

    Reference: Hoogeboom, van den Berg & Welling, "Emerging Convolutions for Generative Normalizing Flows", ICML 2019.
    """

    def __init__(
        self,
        rotation: str = "householder",
        reflections: int | None = None,
        kernel_initializer: Initializer = "orthogonal",
        kernel_regularizer: Regularizer | None = None,
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        super().__init__(**kwargs)
        require_floating(self, self.compute_dtype)
        if rotation not in ROTATIONS:
            raise ValueError(f"Unknown rotation. Expected one of {list(ROTATIONS)}. Received: {rotation!r}")
        if rotation == "factored" and reflections is not None:
            raise ValueError(
                '`reflections` counts Householder reflections. Expected rotation="householder". Received: '
                f"rotation={rotation!r}, reflections={reflections}"
            )
        self.rotation, self.reflections = rotation, reflections
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        common = {
            "kernel_initializer": self.kernel_initializer,
            "kernel_regularizer": self.kernel_regularizer,
            "dtype": "float64" if self.compute_dtype == "float64" else "float32",
            "name": "rotation",
        }
        self.rotate: OrthogonalDense | FactoredReflection = OrthogonalDense(reflections=reflections, **common)
        if rotation == "factored":
            self.rotate = FactoredReflection(**common)
        self.upper: Any = None
        self.supports_masking = True

    def build(self, input_shape: Shape) -> None:
        d = last_axis(self, input_shape)
        self.rotate.build(input_shape)
        if d > 1:
            self.upper = self.add_weight(
                name="upper",
                shape=(d * (d - 1) // 2,),
                initializer="zeros",
                regularizer=self.kernel_regularizer,
                autocast=False,
            )
        self.log_diagonal = self.add_weight(name="log_diagonal", shape=(d,), initializer="zeros", autocast=False)
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: d})

    @property
    def triangle(self) -> Tensor:
        """R as a tensor of shape (d, d), in float32 at least."""
        require_built(self, "triangle")
        diagonal = keras.ops.diag(keras.ops.exp(at_least_float32(self.log_diagonal)))
        if self.upper is None:
            return diagonal
        d = diagonal.shape[0]
        # Entry 0 is a zero, for everything that is not above the diagonal.
        position = np.zeros((d, d), "int32")
        position[np.triu_indices(d, 1)] = np.arange(1, d * (d - 1) // 2 + 1)
        upper = at_least_float32(self.upper)
        return diagonal + keras.ops.take(keras.ops.concatenate([keras.ops.zeros_like(upper[:1]), upper]), position)

    def call(self, inputs: Tensor) -> Tensor:
        inputs = as_input(self, inputs)
        return keras.ops.cast(self._forward(inputs, lambda x: (self.rotate(x), 0.0))[0], inputs.dtype)

    def _forward(self, x: Tensor, rotate: Callable[[Tensor], tuple[Tensor, T]]) -> tuple[Tensor, T]:
        """(y, the log-determinant that `rotate` returns)."""
        triangle = keras.ops.transpose(self.triangle)
        x = keras.ops.cast(x, triangle.dtype)
        if self.rotation == "householder":
            return rotate(keras.ops.matmul(x, triangle))
        y, log_det = rotate(x)
        return keras.ops.matmul(y, triangle), log_det

    def forward_and_log_det(self, x: Tensor, training: bool | None = None) -> tuple[Tensor, Tensor]:
        """(y, Σ log R_ii), with the log-determinant of f where there is one."""
        x = self._tensor(x, "forward_and_log_det")
        y, log_det = self._forward(x, self.rotate.forward_and_log_det)
        log_det = log_det + keras.ops.sum(at_least_float32(self.log_diagonal))
        return keras.ops.cast(y, self.compute_dtype), keras.ops.cast(log_det, self.compute_dtype)

    def inverse(self, y: Tensor) -> Tensor:
        """x = R⁻¹Qᵀy or f⁻¹(R⁻¹y), by a triangular solve."""
        y, triangle = self._tensor(y, "inverse"), self.triangle
        x = keras.ops.cast(y, triangle.dtype)
        steps = [lambda x: map_rows(lambda rows: _solve(triangle, rows), x), self.rotate.inverse]
        for step in steps if self.rotation == "factored" else reversed(steps):
            x = step(x)
        return keras.ops.cast(x, self.compute_dtype)

    def certificate(self) -> Certificate:
        """Proven where the rotation is and R has finite entries and a diagonal that is not zero after rounding."""
        require_built(self, "certificate")
        triangle = keras.ops.convert_to_numpy(self.triangle).astype(np.float64)
        if not (np.isfinite(triangle).all() and (np.diag(triangle) > 0).all()):
            return not_proven("R has entries that are not finite, or a zero on its diagonal")
        certificate = self.rotate.certificate()
        if not certificate.invertible:
            return certificate
        condition = float(np.linalg.cond(triangle)) if self.rotation == "householder" else math.nan
        bounds = linear_bounds(triangle).then(bounds_of(certificate))
        return proven("the rotation is a bijection, and R is triangular with a positive diagonal", condition, bounds)

    def inverse_parts(self) -> list[Invertible]:
        return [self.rotate]

    def get_config(self) -> Config:
        return {
            **super().get_config(),
            "rotation": self.rotation,
            "reflections": self.reflections,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
        }


def _solve(triangle: Tensor, rows: Tensor) -> Tensor:
    return keras.ops.transpose(keras.ops.solve_triangular(triangle, keras.ops.transpose(rows), lower=False))
