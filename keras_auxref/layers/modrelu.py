"""modReLU as a Keras layer."""

from typing import Any

import keras

from keras_auxref._keras import PACKAGE
from keras_auxref.layers._checks import as_input, last_axis
from keras_auxref.ops.activations import modrelu
from keras_auxref.typing import Shape, Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class ModReLU(keras.layers.Layer):
    """The real modReLU with a trained bias per feature: y = sign(x) · relu(|x| + b).

    With b = 0 it is the identity, unlike a relu, so that a norm-preserving map before it stays one; b < 0 sets to zero what is
    smaller than −b. Zero stays zero, whatever b.

    Args:
        bias_initializer: Keras initializer for b; by default U(−0.01, 0.01), as in expRNN.
        bias_regularizer: Keras regularizer for b.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: Tensor of shape `(batch, ..., d)`.

    Output: A tensor of the same shape.

    Reference: Arjovsky, Shah & Bengio, "Unitary Evolution Recurrent Neural Networks", ICML 2016.
    """

    def __init__(self, bias_initializer: Any = None, bias_regularizer: Any = None, **kwargs: Any) -> None:
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

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
        }
