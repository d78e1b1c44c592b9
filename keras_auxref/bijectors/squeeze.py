"""Space to depth as a TFP bijector."""

import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref.bijectors._cache import CompositeBijector
from keras_auxref.ops.checks import whole_number
from keras_auxref.ops.squeeze import squeeze, squeezed_shape, unsqueeze, unsqueezed_shape


class Squeeze(CompositeBijector):
    """(..., H, W, C) → (..., H/f, W/f, f²C): every f×f patch of pixels becomes one pixel; log|det ∂y/∂x| = 0.

    Args:
        factor: The positive integer f, a divisor of height and width.
        validate_args: As in every TFP bijector; sizes are checked in any case.
        name: Name of the bijector.

    Example:
    >>> from keras_auxref.bijectors import Squeeze
    >>> print(Squeeze().forward_event_shape([4, 6, 3]))
    (2, 3, 12)
    """

    def __init__(self, factor: int = 2, validate_args: bool = False, name: str = "squeeze") -> None:
        parameters = dict(locals())
        with tf.name_scope(name) as name:
            self._factor = whole_number("factor", factor)
            super().__init__(
                forward_min_event_ndims=3,
                is_constant_jacobian=True,
                validate_args=validate_args,
                parameters=parameters,
                name=name,
            )

    @property
    def factor(self) -> int:
        """The side of a patch."""
        return self._factor

    @classmethod
    def _parameter_properties(cls, dtype: tf.DType) -> dict[str, tfp.util.ParameterProperties]:
        return {}

    @property
    def _is_permutation(self) -> bool:
        return True

    def _forward(self, x: tf.Tensor) -> tf.Tensor:
        squeezed_shape(x.shape, self._factor, "Squeeze")
        return squeeze(x, self._factor)

    def _inverse(self, y: tf.Tensor) -> tf.Tensor:
        unsqueezed_shape(y.shape, self._factor, "Squeeze")
        return unsqueeze(y, self._factor)

    def _forward_log_det_jacobian(self, x: tf.Tensor) -> tf.Tensor:
        return tf.zeros_like(x[..., 0, 0, 0])

    def _forward_event_shape(self, input_shape: tf.TensorShape) -> tf.TensorShape:
        return tf.TensorShape(None if input_shape.rank is None else squeezed_shape(input_shape, self._factor, "Squeeze"))

    def _inverse_event_shape(self, output_shape: tf.TensorShape) -> tf.TensorShape:
        return tf.TensorShape(None if output_shape.rank is None else unsqueezed_shape(output_shape, self._factor, "Squeeze"))

    def _forward_event_shape_tensor(self, input_shape: tf.Tensor) -> tf.Tensor:
        return tf.stack(squeezed_shape(tf.unstack(input_shape), self._factor, "Squeeze"))

    def _inverse_event_shape_tensor(self, output_shape: tf.Tensor) -> tf.Tensor:
        return tf.stack(unsqueezed_shape(tf.unstack(output_shape), self._factor, "Squeeze"))
