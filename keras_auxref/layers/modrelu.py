"""modReLU as a Keras layer."""

from typing import Unpack

import keras

from keras_auxref.layers.checks import as_input, last_axis
from keras_auxref.ops.activations import modrelu
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, Initializer, LayerArguments, Regularizer, Shape, Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class ModReLU(keras.layers.Layer):
    """The real modReLU with a trained bias per feature: y = sign(x) · relu(|x| + b).

    With b = 0 it is the identity, unlike ReLU, so a norm-preserving map before it stays norm-preserving; with b < 0, entries
    of magnitude below −b become zero. Zero stays zero for every b.

    Args:
        bias_initializer: Keras initializer for b; by default U(−0.01, 0.01), as in expRNN.
        bias_regularizer: Keras regularizer for b.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: Tensor of shape `(batch, ..., d)`.

    Output: A tensor of the same shape.

    Example:
    >>> import keras
    >>> import numpy as np
    >>> from keras_auxref.layers import ModReLU
    >>> layer = ModReLU(bias_initializer=keras.initializers.Constant(-1.0))
    >>> print(layer(np.array([[-3.0, 0.5, 2.0]], "float32")).numpy())
    [[-2.  0.  1.]]

    Reference: Arjovsky, Shah & Bengio, "Unitary Evolution Recurrent Neural Networks", ICML 2016.
    """

    def __init__(
        self,
        bias_initializer: Initializer | None = None,
        bias_regularizer: Regularizer | None = None,
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        super().__init__(**kwargs)
        if bias_initializer is None:
            bias_initializer = keras.initializers.RandomUniform(-0.01, 0.01)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.supports_masking = True

    def build(self, input_shape: Shape) -> None:
        d = last_axis(self, input_shape)
        self.bias = self.add_weight(name="bias", shape=(d,), initializer=self.bias_initializer, regularizer=self.bias_regularizer)
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: d})

    def call(self, inputs: Tensor) -> Tensor:
        return modrelu(as_input(self, inputs), self.bias)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return input_shape

    def get_config(self) -> Config:
        return {
            **super().get_config(),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
        }
