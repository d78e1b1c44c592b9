"""The factored reflection as a TFP bijector."""

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref import ops
from keras_auxref.bijectors._base import Parameter, reference, require_event, require_one_dtype, square_shape
from keras_auxref.bijectors._batch import batch_shape, map_member_rows
from keras_auxref.bijectors._cache import CompositeBijector
from keras_auxref.ops.diagonal import LARGEST_CONDITION
from keras_auxref.typing import Tensor

ORTHOGONAL_WITHIN = 1e-3
_EVENTS = {"u": 2, "v": 2, "eigenvalues": 1}


class FactoredReflection(CompositeBijector):
    """y = U g(Vᵀx) on the last axis, g(a) = (cλ − 1) ∘ a, c = 2 Σ λᵢaᵢ² / Σ λᵢ²aᵢ².

    A bijection for orthogonal U and V and λ > 0 with κ = max λ / min λ < 2; see `ops.factored_reflect`. The inverse takes a
    fixed number of Newton steps on a scalar, and nothing is factored. U, V and λ are used as given: to train them, pass
    functions of variables that satisfy these conditions, such as `tfp.util.TransformedVariable`s, or use the layer
    `keras_auxref.FactoredReflection` and its `bijector()`.

    Args:
        u: Orthogonal matrix of shape `(..., d, d)`: tensor or variable.
        v: Orthogonal matrix of shape `(..., d, d)`: tensor or variable.
        eigenvalues: λ, of shape `(..., d)`: tensor or variable. Leading axes are batches, and broadcast.
        validate_args: Check in every call, also inside graphs, that U and V are orthogonal and that κ < 2, and raise
            `tf.errors.InvalidArgumentError` if not. Values that are known when the bijector is made are always checked.
        name: Name of the bijector.

    Raises:
        ValueError: For shapes or dtypes that do not fit, U or V not orthogonal, λ not positive, or κ not below 2.

    Example:
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> from keras_auxref.bijectors import FactoredReflection
    >>> swap = np.array([[0.0, 1.0], [1.0, 0.0]])
    >>> bijector = FactoredReflection(swap, np.eye(2), np.array([1.0, 1.5]))
    >>> x = np.array([[3.0, 4.0]])
    >>> np.allclose(bijector.inverse(tf.identity(bijector.forward(x))), x)
    True
    """

    def __init__(
        self, u: Tensor, v: Tensor, eigenvalues: Tensor, validate_args: bool = False, name: str = "factored_reflection"
    ) -> None:
        parameters = dict(locals())
        with tf.name_scope(name) as name:
            self._u, self._v = reference(u, "u"), reference(v, "v")
            self._eigenvalues = reference(eigenvalues, "eigenvalues")
            given = {"u": self._u, "v": self._v, "eigenvalues": self._eigenvalues}
            require_event(self._eigenvalues, 1, "eigenvalues", "(..., d)")
            for key in ("u", "v"):
                require_event(given[key], 2, key, "(..., d, d)", square=True)
            dtype = require_one_dtype(**given)
            _require_shapes(**given)
            if tf.executing_eagerly():
                _require_promise(**{key: tf.convert_to_tensor(value).numpy() for key, value in given.items()})
            super().__init__(
                forward_min_event_ndims=1, dtype=dtype, validate_args=validate_args, parameters=parameters, name=name
            )

    @classmethod
    def _parameter_properties(cls, dtype: tf.DType) -> dict[str, tfp.util.ParameterProperties]:
        matrix = tfp.util.ParameterProperties(event_ndims=2, shape_fn=square_shape)
        return {"u": matrix, "v": matrix, "eigenvalues": tfp.util.ParameterProperties(event_ndims=1)}

    @property
    def u(self) -> Parameter:
        """U, as it was given."""
        return self._u

    @property
    def v(self) -> Parameter:
        """V, as it was given."""
        return self._v

    @property
    def eigenvalues(self) -> Parameter:
        """λ, as it was given."""
        return self._eigenvalues

    def _parts(self) -> dict[str, tf.Tensor]:
        u, v, eigenvalues = (tf.convert_to_tensor(t) for t in (self._u, self._v, self._eigenvalues))
        parts = {"u": u, "v": v, "eigenvalues": eigenvalues}
        if not self.validate_args:
            return parts
        identity = tf.eye(u.shape[-1], dtype=u.dtype)
        within = tf.cast(ORTHOGONAL_WITHIN, u.dtype)
        checks = [
            tf.debugging.assert_less(
                tf.reduce_max(tf.abs(tf.matmul(m, m, transpose_a=True) - identity)), within, f"`{key}` must be orthogonal."
            )
            for key, m in (("u", u), ("v", v))
        ]
        low, high = tf.reduce_min(eigenvalues, axis=-1), tf.reduce_max(eigenvalues, axis=-1)
        checks.append(tf.debugging.assert_positive(low, "`eigenvalues` must be positive."))
        checks.append(tf.debugging.assert_less_equal(high, LARGEST_CONDITION * low, "max λ / min λ must be below 2."))
        with tf.control_dependencies(checks):
            return {key: tf.identity(part) for key, part in parts.items()}

    def _forward(self, x: tf.Tensor) -> tf.Tensor:
        return map_member_rows(ops.factored_reflect, x, self._parts(), _EVENTS)

    def _inverse(self, y: tf.Tensor) -> tf.Tensor:
        return map_member_rows(ops.factored_inverse, y, self._parts(), _EVENTS)

    def _forward_log_det_jacobian(self, x: tf.Tensor) -> tf.Tensor:
        return map_member_rows(lambda x, **parts: ops.factored_reflect_and_log_det(x, **parts)[1], x, self._parts(), _EVENTS)


def _require_shapes(u: Tensor, v: Tensor, eigenvalues: Tensor) -> None:
    d = eigenvalues.shape[-1]
    for name, matrix in (("u", u), ("v", v)):
        if matrix.shape[-1] != d:
            raise ValueError(
                f"`{name}` must fit `eigenvalues`. Expected shape (..., {d}, {d}) for {d} eigenvalues. "
                f"Received: {tuple(matrix.shape)}"
            )
    batch_shape({"u": u, "v": v, "eigenvalues": eigenvalues}, _EVENTS)


def _require_promise(u: np.ndarray, v: np.ndarray, eigenvalues: np.ndarray) -> None:
    for name, matrix in (("u", u), ("v", v)):
        wide = matrix.astype(np.float64)
        error = float(np.abs(np.swapaxes(wide, -1, -2) @ wide - np.eye(wide.shape[-1])).max())
        if not error < ORTHOGONAL_WITHIN:
            raise ValueError(
                f"`{name}` must be an orthogonal matrix M. Expected max|MᵀM − I| < {ORTHOGONAL_WITHIN}. Received: {error:.2e}"
            )
    low, high = eigenvalues.min(axis=-1), eigenvalues.max(axis=-1)
    good = (low > 0) & (high <= LARGEST_CONDITION * low)
    if not good.all():
        worst = np.unravel_index(np.argmin(good), good.shape)
        raise ValueError(
            "`eigenvalues` must be positive, with max λ / min λ below 2. "
            f"Expected max λ / min λ ≤ {LARGEST_CONDITION}. Received: min λ = {low[worst]}, max λ = {high[worst]}"
        )
