"""Activation normalisation: one affine map per channel, started from data."""

from typing import Unpack

import keras
import numpy as np

from keras_auxref.certificate import Bounds, Certificate, diagonal_bounds, not_proven, proven
from keras_auxref.invertible import Invertible
from keras_auxref.layers.checks import as_input, last_axis, require_built, require_floating
from keras_auxref.ops.affine import affine, affine_inverse, channel_log_det, standardization
from keras_auxref.ops.checks import check_finite
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, DType, LayerArguments, Shape, Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class ActNorm(Invertible, keras.layers.Layer):
    """Activation normalisation of every channel on the last axis.

        y = (x + shift)·exp(log_scale)        log|det ∂y/∂x| = Σ log_scale

    The layer starts as the identity. `initialize(x)` sets shift and log_scale so that every channel of y has mean 0 and
    variance 1 on that one batch; after that they are ordinary weights. `call` uses no batch statistics, so training and
    inference are the same map. The weight `initialized` is 1 after `initialize`, and is saved with the others.

    Args:
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: Tensor of shape `(batch, ..., d)`.

    Output: A tensor of the same shape.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.flows import ActNorm
    >>> layer, x = ActNorm(), np.array([[1.0, 10.0], [3.0, 30.0]], "float32")
    >>> layer.initialize(x)
    >>> print(np.round(layer(x), 4))
    [[-1. -1.]
     [ 1.  1.]]

    Reference: Kingma & Dhariwal, "Glow: Generative Flow with Invertible 1×1 Convolutions", NeurIPS 2018.
    """

    constant_jacobian = True

    def __init__(self, **kwargs: Unpack[LayerArguments]) -> None:
        super().__init__(**kwargs)
        require_floating(self, self.compute_dtype)
        self.supports_masking = True

    def build(self, input_shape: Shape) -> None:
        d = last_axis(self, input_shape)
        self.shift = self.add_weight(name="shift", shape=(d,), initializer="zeros", autocast=False)
        self.log_scale = self.add_weight(name="log_scale", shape=(d,), initializer="zeros", autocast=False)
        self.initialized = self.add_weight(
            name="initialized", shape=(), initializer="zeros", dtype="int32", trainable=False, autocast=False
        )
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: d})

    def initialize(self, x: Tensor) -> None:
        """Sets shift and log_scale from data, and the flag `initialized`.

        Args:
            x: Tensor of shape `(batch, ..., d)`. A channel that is constant there keeps the scale 1.
        """
        x = keras.ops.convert_to_tensor(x, dtype=self.compute_dtype)
        check_finite(x, "x")
        if not self.built:
            self.build((None, *x.shape[1:]))
        shift, log_scale = standardization(x)
        self.shift.assign(shift)
        self.log_scale.assign(log_scale)
        self.initialized.assign(1)

    def call(self, inputs: Tensor) -> Tensor:
        inputs = as_input(self, inputs)
        return affine(inputs, *self._weights_as(inputs.dtype))

    def inverse(self, y: Tensor) -> Tensor:
        """x = y·exp(−log_scale) − shift."""
        y = self._tensor(y, "inverse")
        return affine_inverse(y, *self._weights_as(y.dtype))

    def log_det_jacobian(self, x: Tensor) -> Tensor:
        """Σ log_scale for every vector on the last axis of x, shape `(batch, ...)`."""
        x = self._tensor(x, "log_det_jacobian")
        return channel_log_det(x, self._weights_as(x.dtype)[1])

    def certificate(self) -> Certificate:
        """A bijection where every scale, its reciprocal and every shift are numbers in the precision of the layer."""
        require_built(self, "certificate")
        shift, log_scale = self._weights_as(self.compute_dtype)
        values = [keras.ops.exp(log_scale), keras.ops.exp(-log_scale), shift]
        scale, reciprocal, shift = (keras.ops.convert_to_numpy(keras.ops.cast(value, "float64")) for value in values)
        if not (np.isfinite([scale, reciprocal, shift]).all() and (scale > 0).all() and (reciprocal > 0).all()):
            return not_proven("a scale or a shift is not finite, or a scale is zero")
        # The inverse multiplies by its own exp(−log_scale), which is not quite the reciprocal.
        (high, low), (back, _) = diagonal_bounds(scale), diagonal_bounds(reciprocal)
        bounds = Bounds(high, None if back is None or low is None else max(low, back))
        reason = "every channel has a finite shift and a finite scale that is not zero"
        return proven(reason, float(scale.max() / scale.min()), bounds)

    def get_config(self) -> Config:
        return super().get_config()

    def _weights_as(self, dtype: DType) -> tuple[Tensor, Tensor]:
        return keras.ops.cast(self.shift, dtype), keras.ops.cast(self.log_scale, dtype)
