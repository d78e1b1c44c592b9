"""Glow with auxiliary reflections instead of 1×1 convolutions."""

import math
from typing import Any, Literal, Unpack

import keras

from keras_auxref.certificate import Certificate
from keras_auxref.flows import images as image_data
from keras_auxref.flows.batches import spec_of
from keras_auxref.flows.conditions import Condition
from keras_auxref.flows.coupling import coupling_config, coupling_of_config
from keras_auxref.flows.dequantisation import VariationalDequantisation, check_dequantisation
from keras_auxref.flows.diagnostics import Branches, branches
from keras_auxref.flows.mixing import Part
from keras_auxref.flows.model import FlowModel, Signatures, log_normal
from keras_auxref.flows.multi_scale import MultiScale
from keras_auxref.flows.old_files import stack_old_steps
from keras_auxref.flows.preprocessing import as_fractions, dequantise, nearest_values
from keras_auxref.flows.randomness import uniform
from keras_auxref.layers.checks import require_precision
from keras_auxref.ops import backend
from keras_auxref.ops.backend import compiled
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, Data, LayerArguments, PathLike, Tensor

EVALUATION_SEED = (0, 0)


@keras.saving.register_keras_serializable(PACKAGE)
class Glow(FlowModel):
    """A normalizing flow for images, trained by maximum likelihood: z = n(x) with z ~ N(0, I).

        log p(x) = log N(n(x); 0, I) + log|det ∂n/∂x|

    n is the multi-scale architecture of Kingma & Dhariwal: L levels of K steps, each ActNorm → a map between the channels of
    every pixel (`mixing`) → coupling. `fit(images)` minimises bits per dimension. The first `fit` initialises every ActNorm
    from data, and compiles the model with `Glow.optimizer()` if `compile` has not been called. That averages the weights, and
    `fit` leaves their average in the model.

    **What to give it.** Integers from 0 to 2ᵇ − 1: `uint8` for the default of 8 bits. Or numbers in [0, 1], from black to white:
    k/(2ᵇ − 1) stands for the integer k. `decode` and `sample` return such numbers;
    `np.round(255 * images).astype("uint8")` converts them to integers. `log_prob` and `encode` use every pixel as it is.
    `fit`, `evaluate` and `bits_per_dim` round to the nearest of the 2ᵇ values and add noise that spreads it over the interval
    from (k − ½)/(2ᵇ − 1) to (k + ½)/(2ᵇ − 1) (`dequantisation`). Images out of range, such as floating-point ones in
    0 … 255, in [−1, 1] or with NaN, or 8-bit ones where `bits=5`, are refused with a `ValueError`. `fit` and `evaluate` look at
    all of an array, and at the first batch of anything else. Inside a `tf.function` and in a served model values cannot be
    checked; an impossible image then has the log-density −∞ and ∞ bits.

    **Backends.** TensorFlow, JAX (compiled by `jax.jit`) and torch (eagerly). A `.keras` file written on one loads on the others.
    `sample(seed=…)`, `evaluate` and `bits_per_dim` draw the same numbers on each; the noise of training comes from
    `keras.random` and differs. `bijector` and `distribution` need TensorFlow.

    With `mixing="aux"` nothing proves that the flow is a bijection: see `certificates` and `branches`, and the note at
    `bits_per_dim`. `"conv"` and `"aux_conv"` are bijections while their matrix is invertible. All other mixings are provably
    invertible for all weights.

    Args:
        image_shape: (height, width, channels); height and width divisible by 2^levels.
        levels: The number L of levels; by default the most that the size allows, up to 3.
        steps: The number K of steps in each level.
        hidden: Channels of the hidden layers of the coupling networks, C in the paper.
        mixing: `"aux_factored"`, a provably invertible factored reflection, started at a random orthogonal Q;
            `"aux_factored_right"`, its one-sided form; `"aux"`, an auxiliary reflection with free W, started at W = I − Q;
            `"aux_spectral"`, the paper's provably invertible one, with a fixed Q before it; `"aux_relaxed_cayley"`, a larger
            provably invertible family, started at Q; `"householder"`, as many reflections as channels; `"conv"`, Glow's
            invertible 1×1 convolution; `"aux_conv"`, a reflection before that convolution; `"qr"`, a convolution in the form
            Q R; `"aux_factored_qr"`, R after a factored reflection; `"fixed"`, Q itself; `"permutation"`, the channels in
            reverse, as in NICE and RealNVP. Or a template, any `Invertible` Keras layer that keeps the shape of images, of which
            every step gets a copy: `FactoredReflection(margin=0.3)`.
        bits: The number b of bits of a pixel.
        squash: All values are scaled by this factor about ½ before the logit, which is infinite at 0 and 1.
        seed: Seed of the orthogonal starts Q, the same for every mixing.
        coupling: `"affine"`, (x_b + t)·s, of RealNVP and Glow; `"additive"`, x_b + t, of NICE; `"spline"`, a monotone
            rational-quadratic spline; `"logistic_mixture"`, the logit of the distribution function of a mixture of logistics, of
            Flow++. See the layers of these names. Or a template, as for `mixing`: `AffineCoupling(hidden=128)`.
        dequantisation: `"uniform"` noise, or `"variational"`: noise from a conditional flow that is trained with the rest, see
            `flows.VariationalDequantisation`. It matters to `fit`, `evaluate`, `predict` and `bits_per_dim` only.
        unroll: Whether to write the steps of a level out instead of running them as one loop; by default the faster of the two.
            See `flows.Repeat`.
        remat: Whether to compute every step again in the backward pass instead of keeping its activations: less memory, more
            time. `"inverse"` keeps only the input and the output of every level, for certified mixings: memory hardly grows
            with `steps`. See `flows.Repeat`.
        context: The number k of entries of a context c, or None. With a context the flow is a conditional density p(x | c): all
            coupling networks see c, the same at every pixel. In `fit(images, y)`, y of shape `(batch, k)` is the context; every
            other method has an argument `context`. Without a context, y is ignored.
        classes: The number of labels, for a context that is one of the labels 0 … classes − 1; or None.
        prior: `"standard"`, or `"learned"`: each part of z then has a learned mean and standard deviation; at a split these
            are a convolution of the half that goes on. See `flows.MultiScale`.
        **kwargs: Arguments of `keras.Model`: `name`, `dtype` (float32 or float64), …

    Example:
    >>> import numpy as np
    >>> from keras_auxref import Glow
    >>> model = Glow((8, 8, 3), levels=2, steps=1, hidden=8)
    >>> images = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype="uint8")
    >>> history = model.fit(images, verbose=0)
    >>> model.sample(2, seed=1).shape
    TensorShape([2, 8, 8, 3])

    Reference: Kingma & Dhariwal, "Glow: Generative Flow with Invertible 1x1 Convolutions", NeurIPS 2018; Mathiasen & Hvilshøj,
    "One Reflection Suffice", 2020, section 4.3.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        levels: int | None = None,
        steps: int = 8,
        hidden: int = 64,
        mixing: Part = "aux_factored",
        bits: int = 8,
        squash: float = 0.9,
        seed: int | None = None,
        coupling: Part = "affine",
        dequantisation: str = "uniform",
        unroll: bool | None = None,
        remat: bool | Literal["inverse"] = False,
        context: int | None = None,
        classes: int | None = None,
        prior: str = "standard",
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        super().__init__(**kwargs)
        self.image_shape = _checked_shape(image_shape)
        if not isinstance(bits, int) or not 1 <= bits <= 16:
            raise ValueError(f"`bits` must be a whole number between 1 and 16. Received: {bits!r}")
        require_precision(self)
        if not 0 < squash < 1:
            raise ValueError(f"`squash` must lie strictly between 0 and 1. Received: {squash}")
        self.bits, self.squash = bits, float(squash)
        within = self.squash * (2**bits - 1) / 2**bits  # the intervals of all 2ᵇ values together are wider than [0, 1]
        self.condition = Condition(context, classes, self.compute_dtype)
        common = {"context": self.condition.width, "prior": prior, "dtype": self.dtype_policy, "name": "flow"}
        levels = most_levels(self.image_shape) if levels is None else levels
        self.flow = MultiScale(levels, steps, hidden, mixing, within, seed, coupling, unroll, remat, **common)
        self.flow.build((None, *self.image_shape))
        self.dequantisation = check_dequantisation(dequantisation)
        if self.dequantisation == "variational":
            self.dequantiser = VariationalDequantisation(hidden, dtype=self.dtype_policy, name="dequantiser")
            self.dequantiser.build((None, *self.image_shape))
        self.noise = keras.random.SeedGenerator(seed)
        self.bits_metric = keras.metrics.Mean(name="bits_per_dim")
        self.supports_jit = backend.NAME != "tensorflow" or self.flow.supports_xla
        self.built = True

    @property
    def mixing(self) -> Part:
        """The name of the mixing, or its template."""
        return self.flow.mixing

    @property
    def loss_metric(self) -> keras.metrics.Mean:
        return self.bits_metric

    @property
    def dimension(self) -> int:
        """The number of entries D of an image."""
        return math.prod(self.image_shape)

    # ------------------------------------------------------------------------------------------------------- training

    def call(self, inputs: Tensor | tuple[Tensor, Tensor], training: bool | None = None) -> Tensor:
        """Bits per dimension of every image, of shape `(batch,)`: the loss. The noise is new in training, and fixed otherwise.

        With a context, of pairs (images, context).
        """
        inputs, context = self.inputs_and_context(inputs)
        return self._bits(inputs, context, training)

    def _bits(self, inputs: Tensor, context: Tensor | None, training: bool | None) -> Tensor:
        self.check_data(inputs)
        shape = keras.ops.shape(inputs)
        if training:
            noise = keras.random.uniform(shape, dtype=self.compute_dtype, seed=self.noise)
        else:
            noise = uniform(shape, EVALUATION_SEED, self.compute_dtype)
        x, log_q = self._dequantised(inputs, noise)
        z, log_det = self.flow.forward_and_log_det(x, training=training, context=context)
        return math.log2(2**self.bits - 1) - (log_normal(z) + log_det - log_q) / (self.dimension * math.log(2))

    def initialize(self, x: Tensor, context: Tensor | None = None) -> None:
        """Starts every ActNorm from these images; a few hundred are enough. The first `fit` does this with its first images."""
        images = self._images(x)
        image_data.warn_if_dark(images, self.bits)
        noise = uniform(keras.ops.shape(images), EVALUATION_SEED, self.compute_dtype)
        self.flow.initialize(self._dequantised(images, noise)[0], context=self._rows(context, images))

    def _dequantised(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor | float]:
        """Images with noise within each value, made of uniform noise, and its log-density log q: 0 where it is uniform."""
        log_q: Tensor | float = 0.0
        if self.dequantisation == "variational":
            noise, log_q = self.dequantiser(nearest_values(images, self.bits, self.compute_dtype), noise)
        return dequantise(images, noise, self.bits, self.compute_dtype), log_q

    def check_data(self, x: Tensor) -> None:
        """Refuses what is not a batch of images of this model, or has values out of range."""
        image_data.check_shape(x, self.image_shape)
        image_data.check_values(x, self.bits, image_data.levels(self.bits))

    def sure_to_fit(self, data: Data) -> bool:
        if not image_data.sure_to_fit(data, self.bits):
            return False
        image_data.check_spec(spec_of(data), self.image_shape)
        return True

    def _images(self, x: Tensor) -> Tensor:
        """Checked images as a tensor."""
        x = keras.ops.convert_to_tensor(image_data.as_batch(x))
        self.check_data(x)
        return x

    # ------------------------------------------------------------------------------------------------ what a flow does

    def encode(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """z = n(x) of shape `(batch, D)` and log|det ∂n/∂x| of shape `(batch,)`.

        Integers k are the numbers x = k/(2ᵇ − 1). An impossible image, where it is not refused, has no z: NaN, and −∞.
        """
        return super().encode(x, context)

    def decode(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        """Images n⁻¹(z) from z of shape `(batch, D)`, as numbers: a little outside [0, 1] for an extreme z.

        Where the inverse of an auxiliary reflection finds no preimage, the result is NaN.
        """
        return super().decode(z, context)

    def log_prob(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """log p(x), the density at the images themselves, of shape `(batch,)`: no noise is added.

        Integers k are the numbers x = k/(2ᵇ − 1), so that `log_prob(images)` is `log_prob(images / 255)` for 8 bits, and both are
        `distribution().log_prob(images / 255)`. An impossible image, where it is not refused, has −∞.
        """
        return super().log_prob(x, context)

    def bits_per_dim(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Bits per dimension of images of 2ᵇ values per pixel, of shape `(batch,)`, with a fixed noise within each value.

            (D log(2ᵇ − 1) + log q(u|k) − log p((k + u − ½)/(2ᵇ − 1))) / (D log 2),      u in [0, 1)

        log q is 0 for uniform noise, and the log-density of u for variational dequantisation. For a flow whose every mixing has
        a certificate this is an upper bound on −log₂ P(image)/D, on average over the noise.
        **With `mixing="aux"` nothing guarantees that**: where several x share one n(x), p integrates to their mean number instead
        of 1. Restricted to the x that `decode(encode(x))` returns, p does integrate to 1, so the number is right for those
        images only. `branches` measures both, layer by layer.
        """
        x = self._images(x)
        return self._compiled_bits_per_dim(x, self._rows(context, x))

    def typicality(self, x: Tensor, typical: Tensor | float, context: Tensor | None = None) -> Tensor:
        """How far images are from typical ones: |bits per dimension − their mean over `typical`|, of shape `(batch,)`.

        A flow may need fewer bits for simple images that it has never seen than for those it was trained on, so few bits alone do
        not mean that an image is familiar. Typical images have about the mean number of bits.

        Args:
            x: Images as for `bits_per_dim`.
            typical: Images like those of training that were not trained on, a few hundred; or their mean bits per dimension.
            context: The context of x, if the flow has one. Give the mean as a number then.

        Reference: Nalisnick, Matsukawa, Teh & Lakshminarayanan, "Detecting Out-of-Distribution Inputs to Deep Generative Models
        Using Typicality", 2019.
        """
        mean = typical if isinstance(typical, int | float) else keras.ops.mean(self.bits_per_dim(typical))
        return keras.ops.abs(self.bits_per_dim(x, context) - mean)

    @compiled
    def _compiled_bits_per_dim(self, x: Tensor, context: Tensor | None) -> Tensor:
        return self._bits(x, context, training=False)

    def _encode(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z, log_det = super()._encode(x, context)
        impossible = self.flow.logit.impossible(x, axis=(1, 2, 3))
        return keras.ops.where(impossible[:, None], float("nan"), z), log_det

    def as_samples(self, x: Tensor) -> Tensor:
        """Images cut to [0, 1]."""
        return keras.ops.clip(x, 0, 1)

    def as_events(self, x: Tensor) -> Tensor:
        """Checked images as numbers in [0, 1]."""
        x = keras.ops.convert_to_tensor(image_data.as_batch(x))
        image_data.check_shape(x, self.image_shape)
        image_data.check_values(x, self.bits, image_data.support(self.flow.logit.squash))
        return as_fractions(x, self.bits, self.compute_dtype)

    # ---------------------------------------------------------------------------------------------------- TFP and proof

    def certificates(self) -> dict[str, Certificate]:
        """What is proven about the invertibility of every mixing, by name of the layer. All else inverts by construction."""
        return self.flow.mixing_certificates()

    def branches(self, images: Tensor, counted: int = 32, seed: int = 0) -> list[Branches]:
        """How many preimages the auxiliary reflections have for these images, and whether the inverse returns x.

        This turns the conjecture that training keeps unconstrained auxiliary reflections invertible into a measurement.

        Args:
            images: Images as for `encode`.
            counted: The number of vectors, drawn at random, whose preimages are counted in each layer.
            seed: Seed of that draw.

        Returns:
            A list of `flows.Branches`, one for every auxiliary reflection; empty for the other mixings.
        """
        return branches(self.flow, self.as_events(images), counted, seed)

    def export(self, filepath: PathLike, format: str = "tf_saved_model", **kwargs: object) -> None:
        """`keras.Model.export`: `serve` returns the bits per dimension of images in [0, 1].

        `export_saved_model` writes all signatures of a flow, with everything that depends only on the weights precomputed.
        """
        if kwargs.get("input_signature") is None:
            kwargs["input_signature"] = self.input_specs(self.image_shape)
        super().export(filepath, format=format, **kwargs)

    def export_signatures(self) -> Signatures:
        """The signatures of a served model: by name, a function of named tensors and the shape and dtype of each of them.

        `export_saved_model` calls this method, and other exporters may. Images are numbers in [0, 1].
        """
        return self.signatures("images", self.image_shape)

    def get_config(self) -> Config:
        flow = self.flow.get_config()
        return {
            **super().get_config(),
            "image_shape": self.image_shape,
            "bits": self.bits,
            "squash": self.squash,
            **{key: flow[key] for key in ("levels", "steps", "hidden", "mixing", "seed", "unroll", "remat", "prior")},
            **coupling_config(self.flow.coupling),
            "dequantisation": self.dequantisation,
            "context": self.condition.size,
            "classes": self.condition.classes,
        }

    def load_own_variables(self, store: Any) -> None:
        """Also from a file of version 0.2."""
        stack_old_steps(self.flow.steps_of_levels, len(self.trainable_variables), store)
        super().load_own_variables(store)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, object] | None = None) -> "Glow":
        return cls(**coupling_of_config(config))


def _checked_shape(image_shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """(height, width, channels) as integers."""
    try:
        sizes = tuple(int(n) for n in image_shape) if not isinstance(image_shape, str) else ()
    except (TypeError, ValueError):
        sizes = ()
    if len(sizes) != 3 or min(sizes) < 1:
        raise ValueError(
            "`image_shape` must have three sizes. Expected (height, width, channels), such as (32, 32, 3). "
            f"Received: {image_shape!r}"
        )
    return sizes


def most_levels(image_shape: tuple[int, ...]) -> int:
    """The most levels, up to 3, that halve height and width of images; 1 where none does, which is then refused."""
    return max((n for n in (1, 2, 3) if not any(size % 2**n for size in image_shape[:2])), default=1)
