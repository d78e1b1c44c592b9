"""The multi-scale architecture of RealNVP and Glow as one invertible layer: images to vectors and back."""

import math
import random
from collections.abc import Callable
from typing import Any, Literal, Self, Unpack

import keras

from keras_auxref.certificate import Certificate
from keras_auxref.flows.chain import summed_to
from keras_auxref.flows.copies import Hidden, serialized
from keras_auxref.flows.coupling import check_coupling, coupling_config, coupling_of_config, coupling_template
from keras_auxref.flows.mixing import Part, check_mixing, mixing_template
from keras_auxref.flows.parts import AffineCoupling, Squeeze
from keras_auxref.flows.parts.prior import GaussianPrior, split_prior
from keras_auxref.flows.preprocessing import Logit
from keras_auxref.flows.repeat import Repeat
from keras_auxref.flows.steps import Visit, each_mixing, flow_steps, walk_mixings
from keras_auxref.invertible import Invertible
from keras_auxref.layers.checks import last_axis
from keras_auxref.ops import backend
from keras_auxref.ops.checks import whole_number
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, LayerArguments, Shape, Tensor

PRIORS = ("standard", "learned")


@keras.saving.register_keras_serializable(PACKAGE)
class MultiScale(Invertible, keras.layers.Layer):
    """Images of shape (height, width, channels) in [0, 1] to vectors z of the same number of entries, and back.

        logit → L levels of: squeeze 2×2 pixels into channels → K steps of (ActNorm → mixing → coupling) → split

    After every level but the last, half of the channels become entries of z and the other half go on. With `prior="learned"`
    each part of z first passes an affine map: after a split its shift and scale are a convolution of the half that goes on, and
    after the last level every entry has its own. This is a Gaussian prior with a learned mean and standard deviation, written
    as a layer, so that z itself stays standard normal.

    Args:
        levels: The number L of levels; height and width must be divisible by 2ᴸ.
        steps: The number K of steps of each level.
        hidden: Channels of the hidden layers of the coupling networks.
        mixing: One of `flows.MIXINGS`, or an `Invertible` Keras layer as a template, of which every step gets a copy.
        squash: See `Logit`.
        seed: Seed of the orthogonal starts of the mixings, the same for every kind of mixing.
        coupling: One of `flows.COUPLINGS`, or an `Invertible` Keras layer as a template.
        unroll: See `Repeat`.
        remat: See `Repeat`.
        context: The number of entries of a context that the networks of couplings see, or None.
        prior: `"standard"` or `"learned"`, see above.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        inputs: Tensor of shape `(batch, height, width, channels)`.

    Output: A tensor of shape `(batch, height·width·channels)`.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.flows import MultiScale
    >>> flow, x = MultiScale(levels=1, steps=1, hidden=4), np.full((2, 4, 4, 3), 0.5, "float32")
    >>> z = flow(x)
    >>> z.shape, np.allclose(flow.inverse(z), x, atol=1e-5)
    (TensorShape([2, 48]), True)
    """

    event_ndims = 3
    inverse_event_ndims = 1

    def __init__(
        self,
        levels: int = 3,
        steps: int = 8,
        hidden: int = 64,
        mixing: Part = "aux_factored",
        squash: float = 0.9,
        seed: int | None = None,
        coupling: Part = "affine",
        unroll: bool | None = None,
        remat: bool | Literal["inverse"] = False,
        context: int | None = None,
        prior: str = "standard",
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        super().__init__(**kwargs)
        if prior not in PRIORS:
            raise ValueError(f"Unknown prior. Expected one of {list(PRIORS)}. Received: {prior!r}")
        self.levels, self.steps = whole_number("levels", levels), whole_number("steps", steps)
        self.hidden, self.unroll, self.remat = whole_number("hidden", hidden), unroll, remat
        self._parts = Hidden((check_mixing(mixing), check_coupling(coupling)))
        self.context, self.prior = context, prior
        self.priors: list[GaussianPrior | AffineCoupling] = []
        self.seed = random.randint(1, 2**31 - 1) if seed is None else int(seed)
        dtype = self.dtype_policy
        self.logit = Logit(squash, name="logit", dtype=dtype)
        self.squeezes = [Squeeze(name=f"squeeze_{level + 1}", dtype=dtype) for level in range(levels)]
        seeds = random.Random(self.seed)
        self.steps_of_levels = [self._level(level + 1, seeds.randrange(2**31)) for level in range(levels)]
        self.supports_xla = all(steps.supports_xla for steps in self.steps_of_levels)

    @property
    def mixing(self) -> Part:
        """The name of the mixing, or its template."""
        return self._parts.value[0]

    @property
    def coupling(self) -> Part:
        """The name of the coupling, or its template."""
        return self._parts.value[1]

    def _level(self, level: int, seed: int) -> Repeat:
        mixing = mixing_template(self.mixing, seed, self.dtype_policy)
        coupling = coupling_template(self.coupling, self.hidden, self.dtype_policy, self.context)
        return flow_steps(mixing, coupling, self.steps, f"level_{level}", self.dtype_policy, self.unroll, self.remat)

    def build(self, input_shape: tuple[int, ...]) -> None:
        multiple = 2**self.levels
        if len(input_shape) != 4 or None in input_shape[1:] or any(n % multiple for n in input_shape[1:3]):
            raise ValueError(
                "Every level halves height and width. Expected shape (batch, height, width, channels) with height and width "
                f"divisible by {multiple} for levels={self.levels}. Received: {tuple(input_shape)}"
                f"{_padding(tuple(input_shape), multiple)}"
            )
        shape: Any = tuple(input_shape)
        self.image_shape = shape[1:]
        self.logit.build(shape)
        for level in range(self.levels):
            self.squeezes[level].build(shape)
            shape = tuple(self.squeezes[level].compute_output_shape(shape))
            self.steps_of_levels[level].build(shape)
            if self.prior == "learned":
                self.priors.append(self._prior(level, shape))
            if level < self.levels - 1:
                shape = (*shape[:-1], shape[-1] - shape[-1] // 2)

    def _prior(self, level: int, shape: Shape) -> GaussianPrior | AffineCoupling:
        top, dtype = level == self.levels - 1, self.dtype_policy
        layer = GaussianPrior(self.context, dtype=dtype) if top else split_prior(last_axis(self, shape), self.context, dtype)
        layer.build(shape)
        return layer

    def inverse_parts(self) -> list[Invertible]:
        """The layers that `inverse` runs through."""
        return [self.logit, *self.squeezes, *self.steps_of_levels, *self.priors]

    def call(self, inputs: Tensor, training: bool | None = None, context: Tensor | None = None) -> Tensor:
        def steps(layer: Repeat, x: Tensor) -> Tensor:
            return layer(x, training=training, context=context)

        return self._walk(self.logit(inputs), steps, lambda layer, x: layer(x, context=context))

    def forward_and_log_det(
        self, x: Tensor, training: bool | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """z and log|det ∂z/∂x|, of shapes `(batch, D)` and `(batch,)`."""
        x, log_det = self.logit.forward_and_log_det(keras.ops.convert_to_tensor(x, dtype=self.compute_dtype))
        total = [summed_to(log_det, 1)]

        def steps(layer: Any, x: Tensor) -> Tensor:
            x, log_det = layer.forward_and_log_det(x, training=training, context=context)
            total.append(summed_to(log_det, 1))
            return x

        z = self._walk(x, steps, steps)
        return z, sum(total[1:], total[0])

    def initialize(self, x: Tensor, context: Tensor | None = None) -> None:
        """Starts every ActNorm from data: each channel that leaves it has mean 0 and variance 1 on these images."""

        def steps(layer: Repeat, x: Tensor) -> Tensor:
            return layer.initialize(x, context=context)

        self._walk(self.logit(keras.ops.convert_to_tensor(x, dtype=self.compute_dtype)), steps)

    @property
    def initialized(self) -> bool:
        """True when every ActNorm has been started from data."""
        return all(steps.initialized for steps in self.steps_of_levels)

    def mixing_certificates(self) -> dict[str, Certificate]:
        """The certificate of every mixing, in order from the image, by names such as `level_1_step_3_mixing`."""
        found: dict[str, Certificate] = {}
        for steps in self.steps_of_levels:
            found.update(each_mixing(steps, lambda layer: layer.certificate()))
        return found

    def walk_mixings(self, x: Tensor, visit: Visit) -> None:
        """Calls visit(name, layer, input of the layer) for every mixing that the images x pass through."""
        x = self.logit(keras.ops.convert_to_tensor(x, dtype=self.compute_dtype))
        self._walk(x, lambda layer, x: walk_mixings(layer, x, visit))

    def _walk(
        self, x: Tensor, steps: Callable[[Any, Tensor], Tensor], prior: Callable[[Any, Tensor], Tensor] | None = None
    ) -> Tensor:
        """From the logits of images to z: `steps(layer, x)` runs the steps of a level, `prior(layer, x)` its prior."""
        parts = []
        for level in range(self.levels):
            x = steps(self.steps_of_levels[level], self.squeezes[level](x))
            x = prior(self.priors[level], x) if prior and self.priors else x
            if level < self.levels - 1:
                x, done = backend.split(x, [x.shape[-1] - x.shape[-1] // 2])
                parts.append(_flat(done))
        return keras.ops.concatenate([*parts, _flat(x)], axis=-1)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
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
            x = self.priors[level].inverse(x, context=context) if self.priors else x
            x = self.squeezes[level].inverse(self.steps_of_levels[level].inverse(x, context=context))
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

    def compute_output_shape(self, input_shape: tuple[int, ...]) -> Shape:
        return (input_shape[0], math.prod(input_shape[1:]))

    def inverse_output_shape(self, output_shape: Shape) -> Shape:
        """The shape of the images for z of shape `(batch, D)`."""
        return (output_shape[0], *self.image_shape)

    def get_config(self) -> Config:
        return {
            **super().get_config(),
            "levels": self.levels,
            "steps": self.steps,
            "hidden": self.hidden,
            "mixing": _serialized(self.mixing),
            "squash": self.logit.squash,
            "seed": self.seed,
            **coupling_config(self.coupling),
            "unroll": self.unroll,
            "remat": self.remat,
            "context": self.context,
            "prior": self.prior,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(**coupling_of_config(config))


def _serialized(part: Part) -> str | Config:
    if isinstance(part, str):
        return part
    return serialized(part) if isinstance(part, keras.layers.Layer) else keras.saving.serialize_keras_object(part)


def _flat(x: Tensor) -> Tensor:
    return keras.ops.reshape(x, (-1, math.prod(x.shape[1:])))


def _padding(shape: tuple[int, ...], multiple: int) -> str:
    """The line that pads images to the next size that works."""
    if len(shape) != 4 or None in shape[1:]:
        return ""
    pads = [-n % multiple for n in shape[1:3]]
    sizes = " × ".join(str(n + pad) for n, pad in zip(shape[1:3], pads, strict=True))
    line = f'np.pad(images, ((0, 0), (0, {pads[0]}), (0, {pads[1]}), (0, 0)), mode="edge")'
    return f". To pad images to {sizes}: `{line}`."
