"""Small layers that Keras does not have."""

from typing import Any

import keras


@keras.saving.register_keras_serializable("keras_auxref_examples")
class Scale(keras.layers.Layer):
    """y = σ ∘ x with trained σ, started in U(0.99, 1.01): the Σ of an SVD layer, alone."""

    def build(self, input_shape: Any) -> None:
        near_one = keras.initializers.RandomUniform(0.99, 1.01)
        self.scale = self.add_weight(name="scale", shape=(input_shape[-1],), initializer=near_one)

    def call(self, inputs: Any) -> Any:
        return inputs * self.scale
