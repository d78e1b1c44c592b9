"""Activation normalisation as a TFP bijector."""

from typing import Any

import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref.bijectors._base import Parameter, reference, require_event, require_one_dtype
from keras_auxref.bijectors._batch import batch_shape
from keras_auxref.bijectors._cache import CompositeBijector
from keras_auxref.ops.affine import affine, affine_inverse, standardization
from keras_auxref.ops.checks import check_finite
from keras_auxref.typing import Tensor


class ActNorm(CompositeBijector):
    """y = (x + shift)·exp(log_scale) for every channel of the last axis, log|det ∂y/∂x| = Σ log_scale.

    Args:
        shift: Tensor or variable of shape `(..., d)`.
        log_scale: Tensor or variable of shape `(..., d)`. The axes before the last one are a batch, and broadcast.
        validate_args: As in every TFP bijector; there is nothing to check here.
        name: Name of the bijector.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.bijectors import ActNorm
    >>> x = np.array([[1.0, 10.0], [3.0, 30.0]], "float32")
    >>> print(np.round(ActNorm.from_data(x).forward(x), 4))
    [[-1. -1.]
     [ 1.  1.]]

    Reference: Kingma & Dhariwal, "Glow: Generative Flow with Invertible 1×1 Convolutions", NeurIPS 2018.
    """

    def __init__(self, shift: Tensor, log_scale: Tensor, validate_args: bool = False, name: str = "act_norm") -> None:
        parameters = dict(locals())
        with tf.name_scope(name) as name:
            self._shift, self._log_scale = reference(shift, "shift"), reference(log_scale, "log_scale")
            given = {"shift": self._shift, "log_scale": self._log_scale}
            for key, value in given.items():
                require_event(value, 1, key, "(..., d)")
            if self._shift.shape[-1] != self._log_scale.shape[-1]:
                raise ValueError(
                    f"`shift` and `log_scale` must have one last axis. Expected (..., {self._shift.shape[-1]}) for both. "
                    f"Received: log_scale {tuple(self._log_scale.shape)}"
                )
            batch_shape(given, 1)
            super().__init__(
                forward_min_event_ndims=1,
                is_constant_jacobian=True,
                dtype=require_one_dtype(**given),
                validate_args=validate_args,
                parameters=parameters,
                name=name,
            )

    @classmethod
    def from_data(cls, x: Tensor, **kwargs: Any) -> "ActNorm":
        """A bijector with new variables that give every channel of x, shape `(..., d)`, mean 0 and variance 1."""
        shift, log_scale = _statistics(tf.convert_to_tensor(x))
        return cls(tf.Variable(shift, name="shift"), tf.Variable(log_scale, name="log_scale"), **kwargs)

    def initialize(self, x: Tensor) -> None:
        """Sets the variables such that every channel of x, shape `(..., d)`, gets mean 0 and variance 1."""
        if not (isinstance(self._shift, tf.Variable) and isinstance(self._log_scale, tf.Variable)):
            kinds = type(self._shift).__name__, type(self._log_scale).__name__
            raise ValueError(f"`initialize` assigns to variables. Expected two `tf.Variable`s. Received: {kinds}")
        shift, log_scale = _statistics(tf.convert_to_tensor(x, self.dtype))
        self._shift.assign(shift)
        self._log_scale.assign(log_scale)

    @classmethod
    def _parameter_properties(cls, dtype: tf.DType) -> dict[str, tfp.util.ParameterProperties]:
        one = tfp.util.ParameterProperties(event_ndims=1)
        return {"shift": one, "log_scale": one}

    @property
    def shift(self) -> Parameter:
        """The shift, as it was given."""
        return self._shift

    @property
    def log_scale(self) -> Parameter:
        """The logarithm of the scale, as it was given."""
        return self._log_scale

    def _forward(self, x: tf.Tensor) -> tf.Tensor:
        return affine(x, tf.convert_to_tensor(self._shift), tf.convert_to_tensor(self._log_scale))

    def _inverse(self, y: tf.Tensor) -> tf.Tensor:
        return affine_inverse(y, tf.convert_to_tensor(self._shift), tf.convert_to_tensor(self._log_scale))

    def _forward_log_det_jacobian(self, x: tf.Tensor) -> tf.Tensor:
        # x[..., 0]·0 would propagate NaN and infinities of x.
        return tf.zeros_like(x[..., 0]) + tf.reduce_sum(tf.convert_to_tensor(self._log_scale), axis=-1)


def _statistics(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    check_finite(x, "x")
    return standardization(x)
