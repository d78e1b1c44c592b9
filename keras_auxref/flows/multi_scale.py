"""The multi-scale architecture of RealNVP and Glow as one invertible layer: images to vectors and back."""

import math
import random
from typing import Any

import keras

from keras_auxref._keras import PACKAGE
from keras_auxref.flows.coupling import build_coupling, check_coupling
from keras_auxref.flows.mixing import build_mixing, check_mixing
from keras_auxref.flows.preprocessing import Logit
from keras_auxref.invertible import Invertible
from keras_auxref.layers import ActNorm, Squeeze


@keras.saving.register_keras_serializable(PACKAGE)
class MultiScale(Invertible, keras.layers.Layer):
    """Images of shape (height, width, channels) in [0, 1] to vectors z of the same number of entries, and back.

        logit → L levels of: squeeze 2×2 pixels into channels → K steps of (ActNorm → mixing → coupling) → split

    After every level but the last, half of the channels become entries of z and the other half go on.

    Args:
        levels: The number L of levels; height and width must be divisible by 2ᴸ.
        steps: The number K of steps of each level.
        hidden: Channels of the hidden layers of the coupling networks.
        mixing: See `flows.mixing`: one of `flows.MIXINGS`, or a kernel.
        squash: See `Logit`.
        seed: Seed of the orthogonal starts of the mixings, the same for every kind of mixing.
        coupling: See `flows.coupling`: one of `flows.COUPLINGS`.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        inputs: Tensor of shape `(batch, height, width, channels)`.

    Output: A tensor of shape `(batch, height·width·channels)`.
    """

    event_ndims = 3
    inverse_event_ndims = 1

    def __init__(
        self,
        levels: int = 3,
        steps: int = 8,
        hidden: int = 64,
        mixing: Any = "aux_factored",
        squash: float = 0.9,
        seed: int | None = None,
        coupling: str = "affine",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        for name, value in (("levels", levels), ("steps", steps), ("hidden", hidden)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be a positive integer. Received: {value!r}")
        self.levels, self.steps, self.hidden, self.mixing = levels, steps, hidden, check_mixing(mixing)
        self.coupling = check_coupling(coupling)
        self.seed = random.randint(1, 2**31 - 1) if seed is None else int(seed)
        dtype = self.dtype_policy
        self.logit = Logit(squash, name="logit", dtype=dtype)
        self.squeezes = [Squeeze(name=f"squeeze_{level + 1}", dtype=dtype) for level in range(levels)]
        seeds = random.Random(self.seed)
        self.steps_of_level = [[self._step(level + 1, k + 1, seeds) for k in range(steps)] for level in range(levels)]

    def _step(self, level: int, step: int, seeds: random.Random) -> list[keras.layers.Layer]:
        """ActNorm first, the coupling last, and between them the layers that mix channels."""
        place, dtype = f"level_{level}_step_{step}", self.dtype_policy
        return [
            ActNorm(name=f"{place}_act_norm", dtype=dtype),
            *build_mixing(self.mixing, seeds.randrange(2**31), f"{place}_mixing", dtype),
            build_coupling(self.coupling, self.hidden, f"{place}_coupling", dtype),
        ]

    def build(self, input_shape: Any) -> None:
        multiple = 2**self.levels
        if len(input_shape) != 4 or None in input_shape[1:] or any(n % multiple for n in input_shape[1:3]):
            raise ValueError(
                f"{self.levels} levels halve height and width {self.levels} times. Expected shape (batch, height, width, "
                f"channels) with height and width divisible by {multiple}. Received: {tuple(input_shape)}"
            )
        shape = tuple(input_shape)
        self.image_shape = shape[1:]
        self.logit.build(shape)
        for level in range(self.levels):
            self.squeezes[level].build(shape)
            shape = tuple(self.squeezes[level].compute_output_shape(shape))
            for layer in self._layers_of(level):
                layer.build(shape)
            if level < self.levels - 1:
                shape = (*shape[:-1], shape[-1] - shape[-1] // 2)

    def _layers_of(self, level: int) -> list[keras.layers.Layer]:
        return [layer for step in self.steps_of_level[level] for layer in step]

    def mixing_layers(self) -> list[keras.layers.Layer]:
        """The layers that mix channels, from the image on."""
        return [layer for level in self.steps_of_level for step in level for layer in step[1:-1]]

    def inverse_parts(self) -> list[Any]:
        """The layers that `inverse` runs through."""
        return [self.logit, *self.squeezes, *(layer for level in range(self.levels) for layer in self._layers_of(level))]

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return self._walk(inputs, lambda layer, x: (layer(x, training=training), 0.0))[0]

    def forward_and_log_det(self, x: Any, training: bool | None = None) -> tuple[Any, Any]:
        """z and log|det ∂z/∂x|, of shapes `(batch, D)` and `(batch,)`."""
        x = keras.ops.convert_to_tensor(x, dtype=self.compute_dtype)
        return self._walk(x, lambda layer, x: layer.forward_and_log_det(x, training=training))

    def log_det_jacobian(self, x: Any) -> Any:
        """log|det ∂z/∂x| for every image, of shape `(batch,)`."""
        return self.forward_and_log_det(x)[1]

    def initialize(self, x: Any) -> None:
        """Starts every ActNorm from data: each channel that leaves it has mean 0 and variance 1 on these images."""

        def visit(layer: Any, x: Any) -> tuple[Any, float]:
            if isinstance(layer, ActNorm):
                layer.initialize(x)
            return layer(x), 0.0

        self._walk(keras.ops.convert_to_tensor(x, dtype=self.compute_dtype), visit)

    @property
    def initialized(self) -> bool:
        """True when every ActNorm has been started from data."""
        return all(bool(keras.ops.convert_to_numpy(steps[0].initialized)) for level in self.steps_of_level for steps in level)

    def walk_mixings(self, x: Any, visit: Any) -> None:
        """Calls visit(layer, input of the layer) for every mixing on the way of the images x."""
        mixings = {id(layer) for layer in self.mixing_layers()}

        def look(layer: Any, x: Any) -> tuple[Any, float]:
            if id(layer) in mixings:
                visit(layer, x)
            return layer(x), 0.0

        self._walk(keras.ops.convert_to_tensor(x, dtype=self.compute_dtype), look)

    def _walk(self, x: Any, visit: Any) -> tuple[Any, Any]:
        """From images to z through visit(layer, x) = (y, log_det), adding up log_det over everything but the batch."""
        x, total = visit(self.logit, x)
        total, parts = _per_image(total), []
        for level in range(self.levels):
            x = self.squeezes[level](x)
            for layer in self._layers_of(level):
                x, log_det = visit(layer, x)
                total = total + _per_image(log_det)
            if level < self.levels - 1:
                x, done = keras.ops.split(x, [x.shape[-1] - x.shape[-1] // 2], axis=-1)
                parts.append(_flat(done))
        return keras.ops.concatenate([*parts, _flat(x)], axis=-1), total

    def inverse(self, y: Any) -> Any:
        """Images from z."""
        y = keras.ops.convert_to_tensor(y, dtype=self.compute_dtype)
        shapes = self._part_shapes()
        cuts = [math.prod(shape) for shape in shapes]
        offsets = [sum(cuts[:i]) for i in range(len(cuts))]
        parts = [
            keras.ops.reshape(y[..., start : start + cut], (-1, *shape))
            for start, cut, shape in zip(offsets, cuts, shapes, strict=True)
        ]
        x = parts.pop()
        for level in reversed(range(self.levels)):
            if level < self.levels - 1:
                x = keras.ops.concatenate([x, parts.pop()], axis=-1)
            for layer in reversed(self._layers_of(level)):
                x = layer.inverse(x)
            x = self.squeezes[level].inverse(x)
        return self.logit.inverse(x)

    def _part_shapes(self) -> list[tuple[int, int, int]]:
        """The shapes of the parts of z before they are flattened, from the finest to the coarsest."""
        height, width, channels = self.image_shape
        shapes = []
        for level in range(self.levels):
            height, width, channels = height // 2, width // 2, channels * 4
            if level < self.levels - 1:
                shapes.append((height, width, channels // 2))
                channels -= channels // 2
        return [*shapes, (height, width, channels)]

    def compute_output_shape(self, input_shape: Any) -> Any:
        return (input_shape[0], math.prod(input_shape[1:]))

    def inverse_output_shape(self, output_shape: Any) -> Any:
        """The shape of the images for z of shape `(batch, D)`."""
        return (output_shape[0], *self.image_shape)

    def get_config(self) -> dict[str, Any]:
        mixing = self.mixing if isinstance(self.mixing, str) else keras.saving.serialize_keras_object(self.mixing)
        return {
            **super().get_config(),
            "levels": self.levels,
            "steps": self.steps,
            "hidden": self.hidden,
            "mixing": mixing,
            "squash": self.logit.squash,
            "seed": self.seed,
            "coupling": self.coupling,
        }


def _flat(x: Any) -> Any:
    return keras.ops.reshape(x, (-1, math.prod(x.shape[1:])))


def _per_image(log_det: Any) -> Any:
    """The sum over everything but the batch."""
    if isinstance(log_det, float) or len(log_det.shape) <= 1:
        return log_det
    return keras.ops.sum(log_det, axis=tuple(range(1, len(log_det.shape))))
