"""An orthogonal matrix as a Keras layer: the maps that the auxiliary reflection replaces."""

from typing import Any

import keras
import numpy as np

from keras_auxref import initializers, ops
from keras_auxref._keras import PACKAGE
from keras_auxref.initializers import UniformFanIn
from keras_auxref.invertible import Invertible
from keras_auxref.kernels.certificate import Certificate, not_proven, proven
from keras_auxref.layers._checks import as_input, at_least_float32, last_axis, require_built, require_floating
from keras_auxref.layers._frozen import Freezable
from keras_auxref.ops._checks import is_concrete
from keras_auxref.ops._rows import map_rows
from keras_auxref.ops.cayley import cayley_inverse
from keras_auxref.ops.householder_product import householder_matrix, householder_vectors
from keras_auxref.ops.matrix_exp import matrix_exp_inverse
from keras_auxref.typing import Shape, Tensor

_TO_MATRIX = {"householder": householder_matrix, "cayley": ops.cayley, "exp": ops.matrix_exp}
_FROM_MATRIX = {"cayley": cayley_inverse, "exp": matrix_exp_inverse}


@keras.saving.register_keras_serializable(PACKAGE)
class OrthogonalDense(Freezable, Invertible, keras.layers.Layer):
    """A trainable orthogonal matrix on the last axis of its input: y = U x.

        householder:  U = H(v₁) … H(v_k), v the columns of the weight        every U with det U = (−1)ᵏ for k = d
        cayley:       U = (I + K/2)⁻¹ (I − K/2), K = (A − Aᵀ)/2              every U without eigenvalue −1
        exp:          U = exp(K), K = (A − Aᵀ)/2                             every U with det U = 1

    U stays orthogonal to rounding, ‖UᵀU − I‖ ≤ 1e-5·√d in float32, after any number of training steps.

    Args:
        map: `"householder"`, `"cayley"` or `"exp"`.
        reflections: The number k of Householder reflections, 1 ≤ k ≤ d; by default d. Only for `"householder"`.
        kernel_initializer: An orthogonal start, U = Q: `initializers.ReflectionOf(Q)` as for `AuxReflection`, an orthogonal
            array, or an initializer of orthogonal matrices (any `initializers.OrthogonalMatrix`, `"cayley"`, `"henaff"`,
            `"fixed_point_free"`, Keras' `"orthogonal"` and `"identity"`). The Householder vectors of Q are found by QR. Any
            other initializer makes the weight itself, of shape (d, k) or (d, d). The default is the paper's: weights
            U(−1/√d, 1/√d).
        kernel_regularizer: Keras regularizer for the weight.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: Tensor of shape `(batch, ..., d)`.

    Output: A tensor of the same shape.

    Example:
    >>> import numpy as np
    >>> layer = OrthogonalDense("exp")
    >>> x = np.ones((2, 8), "float32")
    >>> np.allclose(layer.inverse(layer(x)), x, atol=1e-6)
    True

    Reference: Mathiasen et al., "What if Neural Networks had SVDs?", NeurIPS 2020; Helfrich et al., "Orthogonal Recurrent Neural
    Networks with Scaled Cayley Transform", ICML 2018; Lezcano-Casado & Martínez-Rubio, "Cheap Orthogonal Constraints", ICML 2019.
    """

    constant_jacobian = True

    def __init__(
        self,
        map: str = "householder",
        reflections: int | None = None,
        kernel_initializer: Any = None,
        kernel_regularizer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require_floating(self, self.compute_dtype)
        if map not in _TO_MATRIX:
            raise ValueError(f"Unknown map to orthogonal matrices. Expected one of {sorted(_TO_MATRIX)}. Received: {map!r}")
        if reflections is not None:
            if map != "householder":
                raise ValueError(
                    f'`reflections` counts Householder reflections. Expected map="householder". Received: map={map!r}, '
                    f"reflections={reflections}"
                )
            if not isinstance(reflections, int | np.integer) or reflections < 1:
                raise ValueError(f"`reflections` must be a positive integer. Expected 1 ≤ k ≤ d. Received: {reflections!r}")
            reflections = int(reflections)
        self.map, self.reflections = map, reflections
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.supports_masking = True

    def build(self, input_shape: Shape) -> None:
        d = last_axis(self, input_shape)
        if self.reflections is not None and self.reflections > d:
            raise ValueError(
                f"More reflections than dimensions add nothing. Expected 1 ≤ reflections ≤ {d}. Received: {self.reflections}"
            )
        # Without autocast U is computed in the precision of the weight, also in mixed precision.
        self.kernel = self.add_weight(
            name="kernel",
            shape=(d, self.reflections or d),
            initializer=self._initial_kernel,
            regularizer=self.kernel_regularizer,
            autocast=False,
        )
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: d})

    def _initial_kernel(self, shape: Shape, dtype: Any = None) -> Tensor:
        d, k = shape
        if self.kernel_initializer is None:
            # U(−1/√d, 1/√d) also for k < d columns.
            return keras.ops.transpose(UniformFanIn()((k, d), dtype=dtype))
        start = initializers.orthogonal_start(self.kernel_initializer)
        if start is not None:
            q = initializers.orthogonal_matrix(start, d, keras.backend.standardize_dtype(dtype))
            weight = householder_vectors(q, k) if self.map == "householder" else _FROM_MATRIX[self.map](q)
            return keras.ops.convert_to_tensor(weight, dtype=dtype)
        weight = self.kernel_initializer(shape, dtype=dtype)
        if self.map == "householder" and is_concrete(weight):
            self._require_nonzero(keras.ops.convert_to_numpy(weight))
        return weight

    def _require_nonzero(self, vectors: np.ndarray) -> None:
        """Refuses columns of zero, which are no reflections, have the gradient zero and so never become one."""
        zeros = int((np.abs(vectors).max(axis=0) == 0).sum())
        if zeros and len(vectors) > 1:
            raise ValueError(
                "Householder vectors of zero never train. Expected a `kernel_initializer` without columns of zero. Received: "
                f"{zeros} of {vectors.shape[1]} columns are zero, from {type(self.kernel_initializer).__name__}"
            )

    def call(self, inputs: Tensor) -> Tensor:
        return self._apply(as_input(self, inputs), inverse=False)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return input_shape

    @property
    def matrix(self) -> Tensor:
        """U as a tensor of shape (d, d), computed from the trainable weight."""
        require_built(self, "matrix")
        return self.once("matrix", lambda: _TO_MATRIX[self.map](at_least_float32(self.kernel)))

    def inverse(self, y: Tensor) -> Tensor:
        """x = Uᵀy, with U x = y."""
        require_built(self, "inverse")
        return self._apply(keras.ops.convert_to_tensor(y, dtype=self.compute_dtype), inverse=True)

    def log_det_jacobian(self, x: Tensor) -> Tensor:
        """log|det U| = 0 for every vector on the last axis of x, shape `(batch, ...)`."""
        return keras.ops.zeros_like(keras.ops.convert_to_tensor(x, dtype=self.compute_dtype)[..., 0])

    def certificate(self) -> Certificate:
        """Orthogonal by construction, where the weights are finite and ‖UᵀU − I‖ of the U that is used is rounding."""
        require_built(self, "certificate")
        if not np.isfinite(_float64(self.kernel)).all():
            return not_proven("the weight has entries that are not finite")
        u = _float64(keras.ops.cast(self.matrix, self.compute_dtype))
        defect = float(np.linalg.norm(u.T @ u - np.eye(len(u))))
        if not defect < 0.5:  # below 1 it proves that U is invertible, and Uᵀ is close to its inverse
            return not_proven(f"rounding takes the matrix away from an orthogonal one, ‖UᵀU − I‖ = {defect:.2g}")
        return proven(f"orthogonal by construction (map {self.map!r}, ‖UᵀU − I‖ = {defect:.2g})", 1.0)

    def condense(self) -> keras.layers.Dense:
        """A plain `keras.layers.Dense` without bias that computes the same y = U x: a copy of U as it is now, for inference."""
        u = keras.ops.convert_to_numpy(self.matrix)
        dense = keras.layers.Dense(len(u), use_bias=False, dtype=self.dtype_policy, name=self.name)
        dense.build((None, len(u)))
        dense.kernel.assign(u.T)
        return dense

    def _apply(self, x: Tensor, inverse: bool) -> Tensor:
        if self.map == "householder" and not self.is_frozen:
            # The reflections are their own inverses: Uᵀ = H(v_k)…H(v₁).
            v = at_least_float32(self.kernel)
            return ops.householder_product(keras.ops.flip(v, axis=1) if inverse else v, x)
        u = keras.ops.cast(self.matrix, x.dtype)
        return map_rows(lambda rows: keras.ops.matmul(rows, u if inverse else keras.ops.transpose(u)), x)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "map": self.map,
            "reflections": self.reflections,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
        }


def _float64(x: Tensor) -> np.ndarray:
    return keras.ops.convert_to_numpy(x).astype(np.float64)
