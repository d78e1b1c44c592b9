"""A product of Householder reflections as a TFP bijector."""

import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref import ops
from keras_auxref.bijectors._base import Parameter, reference, require_event, square_shape
from keras_auxref.bijectors._batch import map_member_rows
from keras_auxref.bijectors._cache import CompositeBijector
from keras_auxref.typing import Tensor


class Householder(CompositeBijector):
    """y = H(v₁)…H(v_k) x on the last axis, x = H(v_k)…H(v₁) y, log|det ∂y/∂x| = 0.

    The reflections are applied in blocks, never one by one; a column of zeros is the identity.

    Args:
        v: Tensor or variable of shape `(..., d, k)`, a batch of matrices; only the directions of their columns matter.
        validate_args: As in every TFP bijector; there is nothing to check here.
        name: Name of the bijector.

    Example:
    >>> from keras_auxref.bijectors import Householder
    >>> bijector = Householder([[0.0], [2.0]])
    >>> print(bijector.forward([3.0, 4.0]).numpy())
    [ 3. -4.]
    """

    def __init__(self, v: Tensor, validate_args: bool = False, name: str = "householder") -> None:
        parameters = dict(locals())
        with tf.name_scope(name) as name:
            self._v = reference(v, "v")
            require_event(self._v, 2, "v", "(..., d, k)")
            super().__init__(
                forward_min_event_ndims=1,
                is_constant_jacobian=True,
                dtype=self._v.dtype,
                validate_args=validate_args,
                parameters=parameters,
                name=name,
            )

    @classmethod
    def _parameter_properties(cls, dtype: tf.DType) -> dict[str, tfp.util.ParameterProperties]:
        # d reflections reach every orthogonal map of determinant (−1)ᵈ.
        return {"v": tfp.util.ParameterProperties(event_ndims=2, shape_fn=square_shape)}

    @property
    def v(self) -> Parameter:
        """The vectors, as they were given."""
        return self._v

    def _forward(self, x: tf.Tensor) -> tf.Tensor:
        return self._apply(x, tf.convert_to_tensor(self._v))

    def _inverse(self, y: tf.Tensor) -> tf.Tensor:
        return self._apply(y, tf.reverse(tf.convert_to_tensor(self._v), [-1]))

    def _apply(self, x: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
        return map_member_rows(lambda x, v: ops.householder_product(v, x), x, {"v": v}, 2)

    def _forward_log_det_jacobian(self, x: tf.Tensor) -> tf.Tensor:
        # A constant Jacobian: broadcasting adds the batch of v to the shape.
        return tf.zeros_like(x[..., 0])
