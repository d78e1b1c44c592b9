"""What the layers that replace `Dense` share: units, a bias, an activation, and an inverse where these allow one."""

from typing import Any, Unpack

import keras
import numpy as np

from keras_auxref.invertible import Invertible
from keras_auxref.layers.checks import require_built
from keras_auxref.ops.checks import whole_number_or_none
from keras_auxref.typing import Activation, Config, Initializer, LayerArguments, Regularizer, Shape, Tensor


class DenseLike(Invertible, keras.layers.Layer):
    """y = activation(m(x) + b) for a map m of the last axis, from d to `units` entries. A subclass has m.

    Args:
        units: Positive integer, the size of the last axis of the output; None is that of the input.
        activation: Keras activation.
        use_bias: Whether to add b.
        bias_initializer: Keras initializer for b.
        bias_regularizer: Keras regularizer for b.
        **kwargs: Arguments of `keras.layers.Layer`.
    """

    def __init__(
        self,
        units: int | None,
        activation: Activation | None,
        use_bias: bool,
        bias_initializer: Initializer,
        bias_regularizer: Regularizer | None,
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        super().__init__(**kwargs)
        self.units = whole_number_or_none("units", units)
        self.activation = keras.activations.get(activation)
        self.use_bias = bool(use_bias)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.bias: Any = None
        self.supports_masking = True

    def _build_bias(self, d: int) -> None:
        """For inputs of size d."""
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias", shape=(self.units or d,), initializer=self.bias_initializer, regularizer=self.bias_regularizer
            )
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: d})

    def _with_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + keras.ops.cast(self.bias, y.dtype)

    def _without_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y - keras.ops.cast(self.bias, y.dtype)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return (*input_shape[:-1], self.units or input_shape[-1])

    def bijector(self, **kwargs: object) -> Any:
        """A new TFP bijector over the weights of this layer: a view, never a copy. Needs `units` = d and no activation."""
        self._require_invertible("bijector")
        return super().bijector(**kwargs)

    def _obstacle(self) -> str | None:
        """Why the layer has no inverse, whatever its weights; None if it may have one."""
        d = self.input_spec.axes[-1]
        if self.units not in (None, d):
            return f"a map from {d} to {self.units} dimensions is no bijection"
        if self.activation is not keras.activations.linear:
            return f"the activation {getattr(self.activation, '__name__', self.activation)!r} is not undone"
        return None

    def _require_invertible(self, name: str) -> None:
        require_built(self, name)
        if self._obstacle() is not None:
            raise NotImplementedError(
                f"`{name}` needs an invertible layer. Expected `units` equal to the size of the input, full rank and no "
                f"activation. Received: {self._obstacle()}"
            )

    def _condensed(self, matrix: np.ndarray) -> keras.layers.Dense:
        """A plain Dense layer with this matrix of shape (units, d), and the bias and activation of this layer."""
        units, d = matrix.shape
        settings = {"activation": self.activation, "use_bias": self.use_bias, "dtype": self.dtype_policy, "name": self.name}
        dense = keras.layers.Dense(units, **settings)
        dense.build((None, d))
        dense.kernel.assign(matrix.T)
        if self.bias is not None:
            dense.bias.assign(self.bias)
        return dense

    def get_config(self) -> Config:
        return {
            **super().get_config(),
            "units": self.units,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
        }
