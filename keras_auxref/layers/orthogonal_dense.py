"""An orthogonal matrix as a Keras layer: the maps that the auxiliary reflection replaces."""

import math
from typing import Unpack

import keras
import numpy as np

from keras_auxref import initializers, ops
from keras_auxref.certificate import Certificate, not_proven, orthogonal_bounds, proven
from keras_auxref.initializers import UniformFanIn
from keras_auxref.layers.checks import (
    as_input,
    at_least_float32,
    last_axis,
    require_built,
    require_floating,
)
from keras_auxref.layers.dense_like import DenseLike
from keras_auxref.layers.frozen import Freezable
from keras_auxref.lipschitz import activation_bounds
from keras_auxref.ops.cayley import cayley_inverse
from keras_auxref.ops.checks import is_concrete, whole_number_or_none
from keras_auxref.ops.householder_product import householder_matrix, householder_vectors
from keras_auxref.ops.matrix_exp import matrix_exp_inverse
from keras_auxref.ops.rows import map_rows
from keras_auxref.ops.stiefel import complete, stiefel_matrix, stiefel_vectors
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Activation, Config, DType, Initializer, LayerArguments, Regularizer, Shape, Tensor

_TO_MATRIX = {"householder": householder_matrix, "cayley": ops.cayley, "exp": ops.matrix_exp}
_FROM_MATRIX = {"cayley": cayley_inverse, "exp": matrix_exp_inverse}


@keras.saving.register_keras_serializable(PACKAGE)
class OrthogonalDense(Freezable, DenseLike):
    """A trainable orthogonal matrix on the last axis of its input: y = activation(U x + b).

        householder:  U = H(v₁) … H(v_k), v the columns of the weight        every U with det U = (−1)ᵏ for k = d
        cayley:       U = (I + K/2)⁻¹ (I − K/2), K = (A − Aᵀ)/2              every U without eigenvalue −1
        exp:          U = exp(K), K = (A − Aᵀ)/2                             every U with det U = 1

    U stays orthogonal up to rounding, ‖UᵀU − I‖ ≤ 1e-5·√d in float32, after any number of training steps.

    With `units` ≠ d it is part of an orthogonal matrix: its first rows for units < d (orthonormal rows, a contraction,
    ‖Ux‖ ≤ ‖x‖), its first columns for units > d (orthonormal columns, an isometry, ‖Ux‖ = ‖x‖). k = min(d, units) Householder
    reflections reach every such matrix, with k·max(d, units) weights and as much work per vector. `"cayley"` and
    `"exp"` compute the whole square matrix, of size max(d, units), so use them for small sizes.

    Without activation and with `units` = d there is an inverse, Uᵀ(y − b).

    Args:
        map: `"householder"`, `"cayley"` or `"exp"`.
        reflections: The number k of Householder reflections, 1 ≤ k ≤ min(d, units), which is the default. Only for
            `"householder"`.
        kernel_initializer: An orthogonal start, U = Q: `initializers.ReflectionOf(Q)` as for `AuxReflection`, an orthogonal
            array, or an initializer of orthogonal matrices (any `initializers.OrthogonalMatrix`, `"cayley"`, `"henaff"`,
            `"fixed_point_free"`, Keras' `"orthogonal"` and `"identity"`). The Householder vectors of Q are found by QR. Any
            other initializer makes the weight itself, of shape (m, k) or (m, m), m = max(d, units). The default is the paper's:
            weights U(−1/√m, 1/√m). For `units` ≠ d an array of shape (units, d) with orthonormal rows or columns also works,
            as do Keras' `"orthogonal"` and `"identity"`; of a square matrix the first rows or columns are used.
        kernel_regularizer: Keras regularizer for the weight.
        units: Positive integer, the size of the last axis of the output; by default that of the input.
        activation: Keras activation.
        use_bias: Whether to add b.
        bias_initializer: Keras initializer for b.
        bias_regularizer: Keras regularizer for b.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: Tensor of shape `(batch, ..., d)`.

    Output: A tensor of shape `(batch, ..., units)`.

    Example:
    >>> import numpy as np
    >>> from keras_auxref import OrthogonalDense
    >>> layer = OrthogonalDense("exp")
    >>> x = np.ones((2, 8), "float32")
    >>> np.allclose(layer.inverse(layer(x)), x, atol=1e-6)
    True
    >>> longer = OrthogonalDense(units=20)(x)
    >>> np.allclose(np.linalg.norm(longer, axis=-1), np.linalg.norm(x, axis=-1))
    True

    Reference: Mathiasen et al., "What if Neural Networks had SVDs?", NeurIPS 2020; Helfrich et al., "Orthogonal Recurrent Neural
    Networks with Scaled Cayley Transform", ICML 2018; Lezcano-Casado & Martínez-Rubio, "Cheap Orthogonal Constraints", ICML 2019.
    """

    constant_jacobian = True

    def __init__(
        self,
        map: str = "householder",
        reflections: int | None = None,
        kernel_initializer: Initializer | None = None,
        kernel_regularizer: Regularizer | None = None,
        units: int | None = None,
        activation: Activation | None = None,
        use_bias: bool = False,
        bias_initializer: Initializer = "zeros",
        bias_regularizer: Regularizer | None = None,
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        super().__init__(units, activation, use_bias, bias_initializer, bias_regularizer, **kwargs)
        require_floating(self, self.compute_dtype)
        if map not in _TO_MATRIX:
            raise ValueError(f"Unknown map to orthogonal matrices. Expected one of {sorted(_TO_MATRIX)}. Received: {map!r}")
        if reflections is not None and map != "householder":
            raise ValueError(
                f'`reflections` counts Householder reflections. Expected map="householder". Received: map={map!r}, '
                f"reflections={reflections}"
            )
        self.map, self.reflections = map, whole_number_or_none("reflections", reflections)
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)

    def build(self, input_shape: Shape) -> None:
        d = last_axis(self, input_shape)
        units = self.units or d
        least, most = min(d, units), max(d, units)
        if self.reflections is not None and self.reflections > least:
            raise ValueError(
                f"More reflections than dimensions add nothing. Expected 1 ≤ reflections ≤ {least}. Received: {self.reflections}"
            )
        self._shape = (units, d)
        # Without autocast U is computed in the precision of the weight, also in mixed precision.
        self.kernel = self.add_weight(
            name="kernel",
            shape=(most, self.reflections or least if self.map == "householder" else most),
            initializer=self._initial_kernel,
            regularizer=self.kernel_regularizer,
            autocast=False,
        )
        self._build_bias(d)

    def _initial_kernel(self, shape: tuple[int, ...], dtype: DType | None = None) -> Tensor:
        m, k = shape
        if self.kernel_initializer is None:
            # U(−1/√m, 1/√m) also for k < m columns.
            return keras.ops.transpose(UniformFanIn()((k, m), dtype=dtype))
        start = initializers.orthogonal_start(self.kernel_initializer)
        if start is not None:
            started = self._weight_of(start, m, k, keras.backend.standardize_dtype(dtype))
            return keras.ops.convert_to_tensor(started, dtype=dtype)
        weight = self.kernel_initializer(shape, dtype=dtype)
        if self.map == "householder" and is_concrete(weight):
            self._require_nonzero(keras.ops.convert_to_numpy(weight))
        return weight

    def _weight_of(self, start: initializers.Source, m: int, k: int, dtype: str) -> np.ndarray:
        """The weight for which U is the given orthogonal start."""
        units, d = self._shape
        if units == d:
            q = initializers.orthogonal_matrix(start, d, dtype)
            return householder_vectors(q, k) if self.map == "householder" else _FROM_MATRIX[self.map](q)
        if self.map != "householder" and isinstance(start, initializers.OrthogonalMatrix):
            return _FROM_MATRIX[self.map](initializers.orthogonal_matrix(start, m, dtype))
        q = initializers.orthonormal_matrix(start, self._shape, dtype)
        columns = q if units > d else q.T
        if self.map != "householder":
            u = complete(columns)
            return _FROM_MATRIX[self.map](u if units > d else u.T)
        if k < min(self._shape):
            raise ValueError(
                f"Fewer reflections cannot start as any matrix. Expected reflections={min(self._shape)} or no orthogonal "
                f"`kernel_initializer`. Received: reflections={k}"
            )
        vectors = stiefel_vectors(columns)
        return vectors if units > d else vectors[:, ::-1]  # the rows of U are the columns of Uᵀ = H(v_k)…H(v₁)

    def _require_nonzero(self, vectors: np.ndarray) -> None:
        """Refuses zero columns: they are not reflections, and with a zero gradient they never become one."""
        zeros = int((np.abs(vectors).max(axis=0) == 0).sum())
        if zeros and len(vectors) > 1:
            raise ValueError(
                "Householder vectors of zero never train. Expected a `kernel_initializer` without columns of zero. Received: "
                f"{zeros} of {vectors.shape[1]} columns are zero, from {type(self.kernel_initializer).__name__}"
            )

    def call(self, inputs: Tensor) -> Tensor:
        return self.activation(self._with_bias(self._forward(as_input(self, inputs))))

    @property
    def matrix(self) -> Tensor:
        """U as a tensor of shape (units, d), computed from the trainable weight."""
        require_built(self, "matrix")
        return self.once("matrix", self._matrix)

    def _matrix(self) -> Tensor:
        weight, (units, d) = at_least_float32(self.kernel), self._shape
        if self.map != "householder" or units == d:
            return _TO_MATRIX[self.map](weight)[:units, :d]
        if units > d:
            return stiefel_matrix(weight, d)
        return keras.ops.transpose(stiefel_matrix(keras.ops.flip(weight, axis=1), units))

    def inverse(self, y: Tensor) -> Tensor:
        """x = Uᵀ(y − b), with U x + b = y. Needs `units` = d and no activation."""
        self._require_invertible("inverse")
        y = self._without_bias(keras.ops.convert_to_tensor(y, dtype=self.compute_dtype))
        if self._reflects(y):
            # The reflections are their own inverses: Uᵀ = H(v_k)…H(v₁).
            return ops.householder_product(keras.ops.flip(at_least_float32(self.kernel), axis=1), y)
        u = keras.ops.cast(self.matrix, y.dtype)
        return map_rows(lambda rows: keras.ops.matmul(rows, u), y)

    def inverse_output_shape(self, output_shape: Shape) -> Shape:
        units, d = self._shape if self.built else (None, None)
        return output_shape if units == d else (*output_shape[:-1], d)

    def log_det_jacobian(self, x: Tensor) -> Tensor:
        """log|det U| = 0 for every vector on the last axis of x, shape `(batch, ...)`. Needs what `inverse` needs."""
        self._require_invertible("log_det_jacobian")
        return keras.ops.zeros_like(keras.ops.convert_to_tensor(x, dtype=self.compute_dtype)[..., 0])

    def certificate(self) -> Certificate:
        """Orthogonal by construction, if the weights are finite and ‖UᵀU − I‖ of the U in use is within rounding.

        A map between spaces of different dimensions is not a bijection; `reason` then states that it is an isometry or a
        contraction, if that is proven. With an activation nothing is proven about invertibility.
        """
        require_built(self, "certificate")
        weights = [self.kernel] if self.bias is None else [self.kernel, self.bias]
        if not all(np.isfinite(_float64(weight)).all() for weight in weights):
            return not_proven("the weight has entries that are not finite")
        u = _float64(keras.ops.cast(self.matrix, self.compute_dtype))
        units, d = self._shape
        thin = u if units >= d else u.T
        defect = float(np.linalg.norm(thin.T @ thin - np.eye(min(self._shape))))
        if not defect < 0.5:  # below 1 it proves that U is invertible and that Uᵀ is close to its inverse
            return not_proven(f"rounding takes the matrix away from an orthogonal one, ‖UᵀU − I‖ = {defect:.2g}")
        bounds = orthogonal_bounds(u).then(activation_bounds(self.activation))
        obstacle = self._obstacle()
        if obstacle is None:
            return proven(f"orthogonal by construction (map {self.map!r}, ‖UᵀU − I‖ = {defect:.2g})", 1.0, bounds)
        if units == d:
            return not_proven(f"{obstacle}; what comes before it is orthogonal (‖UᵀU − I‖ = {defect:.2g})", bounds)
        kind = "isometry, ‖Ux‖ = ‖x‖ (‖UᵀU − I‖" if units > d else "contraction, ‖Ux‖ ≤ ‖x‖ (‖UUᵀ − I‖"
        what = f"by construction it is linear and {'an' if units > d else 'a'} {kind} = {defect:.2g})"
        return not_proven(f"{obstacle}; {what}", bounds)

    def condense(self) -> keras.layers.Dense:
        """A copy as a plain `keras.layers.Dense` that computes the current y = activation(U x + b), for inference."""
        return self._condensed(keras.ops.convert_to_numpy(self.matrix))

    def _forward(self, x: Tensor) -> Tensor:
        units, d = self._shape
        if not self._reflects(x):
            transposed = keras.ops.transpose(keras.ops.cast(self.matrix, x.dtype))
            return map_rows(lambda rows: keras.ops.matmul(rows, transposed), x)
        if units > d:
            x = keras.ops.pad(x, [[0, 0]] * (len(x.shape) - 1) + [[0, units - d]])
        y = ops.householder_product(at_least_float32(self.kernel), x)
        return y[..., :units] if units < d else y

    def _reflects(self, x: Tensor) -> bool:
        """Whether to apply the reflections block by block instead of forming their matrix."""
        if self.map != "householder" or self.is_frozen:
            return False
        # For a square map `householder_product` decides. A thin matrix is cheap, and pays off for at least twice as many rows.
        return self._shape[0] == self._shape[1] or math.prod(n or 1 for n in x.shape[:-1]) < 2 * min(self._shape)

    def get_config(self) -> Config:
        return {
            **super().get_config(),
            "map": self.map,
            "reflections": self.reflections,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
        }


def _float64(x: Tensor) -> np.ndarray:
    return keras.ops.convert_to_numpy(x).astype(np.float64)
