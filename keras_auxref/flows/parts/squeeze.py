"""Space to depth as an invertible Keras layer."""

from typing import Unpack

import keras

from keras_auxref.certificate import ISOMETRY, Certificate, proven
from keras_auxref.invertible import Invertible
from keras_auxref.layers.checks import as_input
from keras_auxref.ops.checks import whole_number
from keras_auxref.ops.squeeze import squeeze, squeezed_shape, unsqueeze, unsqueezed_shape
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, LayerArguments, Shape, Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class Squeeze(Invertible, keras.layers.Layer):
    """Every f×f patch of pixels becomes one pixel with f² times the channels: (H, W, C) → (H/f, W/f, f²C).

    A permutation of the entries of an image, log|det ∂y/∂x| = 0, in the order of `tf.nn.space_to_depth`.

    Args:
        factor: The positive integer f, a divisor of height and width.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, …

    Call arguments:
        inputs: Tensor of shape `(batch, height, width, channels)`.

    Output: A tensor of shape `(batch, height / f, width / f, f² · channels)`.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.flows import Squeeze
    >>> Squeeze()(np.zeros((1, 4, 6, 3), "float32")).shape
    TensorShape([1, 2, 3, 12])

    Reference: Dinh, Sohl-Dickstein & Bengio, "Density Estimation using Real NVP", ICLR 2017.
    """

    event_ndims = 3
    constant_jacobian = True

    def __init__(self, factor: int = 2, **kwargs: Unpack[LayerArguments]) -> None:
        super().__init__(**kwargs)
        self.factor = whole_number("factor", factor)

    def build(self, input_shape: Shape) -> None:
        self.compute_output_shape(input_shape)
        if len(input_shape) != 4:
            raise ValueError(
                f"{type(self).__name__} needs a batch of images. Expected shape (batch, height, width, channels). "
                f"Received: {tuple(input_shape)}"
            )
        self.input_spec = keras.layers.InputSpec(ndim=4)

    def call(self, inputs: Tensor) -> Tensor:
        inputs = as_input(self, inputs)
        self.compute_output_shape(inputs.shape)
        return squeeze(inputs, self.factor)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return squeezed_shape(input_shape, self.factor, type(self).__name__)

    def inverse_output_shape(self, output_shape: Shape) -> Shape:
        return unsqueezed_shape(output_shape, self.factor, type(self).__name__)

    def inverse(self, y: Tensor) -> Tensor:
        """The image whose patches are the pixels of y."""
        y = keras.ops.convert_to_tensor(y, dtype=self.compute_dtype)
        self.inverse_output_shape(y.shape)
        return unsqueeze(y, self.factor)

    def log_det_jacobian(self, x: Tensor) -> Tensor:
        """0 for every image, shape `(batch,)`."""
        x = keras.ops.convert_to_tensor(x, dtype=self.compute_dtype)
        self.compute_output_shape(x.shape)
        return keras.ops.zeros_like(x[..., 0, 0, 0])

    def certificate(self) -> Certificate:
        """Always a bijection."""
        return proven("a permutation of the entries of an image", 1.0, ISOMETRY)

    def get_config(self) -> Config:
        return {**super().get_config(), "factor": self.factor}
