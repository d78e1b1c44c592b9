"""The factored reflection as a Keras layer."""

import math
from collections.abc import Callable
from typing import Any, Self, Unpack

import keras
import numpy as np

from keras_auxref import initializers
from keras_auxref.certificate import Certificate, condition_for, not_proven, orthogonal_bounds, reflection_bounds
from keras_auxref.initializers import ReflectionOf
from keras_auxref.invertible import Invertible
from keras_auxref.kernels.base import require_alone
from keras_auxref.layers.checks import as_input, last_axis, require_built, require_floating
from keras_auxref.layers.frozen import Freezable
from keras_auxref.layers.orthogonal_dense import OrthogonalDense
from keras_auxref.ops import backend
from keras_auxref.ops.backend import outside_graphs
from keras_auxref.ops.diagonal import coefficient, diagonal_inverse, diagonal_reflect, diagonal_reflect_and_log_det
from keras_auxref.ops.matrix_exp import matrix_exp, matrix_exp_inverse
from keras_auxref.ops.rows import epsilon, map_rows
from keras_auxref.ops.skew import determinant
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, Initializer, LayerArguments, Regularizer, Shape, Tensor

SIDES = ("both", "left", "right")
SMALLEST_MARGIN = 1e-5
_FORM_MATRICES_UP_TO = 128
_LEAST_ABOVE_ONE = {"float32": 2e-3, "float64": 1e-9}  # above every ‖UᵀU − I‖ that was seen, also for almost equal vectors


@keras.saving.register_keras_serializable(PACKAGE)
class FactoredReflection(Freezable, Invertible, keras.layers.Layer):
    """y = U g(Vᵀx) on the last axis of its input, with learned orthogonal U and V: provably invertible for all weights.

        g(a) = (cλ − 1) ∘ a,      c = 2 Σ λᵢaᵢ² / Σ λᵢ²aᵢ²,      λᵢ = 2^(½ (1 − margin) tanh(α ρᵢ))

    This is the auxiliary reflection of the symmetric W = V diag(λ) Vᵀ, stored as its eigendecomposition, followed by the
    orthogonal map −UVᵀ. By construction κ = max λ / min λ ≤ 2^(1 − margin) < 2, so it is a bijection. It contains every
    orthogonal map (λ = 1), preserves norms, and nothing is ever factored: the log-determinant is a few sums, the inverse a fixed
    number of Newton steps on a scalar. Runs on every Keras backend, and compiles under XLA.

    Args:
        map: How weights become U and V: `"householder"`, `"cayley"` or `"exp"`, see `OrthogonalDense`.
        sides: `"both"`; `"left"` for y = U g(x); or `"right"` for y = g(Vᵀx). With one side the cost is halved, and every
            orthogonal map is still included.
        margin: Number in (0, 1), by default 0.1: the distance kept from κ = 2. A larger margin means fewer steps of the inverse
            (4 in float32 from 0.09 on, 3 from 0.28 on) and a smaller family.
        kernel_initializer: The orthogonal map Q that the layer starts as, with λ = 1: an orthogonal array, an initializer of
            orthogonal matrices (`"cayley"`, `"orthogonal"`, …), or `initializers.ReflectionOf` one of these. By default
            random. The maps `"cayley"` and `"exp"` reach only rotations, det Q = 1.
        kernel_regularizer: Keras regularizer for the weights of U and V.
        eigenvalue_rate: The number α > 0: how fast λ trains relative to the other weights. One step of Adam at a rate r moves α ρ
            by about α·r; with α = 1, λ would need hundreds of steps to leave 1. Files of version 0.2 load with α = 1.
        lipschitz: Number L in (1, 3), instead of `margin`: the layer increases no distance by more than the factor L. This
            sets κ ≤ (L + 1)/2, minus room for the rounding errors of U and V; measuring these costs one matrix product each. The
            certificate then has `lipschitz` ≤ L for all weights.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: Tensor of shape `(batch, ..., d)`.

    Output: A tensor of the same shape. Half precision is computed in float32.

    Example:
    >>> import numpy as np
    >>> from keras_auxref import FactoredReflection
    >>> layer = FactoredReflection()
    >>> x = np.random.default_rng(0).normal(size=(2, 8)).astype("float32")
    >>> np.allclose(layer.inverse(layer(x)), x, atol=1e-5)
    True
    >>> layer.certificate().invertible
    True
    """

    def __init__(
        self,
        map: str = "householder",
        sides: str = "both",
        margin: float | None = None,
        kernel_initializer: Initializer | None = None,
        kernel_regularizer: Regularizer | None = None,
        eigenvalue_rate: float = 10.0,
        lipschitz: float | None = None,
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        super().__init__(**kwargs)
        require_floating(self, self.compute_dtype)
        if isinstance(eigenvalue_rate, bool) or not isinstance(eigenvalue_rate, int | float) or not 0 < eigenvalue_rate < 1e6:
            raise ValueError(f"`eigenvalue_rate` must be a positive number. Expected 0 < a < 1e6. Received: {eigenvalue_rate!r}")
        self.eigenvalue_rate = float(eigenvalue_rate)
        if sides not in SIDES:
            raise ValueError(f"Unknown sides. Expected one of {list(SIDES)}. Received: {sides!r}")
        OrthogonalDense(map)  # raises an error for unknown maps
        self.map, self.sides, self.lipschitz = map, sides, lipschitz
        self.margin = (
            checked_margin(0.1 if margin is None else margin) if lipschitz is None else self._margin_for(lipschitz, margin)
        )
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.supports_masking = True
        self.left_map: Any = None
        self.right_map: Any = None

    def _margin_for(self, lipschitz: float, margin: float | None) -> float:
        """The margin without room for rounding, which `eigenvalues` adds."""
        require_alone("margin", margin, lipschitz)
        condition = condition_for(lipschitz)
        least = 1 + _LEAST_ABOVE_ONE[self._working_dtype]
        if not lipschitz > least:
            raise ValueError(
                f"Rounding alone may take more than that in {self._working_dtype}. Expected lipschitz > {least:.9g}. "
                f"Received: lipschitz={lipschitz}"
            )
        return max(1 - math.log2(condition), SMALLEST_MARGIN)

    @property
    def condition(self) -> float:
        """The bound 2^(1 − margin) on κ."""
        return 2 ** (1 - self.margin)

    @property
    def _working_dtype(self) -> str:
        """The precision of the weights and of the computation: the proof needs float32 at least."""
        return "float64" if self.variable_dtype == "float64" else "float32"

    def build(self, input_shape: Shape) -> None:
        d = last_axis(self, input_shape)
        with outside_graphs():  # a model may be built while its training step is traced
            u, v = _split(self._start(d), self.map, self.sides)
        self.left_map = self._orthogonal("left", u, d)
        self.right_map = self._orthogonal("right", v, d)
        self.exponents = self.add_weight(
            name="exponents", shape=(d,), initializer="zeros", dtype=self._working_dtype, autocast=False
        )
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: d})

    def _start(self, d: int) -> np.ndarray:
        start = self.kernel_initializer
        source = keras.initializers.Orthogonal() if start is None else initializers.orthogonal_start(start)
        source = start if source is None else source  # an error follows if its matrix is not orthogonal
        q = initializers.orthogonal_matrix(source, d, self._working_dtype)
        if start is None and self.map != "householder" and determinant(q) < 0:
            q[:, 0] = -q[:, 0]
        return q

    def _orthogonal(self, side: str, matrix: np.ndarray | None, d: int) -> OrthogonalDense | None:
        if matrix is None:
            return None
        layer = OrthogonalDense(
            self.map,
            kernel_initializer=ReflectionOf(matrix),
            kernel_regularizer=self.kernel_regularizer,
            dtype=self._working_dtype,
            name=side,
        )
        layer.build((None, d))
        return layer

    def call(self, inputs: Tensor) -> Tensor:
        return self._between(lambda a, scales: (diagonal_reflect(a, scales),), as_input(self, inputs))[0]

    def forward_and_log_det(self, x: Tensor, training: bool | None = None) -> tuple[Tensor, Tensor]:
        """y and log|det ∂y/∂x|, from one pass."""
        x = self._tensor(x, "forward_and_log_det")
        y, log_det = self._between(diagonal_reflect_and_log_det, x)
        return y, log_det

    def inverse(self, y: Tensor) -> Tensor:
        """x = V g⁻¹(Uᵀy), up to rounding: see `ops.factored_inverse`."""
        y = self._tensor(y, "inverse")
        return self._between(lambda b, scales: (diagonal_inverse(b, scales, self.condition),), y, inverse=True)[0]

    def _between(self, function: Callable[..., tuple[Tensor, ...]], x: Tensor, inverse: bool = False) -> tuple[Tensor, ...]:
        """U function(Vᵀx) or, for the inverse, V function(Uᵀx), with whatever else the function returns."""
        first, last = (self.left_map, self.right_map) if inverse else (self.right_map, self.left_map)
        scales = self.eigenvalues
        if self._applies_reflections(x.shape):
            transpose, multiply = (None if first is None else first.inverse), last
        else:
            transpose, multiply = _transposed_by(first), _multiplied_by(last)

        def compute(rows: Tensor) -> tuple[Tensor, ...]:
            h, *more = function(rows if transpose is None else transpose(rows), scales)
            return (h if multiply is None else multiply(h), *more)

        return map_rows(compute, x, self._working_dtype)

    def _applies_reflections(self, shape: Shape) -> bool:
        """Whether to apply reflections to rows, block by block, instead of forming the matrices: for few rows and large d."""
        if self.map != "householder" or self.is_frozen:
            return False
        d, rows = shape[-1] or 0, math.prod(n or 0 for n in shape[:-1])  # 0 where it is not known
        return d > _FORM_MATRICES_UP_TO and rows < 2 * d

    @property
    def left(self) -> Tensor:
        """U as a tensor of shape (d, d)."""
        return self._matrix(self.left_map, "left")

    @property
    def right(self) -> Tensor:
        """V as a tensor of shape (d, d)."""
        return self._matrix(self.right_map, "right")

    def _matrix(self, layer: OrthogonalDense | None, name: str) -> Tensor:
        require_built(self, name)
        return keras.ops.eye(self.exponents.shape[0], dtype=self._working_dtype) if layer is None else layer.matrix

    @property
    def eigenvalues(self) -> Tensor:
        """λ as a tensor of shape (d,), between 2^(−(1 − margin)/2) and 2^((1 − margin)/2)."""
        require_built(self, "eigenvalues")
        return self.once("eigenvalues", self._compute_eigenvalues)

    def _compute_eigenvalues(self) -> Tensor:
        reach = 0.5 * (1 - self.margin) * math.log(2) if self.lipschitz is None else self._reach_within(self.lipschitz)
        rho = keras.ops.convert_to_tensor(self.exponents)
        scales = keras.ops.exp(reach * backend.tanh(self.eigenvalue_rate * rho))
        return keras.ops.where(keras.ops.isfinite(rho), scales, float("nan"))  # an infinite weight means that training failed

    def _reach_within(self, lipschitz: float) -> Tensor:
        """½ log κ for the largest κ that guarantees L, with U and V including their rounding errors:

            √(1 + δ_U) (2κ − 1) √(1 + δ_V) ≤ L,      δ_U = ‖UᵀU − I‖_F

        minus a few ε for the rounding of λ, and of δ where there is no float64.
        """
        d, wide, stretch = self.exponents.shape[0], backend.wide_dtype(), 1.0
        for layer in (self.left_map, self.right_map):
            if layer is not None:
                u = keras.ops.stop_gradient(keras.ops.cast(layer.matrix, wide))
                defect = keras.ops.transpose(u) @ u - keras.ops.eye(d, dtype=wide)
                stretch = stretch * keras.ops.sqrt(1 + keras.ops.sqrt(keras.ops.sum(keras.ops.square(defect))))
        room = 32 * (epsilon(self._working_dtype) + d * epsilon(wide))
        condition = keras.ops.clip((lipschitz / stretch + 1) * (0.5 - 0.5 * room), 1.0, self.condition)
        return 0.5 * keras.ops.log(keras.ops.cast(condition, self._working_dtype))

    @property
    def kernel(self) -> Tensor:
        """W = V diag(λ) Vᵀ of shape (d, d), the matrix of the auxiliary reflection H(Wx) x = −VUᵀy in this layer."""
        v = self.right
        return (v * self.eigenvalues) @ keras.ops.transpose(v)

    def coefficient(self, x: Tensor) -> Tensor:
        """c(x) = 2 Σ λᵢaᵢ² / Σ λᵢ²aᵢ², a = Vᵀx, for every vector on the last axis: 2 where λ = 1."""
        x = self._tensor(x, "coefficient")
        return map_rows(lambda rows: coefficient(rows @ self.right, self.eigenvalues), x, self._working_dtype)

    def certificate(self) -> Certificate:
        """What is proven for the current weights: κ is read off λ, and U and V are checked to be finite and invertible.

        Nothing is factored. λ, U and V are the values that the layer computes with, after rounding: for ‖UᵀU − I‖ < 1 and
        ‖VᵀV − I‖ < 1 both matrices are invertible, and for κ < 2 so is g.
        """
        require_built(self, "certificate")
        scales, u, v = (_float64(t) for t in (self.eigenvalues, self.left, self.right))
        if not all(np.isfinite(t).all() for t in (scales, u, v)):
            return not_proven("the weights have entries that are not finite")
        defect = max(float(np.linalg.norm(m.T @ m - np.eye(len(m)))) for m in (u, v))
        if not defect < 0.5:
            return not_proven(f"rounding takes U or V away from an orthogonal matrix, ‖UᵀU − I‖ = {defect:.2g}")
        low, high = float(scales.min()), float(scales.max())
        if not 0 < high < 2 * low:
            return not_proven(f"max λ / min λ = {high:.6g} / {low:.6g} is not below 2")
        reason = f"Proven: U and V are orthogonal to {defect:.2g}, and κ = max λ / min λ = {high / low:.6g} < 2."
        bounds = orthogonal_bounds(v).then(reflection_bounds(low, high)).then(orthogonal_bounds(u))
        return Certificate(True, high / low, (2 / high, 2 / low), reason, *bounds)

    def get_config(self) -> Config:
        return {
            **super().get_config(),
            "map": self.map,
            "sides": self.sides,
            "margin": self.margin if self.lipschitz is None else None,
            "lipschitz": self.lipschitz,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "eigenvalue_rate": self.eigenvalue_rate,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(**{"eigenvalue_rate": 1.0, **config})  # the value in version 0.2, which did not save it


def checked_margin(margin: float) -> float:
    """The distance kept from κ = 2, checked to allow an inverse."""
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not SMALLEST_MARGIN <= margin < 1:
        raise ValueError(f"`margin` must lie in (0, 1). Expected {SMALLEST_MARGIN} <= margin < 1. Received: {margin!r}")
    return float(margin)


def fixed_start(d: int, map: str) -> np.ndarray:
    """A random orthogonal matrix, the same at every call, that the map reaches: det = (−1)ᵈ for d reflections, else 1."""
    v = np.linalg.qr(np.random.default_rng(d).normal(size=(d, d)))[0]
    if determinant(v) != ((-1) ** d if map == "householder" else 1):
        v[:, 0] = -v[:, 0]
    return v


def _split(q: np.ndarray, map: str, sides: str) -> tuple[np.ndarray | None, np.ndarray | None]:
    """U and V with UVᵀ = Q, None for the identity."""
    if sides == "left":
        return q, None
    if sides == "right":
        return None, q.T
    if map == "householder":
        # Reflections train best away from the identity.
        v = fixed_start(len(q), map)
        return q @ v, v
    # Each takes half of Q, so that both are as close to the identity as possible: Q = exp(K), U = exp(K/2) = Vᵀ.
    u = _float64(matrix_exp(0.5 * matrix_exp_inverse(q)))
    return u, u.T


def _transposed_by(layer: OrthogonalDense | None) -> Callable[[Tensor], Tensor] | None:
    if layer is None:
        return None
    matrix = layer.matrix
    return lambda rows: rows @ matrix


def _multiplied_by(layer: OrthogonalDense | None) -> Callable[[Tensor], Tensor] | None:
    if layer is None:
        return None
    matrix = keras.ops.transpose(layer.matrix)
    return lambda rows: rows @ matrix


def _float64(x: Tensor) -> np.ndarray:
    return keras.ops.convert_to_numpy(x).astype(np.float64)
