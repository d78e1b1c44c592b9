"""A chain of invertible layers as one invertible layer, such as a step of a flow."""

import functools
from collections.abc import Sequence
from typing import Any, Self, Unpack

import keras

from keras_auxref.certificate import ISOMETRY, Bounds, Certificate, bounds_of, not_proven, proven
from keras_auxref.flows.copies import serialized
from keras_auxref.invertible import Invertible, pass_on, takes
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, LayerArguments, Shape, Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class Chain(Invertible, keras.layers.Layer):
    """A chain of invertible layers, y = l_n(… l_2(l_1(x))). The log-determinants add up.

    One event has as many axes as the largest event of the layers: if one layer acts on vectors and another on whole images, there
    is one log-determinant per image.

    Args:
        layers: `Invertible` Keras layers, the first one first.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: Tensor of a shape that the first layer takes.

    Output: What the last layer returns.

    Example:
    >>> import numpy as np
    >>> from keras_auxref import FactoredReflection
    >>> from keras_auxref.flows import ActNorm, AffineCoupling, Chain
    >>> layer, x = Chain([ActNorm(), FactoredReflection(), AffineCoupling(hidden=8)]), np.ones((2, 4), "float32")
    >>> np.allclose(layer.inverse(layer(x)), x, atol=1e-5)
    True
    """

    def __init__(self, layers: Sequence[keras.layers.Layer], **kwargs: Unpack[LayerArguments]) -> None:
        super().__init__(**kwargs)
        self.layers = [check_invertible(layer) for layer in layers]
        if not self.layers:
            raise ValueError("A chain needs a layer. Expected a list of invertible layers. Received: an empty list")
        self.supports_xla = all(layer.supports_xla for layer in self.layers)
        self.constant_jacobian = all(layer.constant_jacobian for layer in self.layers)
        self.elementary = all(layer.elementary for layer in self.layers)
        self.cheap_log_det = all(layer.cheap_log_det for layer in self.layers)

    def build(self, inputs_shape: Shape, context_shape: Shape | None = None) -> None:
        shape = tuple(inputs_shape)
        for layer in self.layers:
            if not layer.built:
                layer.build(shape)
            # A layer may change the axes of an event, but not those before it.
            shape = tuple(layer.compute_output_shape(shape))
        self.event_ndims = max(layer.event_ndims for layer in self.layers)
        self._inverse_event_ndims = self.event_ndims + len(shape) - len(inputs_shape)

    @property
    def inverse_event_ndims(self) -> int:
        return getattr(self, "_inverse_event_ndims", self.event_ndims)

    def call(self, inputs: Tensor, training: bool | None = None, context: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            inputs = called(layer, inputs, training=training, context=context)
        return inputs

    def forward_and_log_det(
        self, x: Tensor, training: bool | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x = self._tensor(x, "forward_and_log_det")
        lead = len(x.shape) - self.event_ndims
        total: Any = None
        for layer in self.layers:
            x, log_det = pass_on(layer.forward_and_log_det, x, training=training, context=context)
            log_det = summed_to(log_det, lead)
            total = log_det if total is None else total + log_det
        return x, total

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        y = self._tensor(y, "inverse")
        for layer in reversed(self.layers):
            y = pass_on(layer.inverse, y, context=context)
        return y

    def compute_output_shape(self, inputs_shape: Shape, context_shape: Shape | None = None) -> Shape:
        for layer in self.layers:
            inputs_shape = layer.compute_output_shape(inputs_shape)
        return inputs_shape

    def inverse_output_shape(self, output_shape: Shape) -> Shape:
        for layer in reversed(self.layers):
            output_shape = layer.inverse_output_shape(output_shape)
        return output_shape

    def initialize(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Initialises every part that needs data, one layer after the other; returns layer(x)."""
        x = keras.ops.convert_to_tensor(x, dtype=self.compute_dtype)
        for layer in self.layers:
            if hasattr(layer, "initialize"):
                pass_on(layer.initialize, x, context=context)
            x = called(layer, x, context=context)
        return x

    @property
    def initialized(self) -> bool:
        """True when everything that starts from data has done so."""
        return all(is_initialized(layer) for layer in self.layers)

    def certificate(self) -> Certificate:
        """A bijection where every layer is proven to be one."""
        return combined({layer.name: layer.certificate() for layer in self.layers})

    def proof(self) -> Tensor | None:
        return all_proven([part.proof() for part in self.inverse_parts()])

    def inverse_parts(self) -> list[Invertible]:
        return [part for layer in self.layers for part in layer.inverse_parts()]

    def get_config(self) -> Config:
        return {**super().get_config(), "layers": [serialized(layer) for layer in self.layers]}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(**{**config, "layers": [keras.saving.deserialize_keras_object(layer) for layer in config["layers"]]})


def check_invertible(layer: keras.layers.Layer) -> keras.layers.Layer:
    """A Keras layer with the contract of `Invertible`."""
    if isinstance(layer, Invertible) and isinstance(layer, keras.layers.Layer):
        return layer
    raise ValueError(f"The layer must be invertible. Expected a Keras layer with `Invertible`. Received: {layer!r}")


def check_template(layer: keras.layers.Layer, name: str) -> keras.layers.Layer:
    """An invertible layer that has not been built, and is made of none that has."""
    built = next((part for part in (check_invertible(layer), *layer.inverse_parts()) if part.built), None)
    if built is not None:
        raise ValueError(
            f"`{name}` is a template, of which every step gets a copy. Expected a layer that has not been built. Received: "
            f"'{built.name}', which has weights"
        )
    return layer


def called(layer: keras.layers.Layer, x: Tensor, **extra: object) -> Tensor:
    """layer(x) with those of the keyword arguments that are not None and that its `call` takes."""
    return layer(x, **{name: value for name, value in extra.items() if value is not None and takes(layer.call, name)})


def is_initialized(layer: keras.layers.Layer) -> bool:
    """False for a layer that starts from data and has not."""
    flag = getattr(layer, "initialized", True)
    return flag if isinstance(flag, bool) else bool(keras.ops.convert_to_numpy(flag).all())


def summed_to(log_det: Tensor, axes: int) -> Tensor:
    """A log-determinant summed over all axes but its first ones."""
    extra = len(log_det.shape) - axes
    return keras.ops.sum(log_det, axis=tuple(range(axes, axes + extra))) if extra > 0 else log_det


def all_proven(proofs: list[Tensor | None]) -> Tensor | None:
    """Whether every inverse is unique, as a tensor, or None where that is never in doubt."""
    in_doubt = [proof for proof in proofs if proof is not None]
    return keras.ops.all(keras.ops.stack(in_doubt)) if in_doubt else None


def combined(certificates: dict[str, Certificate]) -> Certificate:
    """The certificate of a chain of maps, from theirs by name."""
    bounds = functools.reduce(Bounds.then, map(bounds_of, certificates.values()), ISOMETRY)
    for name, certificate in certificates.items():
        if not certificate.invertible:
            return not_proven(f"of '{name}': {certificate.reason.removeprefix('Not proven: ').removesuffix('.')}", bounds)
    return proven(f"each of {len(certificates)} layers is a bijection", bounds=bounds)
