"""A square matrix as an invertible Keras layer: Glow's 1×1 convolution."""

from typing import Unpack

import keras

from keras_auxref import initializers
from keras_auxref.certificate import Certificate, certify_linear
from keras_auxref.initializers import ReflectionOf
from keras_auxref.invertible import Invertible
from keras_auxref.layers.checks import as_input, last_axis, require_built, require_floating
from keras_auxref.layers.frozen import Freezable
from keras_auxref.ops.backend import outside_graphs
from keras_auxref.ops.checks import HALF
from keras_auxref.ops.log_abs_det import inverse_matrix, log_abs_det, multiply_rows, solve_rows
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, DType, Initializer, LayerArguments, Regularizer, Shape, Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class InvertibleDense(Freezable, Invertible, keras.layers.Layer):
    """A square matrix on the last axis: y = W x, log|det ∂y/∂x| = log|det W|.

    On images this is the invertible 1×1 convolution. Nothing keeps W invertible during training; a log-determinant
    of −∞ means that it no longer is. With `trainable=False` and the default start it is a fixed rotation, the simplest mixing of
    channels.

    Args:
        kernel_initializer: Initializer for W; an orthogonal start as for `OrthogonalDense`, or any other.
        kernel_regularizer: Keras regularizer for W.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: Tensor of shape `(batch, ..., d)`.

    Output: A tensor of the same shape.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.flows import InvertibleDense
    >>> layer, x = InvertibleDense(), np.ones((2, 8), "float32")
    >>> np.allclose(layer.inverse(layer(x)), x, atol=1e-6)
    True

    Reference: Kingma & Dhariwal, "Glow: Generative Flow with Invertible 1×1 Convolutions", NeurIPS 2018.
    """

    constant_jacobian = True

    def __init__(
        self,
        kernel_initializer: Initializer = "orthogonal",
        kernel_regularizer: Regularizer | None = None,
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        super().__init__(**kwargs)
        require_floating(self, self.compute_dtype)
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.supports_masking = True

    def build(self, input_shape: Shape) -> None:
        d = last_axis(self, input_shape)
        self.kernel = self.add_weight(
            name="kernel",
            shape=(d, d),
            initializer=self._initial_kernel,
            regularizer=self.kernel_regularizer,
            autocast=False,
        )
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: d})

    def _initial_kernel(self, shape: tuple[int, ...], dtype: DType | None = None) -> Tensor:
        precision = keras.backend.standardize_dtype(dtype)
        if isinstance(self.kernel_initializer, ReflectionOf):
            value = initializers.orthogonal_matrix(self.kernel_initializer.orthogonal, shape[0], precision)
            return keras.ops.convert_to_tensor(value, dtype=dtype)
        with outside_graphs():  # a model may be built while its training step is traced
            value = self.kernel_initializer(shape, dtype="float32" if precision in HALF else precision)
        return keras.ops.cast(value, dtype)

    @property
    def matrix(self) -> Tensor:
        """W as the layer uses it, in its compute dtype: what is inverted, certified and has the log-determinant."""
        require_built(self, "matrix")
        return keras.ops.cast(self.kernel, self.compute_dtype)

    def call(self, inputs: Tensor) -> Tensor:
        inputs = as_input(self, inputs)
        return keras.ops.matmul(inputs, keras.ops.transpose(keras.ops.cast(self.matrix, inputs.dtype)))

    def inverse(self, y: Tensor) -> Tensor:
        """x = W⁻¹y, by a solve in float64."""
        y = self._tensor(y, "inverse")
        if self.is_frozen:
            return multiply_rows(self.once("inverse", lambda: inverse_matrix(self.matrix)), y)
        return solve_rows(self.matrix, y)

    def log_det_jacobian(self, x: Tensor) -> Tensor:
        """log|det W| for every vector on the last axis of x, shape `(batch, ...)`; −∞ for a singular W."""
        x = self._tensor(x, "log_det_jacobian")
        value = self.once("log_abs_det", lambda: log_abs_det(self.matrix))
        return keras.ops.zeros_like(x[..., 0]) + keras.ops.cast(value, x.dtype)

    def certificate(self) -> Certificate:
        """Whether W is invertible as it is now, and its condition."""
        require_built(self, "certificate")
        return certify_linear(self.matrix)

    def get_config(self) -> Config:
        return {
            **super().get_config(),
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
        }
