"""Flows for variational posteriors: maps of z whose parameters come from an encoder, different for every sample."""

from typing import Unpack

import keras

from keras_auxref.layers.checks import as_input, last_axis, require_floating
from keras_auxref.ops.checks import whole_number
from keras_auxref.typing import Config, LayerArguments, Shape, Tensor


class AmortisedFlow(keras.layers.Layer):
    """The interface of an amortised flow of T steps.

        z′ = layer(z, context)        z = layer.inverse(z′, context)
        z′, log|det ∂z′/∂z| = layer.forward_and_log_det(z, context)

    The context is the output of the encoder for a sample, for instance its last hidden units. Linear layers of the flow compute
    its parameters from the context. A subclass makes them in `build_parameters` and `parameters`, and uses them in `transform`
    and `invert`.
    """

    def __init__(self, steps: int = 4, **kwargs: Unpack[LayerArguments]) -> None:
        super().__init__(**kwargs)
        require_floating(self, self.compute_dtype)
        self.steps = whole_number("steps", steps, least=0)

    def build(self, inputs_shape: Shape, context_shape: Shape) -> None:
        d = last_axis(self, inputs_shape)
        if len(context_shape) != 2 or context_shape[-1] is None:
            raise ValueError(
                f"{type(self).__name__} needs a context of known size. Expected shape (batch, features). "
                f"Received: {tuple(context_shape)}"
            )
        if self.steps:
            self.build_parameters(d, context_shape)

    def build_parameters(self, d: int, context_shape: Shape) -> None:
        """Makes the layers that `parameters` needs, for z of size d and T ≥ 1."""
        raise NotImplementedError

    def parameters(self, context: Tensor) -> dict[str, Tensor]:
        """The parameters of all steps for every sample, of shapes `(batch, T, ...)`."""
        raise NotImplementedError

    def transform(self, z: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(z′, log|det ∂z′/∂z|)."""
        raise NotImplementedError

    def invert(self, z: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """z with transform(z, parameters) = z′."""
        raise NotImplementedError

    def call(self, inputs: Tensor, context: Tensor) -> Tensor:
        inputs, context = as_input(self, inputs), as_input(self, context)
        return self.transform(inputs, self.parameters(context))[0] if self.steps else inputs

    def compute_output_shape(self, inputs_shape: Shape, context_shape: Shape) -> Shape:
        return inputs_shape

    def forward_and_log_det(self, inputs: Tensor, context: Tensor, training: bool | None = None) -> tuple[Tensor, Tensor]:
        """(z′, log|det ∂z′/∂z|), the second of shape `(batch,)`."""
        inputs, context = self._tensors(inputs, context)
        if not self.steps:
            return inputs, keras.ops.zeros_like(inputs[..., 0])
        return self.transform(inputs, self.parameters(context))

    def inverse(self, outputs: Tensor, context: Tensor) -> Tensor:
        """z with layer(z, context) = z′."""
        outputs, context = self._tensors(outputs, context)
        return self.invert(outputs, self.parameters(context)) if self.steps else outputs

    def linear(self, units: int, name: str, context_shape: Shape, **kwargs: object) -> keras.layers.Dense:
        """A linear layer of the context, built."""
        layer = keras.layers.Dense(units, name=name, dtype=self.dtype_policy, **kwargs)
        layer.build(context_shape)
        return layer

    def _tensors(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors in the precision of the layer, which is built for them on first use."""
        found = [keras.ops.convert_to_tensor(tensor, dtype=self.compute_dtype) for tensor in tensors]
        if not self.built:
            self.build(*((None, *tensor.shape[1:]) for tensor in found))
        return found

    def get_config(self) -> Config:
        return {**super().get_config(), "steps": self.steps}
