"""Glow with auxiliary reflections in the place of 1×1 convolutions."""

import math
from collections.abc import Callable
from typing import Any

import keras

from keras_auxref._keras import PACKAGE
from keras_auxref.flows import images as image_data
from keras_auxref.flows.compiled import compiled
from keras_auxref.flows.dequantisation import VariationalDequantisation, check_dequantisation
from keras_auxref.flows.diagnostics import Branches, branches
from keras_auxref.flows.mixing import check_mixing, supports_xla
from keras_auxref.flows.multi_scale import MultiScale
from keras_auxref.flows.preprocessing import as_fractions, dequantise, nearest_values
from keras_auxref.flows.randomness import normal, uniform
from keras_auxref.flows.training import LikelihoodModel
from keras_auxref.kernels import Certificate
from keras_auxref.ops._checks import require_tensorflow

EVALUATION_SEED = (0, 0)


@keras.saving.register_keras_serializable(PACKAGE)
class Glow(LikelihoodModel):
    """A normalizing flow for images, trained by maximum likelihood: z = n(x) with z ~ N(0, I).

        log p(x) = log N(n(x); 0, I) + log|det ∂n/∂x|

    n is the multi-scale architecture of Kingma & Dhariwal: L levels of K steps, each ActNorm → a map between the channels of
    every pixel (`mixing`) → coupling. `fit(images)` minimises bits per dimension. The first `fit` starts every ActNorm
    from data, and compiles the model with `Glow.optimizer()` if `compile` has not been called.

    **What to give it.** Integers 0 … 2ᵇ − 1, that is `uint8` for the default of 8 bits, everywhere. Numbers in [0, 1] are the
    same images with black at 0 and white at 1: k/(2ᵇ − 1) is the integer k. `decode` and `sample` return such numbers;
    `np.round(255 * images).astype("uint8")` makes integers of them. `log_prob` and `encode` take every pixel where it is.
    `fit`, `evaluate` and `bits_per_dim` take the nearest of the 2ᵇ values and spread it by noise over its share of the line, from
    (k − ½)/(2ᵇ − 1) to (k + ½)/(2ᵇ − 1) (`dequantisation`). Images out of range, such as floating-point ones in
    0 … 255, in [−1, 1] or with NaN, or 8-bit ones where `bits=5`, are refused with a `ValueError`. `fit` and `evaluate` look at
    their first batch. Inside of a `tf.function` and in a served model nothing can be refused, and an impossible image has the
    log-density −∞ and ∞ bits.

    **Backends.** TensorFlow, JAX (compiled by `jax.jit`) and torch (eagerly), with the mixings whose mathematics runs there; a
    `.keras` file that one wrote loads on the others. `sample(seed=…)`, `evaluate` and `bits_per_dim` draw the same numbers on
    each. The noise of training comes from `keras.random` and differs. `bijector` and `distribution` are TensorFlow's.

    With `mixing="aux"` nothing proves that the flow is a bijection: see `certificates` and `branches`, and the note at
    `bits_per_dim`. All other mixings are provably invertible.

    Args:
        image_shape: (height, width, channels); height and width divisible by 2^levels.
        levels: The number L of levels.
        steps: The number K of steps in each level.
        hidden: Channels of the hidden layers of the coupling networks, C in the paper.
        mixing: `"aux_factored"`, a provably invertible factored reflection, started at a random orthogonal Q;
            `"aux_factored_right"`, its one-sided form; `"aux"`, an auxiliary reflection with free W, started at W = I − Q;
            `"aux_spectral"`, the paper's provably invertible one, with a fixed Q before it; `"aux_relaxed_cayley"`, a larger
            provably invertible family, started at Q; `"householder"`, as many reflections as channels; `"conv"`, Glow's
            invertible 1×1 convolution; `"qr"`, the same in the form Q R; `"aux_factored_qr"`, R after a factored reflection;
            `"fixed"`, Q itself; `"permutation"`, the channels in reverse, as in NICE and RealNVP. Or a `kernels.Spectral` or
            `kernels.RelaxedCayley` instance.
        bits: The number b of bits of a pixel.
        squash: The line of all 2ᵇ values is squashed by this factor about its middle before the logit, which is infinite at
            its ends.
        seed: Seed of the orthogonal starts Q, the same for every mixing.
        coupling: `"affine"`, (x_b + t)·s, of RealNVP and Glow; `"additive"`, x_b + t, of NICE; `"logistic_mixture"`, the logit of
            the distribution function of a mixture of logistics, of Flow++. See the layers of these names.
        dequantisation: `"uniform"` noise, or `"variational"`: noise from a conditional flow that is trained with the rest, see
            `flows.VariationalDequantisation`. It matters to `fit`, `evaluate`, `predict` and `bits_per_dim` only.
        **kwargs: Arguments of `keras.Model`: `name`, `dtype` (float32 or float64), …

    Example:
    >>> import numpy as np
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
        image_shape: Any,
        levels: int = 3,
        steps: int = 8,
        hidden: int = 64,
        mixing: Any = "aux_factored",
        bits: int = 8,
        squash: float = 0.9,
        seed: int | None = None,
        coupling: str = "affine",
        dequantisation: str = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.image_shape = tuple(int(n) for n in image_shape)
        if len(self.image_shape) != 3 or min(self.image_shape) < 1:
            raise ValueError(f"`image_shape` must be (height, width, channels). Received: {tuple(image_shape)}")
        if not isinstance(bits, int) or not 1 <= bits <= 16:
            raise ValueError(f"`bits` must be a whole number between 1 and 16. Received: {bits!r}")
        if self.compute_dtype not in ("float32", "float64"):
            raise ValueError(f"A likelihood needs dtype float32 or float64. Received: {self.compute_dtype}")
        if not 0 < squash < 1:
            raise ValueError(f"`squash` must lie strictly between 0 and 1. Received: {squash}")
        self.bits, self.squash, self.mixing = bits, float(squash), check_mixing(mixing)
        within = self.squash * (2**bits - 1) / 2**bits  # the shares of 2ᵇ values are wider than [0, 1], by one of them
        common = {"dtype": self.dtype_policy, "name": "flow"}
        self.flow = MultiScale(levels, steps, hidden, self.mixing, within, seed, coupling, **common)
        self.flow.build((None, *self.image_shape))
        self.dequantisation = check_dequantisation(dequantisation)
        if self.dequantisation == "variational":
            self.dequantiser = VariationalDequantisation(hidden, dtype=self.dtype_policy, name="dequantiser")
            self.dequantiser.build((None, *self.image_shape))
        self.noise = keras.random.SeedGenerator(seed)
        self.bits_metric = keras.metrics.Mean(name="bits_per_dim")
        self.supports_jit = keras.backend.backend() != "tensorflow" or supports_xla(self.mixing)
        self.built = True

    @property
    def initialized(self) -> bool:
        """True when every ActNorm has been started from data."""
        return self.flow.initialized

    @property
    def dimension(self) -> int:
        """The number of entries D of an image."""
        return math.prod(self.image_shape)

    # ------------------------------------------------------------------------------------------------------- training

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Bits per dimension of every image, of shape `(batch,)`: the loss. The noise is new in training, and fixed otherwise."""
        inputs = image_data.images_of(inputs)
        self._check_images(inputs)
        shape = keras.ops.shape(inputs)
        if training:
            noise = keras.random.uniform(shape, dtype=self.compute_dtype, seed=self.noise)
        else:
            noise = uniform(shape, EVALUATION_SEED, self.compute_dtype)
        x, log_q = self._dequantised(inputs, noise)
        z, log_det = self.flow.forward_and_log_det(x, training=training)
        return math.log2(2**self.bits - 1) - (log_normal(z) + log_det - log_q) / (self.dimension * math.log(2))

    def initialize(self, images: Any) -> None:
        """Starts every ActNorm from these images; a few hundred are enough. The first `fit` does this with its first images."""
        images = self._images(images)
        noise = uniform(keras.ops.shape(images), EVALUATION_SEED, self.compute_dtype)
        self.flow.initialize(self._dequantised(images, noise)[0])

    def _dequantised(self, images: Any, noise: Any) -> tuple[Any, Any]:
        """Images with noise inside of each value, made of uniform noise, and its log-density log q: 0 where it is uniform."""
        log_q: Any = 0.0
        if self.dequantisation == "variational":
            noise, log_q = self.dequantiser(nearest_values(images, self.bits, self.compute_dtype), noise)
        return dequantise(images, noise, self.bits, self.compute_dtype), log_q

    def _images(self, x: Any) -> Any:
        """Checked images as a tensor."""
        x = keras.ops.convert_to_tensor(image_data.images_of(x))
        self._check_images(x)
        return x

    # ------------------------------------------------------------------------------------------------ what a flow does

    def encode(self, x: Any) -> tuple[Any, Any]:
        """z = n(x) of shape `(batch, D)` and log|det ∂n/∂x| of shape `(batch,)`.

        Integers k are the numbers x = k/(2ᵇ − 1). An impossible image, where it is not refused, has no z: NaN, and −∞.
        """
        return self._compiled_encode(self._continuous(x))

    def decode(self, z: Any) -> Any:
        """Images n⁻¹(z) from z of shape `(batch, D)`, as numbers: a little outside of [0, 1] for an extreme z.

        The vectors of an image for which an auxiliary reflection has no preimage that the inverse finds become NaN.
        """
        z = keras.ops.convert_to_tensor(z, dtype=self.compute_dtype)
        if len(z.shape) != 2 or z.shape[-1] != self.dimension:
            raise ValueError(f"`z` does not fit this model. Expected shape (batch, {self.dimension}). Received: {tuple(z.shape)}")
        return self._compiled_decode(z)

    def log_prob(self, x: Any) -> Any:
        """log p(x), the density at the images themselves, of shape `(batch,)`: no noise is added.

        Integers k are the numbers x = k/(2ᵇ − 1), so that `log_prob(images)` is `log_prob(images / 255)` for 8 bits, and both are
        `distribution().log_prob(images / 255)`. An impossible image, where it is not refused, has −∞.
        """
        return self._compiled_log_prob(self._continuous(x))

    def bits_per_dim(self, x: Any) -> Any:
        """Bits per dimension of images of 2ᵇ values per pixel, of shape `(batch,)`, with a fixed noise inside of each value.

            (D log(2ᵇ − 1) + log q(u|k) − log p((k + u − ½)/(2ᵇ − 1))) / (D log 2),      u in [0, 1)

        log q is 0 for uniform noise, and the log-density of u for variational dequantisation. For a flow whose every mixing has
        a certificate this is an upper bound on −log₂ P(image)/D, on average over the noise.
        **With `mixing="aux"` nothing guarantees that**: where several x share one n(x), p integrates to their mean number and not
        to 1. Restricted to the x that `decode(encode(x))` returns it does integrate to 1, so that the number is right for
        images which are returned, and for these only. `branches` measures both, layer by layer.
        """
        return self._compiled_bits_per_dim(self._images(x))

    def sample(self, n: int, seed: int | None = None, temperature: float = 1.0) -> Any:
        """n images n⁻¹(temperature · ε), ε ~ N(0, I), cut to [0, 1]. The same seed gives the same ε on every backend."""
        if not temperature >= 0:
            raise ValueError(f"`temperature` must not be negative. Received: {temperature}")
        z = temperature * normal(n, self.dimension, self.noise.next() if seed is None else (seed, 0), self.compute_dtype)
        return keras.ops.clip(self._compiled_decode(z), 0, 1)

    def _encode(self, x: Any) -> Any:
        z, log_det = self.flow.forward_and_log_det(x)
        impossible = self.flow.logit.impossible(x, axis=(1, 2, 3))
        return keras.ops.where(impossible[:, None], float("nan"), z), log_det

    def _decode(self, z: Any) -> Any:
        return self.flow.inverse(z)

    def _log_prob(self, x: Any) -> Any:
        z, log_det = self.flow.forward_and_log_det(x)
        return log_normal(z) + log_det

    def _bits_per_dim(self, x: Any) -> Any:
        return self(x, training=False)

    @compiled
    def _compiled_encode(self, x: Any) -> Any:
        return self._encode(x)

    @compiled
    def _compiled_decode(self, z: Any) -> Any:
        return self._decode(z)

    @compiled
    def _compiled_log_prob(self, x: Any) -> Any:
        return self._log_prob(x)

    @compiled
    def _compiled_bits_per_dim(self, x: Any) -> Any:
        return self._bits_per_dim(x)

    def _continuous(self, x: Any) -> Any:
        """Checked images as numbers in [0, 1]."""
        x = keras.ops.convert_to_tensor(image_data.images_of(x))
        image_data.check_shape(x, self.image_shape)
        image_data.check_values(x, self.bits, image_data.support(self.flow.logit.squash))
        return as_fractions(x, self.bits, self.compute_dtype)

    # ---------------------------------------------------------------------------------------------------- TFP and proof

    def bijector(self, **kwargs: Any) -> Any:
        """A new TFP bijector over the weights of this model, from images in [0, 1] to z: a view, never a copy."""
        return self.flow.bijector(**kwargs)

    def distribution(self) -> Any:
        """The flow as a TFP distribution of images, over the weights of this model. Make a new one after training steps."""
        require_tensorflow("Glow.distribution")
        import tensorflow as tf
        import tensorflow_probability as tfp

        zero = tf.zeros(self.dimension, self.compute_dtype)
        base = tfp.distributions.MultivariateNormalDiag(loc=zero, scale_diag=tf.ones_like(zero))
        return tfp.distributions.TransformedDistribution(base, tfp.bijectors.Invert(self.bijector()), name=self.name)

    def certificates(self) -> dict[str, Certificate]:
        """What is proven about the invertibility of every mixing, by name of the layer. All else inverts by construction."""
        return {layer.name: layer.certificate() for layer in self.flow.mixing_layers()}

    def branches(self, images: Any, counted: int = 32, seed: int = 0) -> list[Branches]:
        """How many preimages the auxiliary reflections have on the way of these images, and whether the inverse returns x.

        This turns the conjecture that training keeps unconstrained auxiliary reflections invertible into a measurement.

        Args:
            images: Images as for `encode`.
            counted: The number of vectors, drawn at random, whose preimages are counted in each layer.
            seed: Seed of that draw.

        Returns:
            A list of `flows.Branches`, one for every auxiliary reflection; empty for the other mixings.
        """
        return branches(self.flow, self._continuous(images), counted, seed)

    def export(self, filepath: Any, format: str = "tf_saved_model", **kwargs: Any) -> None:
        """`keras.Model.export`: `serve` answers with the bits per dimension of images in [0, 1].

        `export_saved_model` writes all that a flow answers, with what depends on weights alone computed beforehand.
        """
        if kwargs.get("input_signature") is None:
            kwargs["input_signature"] = [keras.InputSpec(shape=(None, *self.image_shape), dtype=self.compute_dtype)]
        super().export(filepath, format=format, **kwargs)

    def export_signatures(self) -> dict[str, tuple[Callable[..., dict[str, Any]], dict[str, tuple[Any, str]]]]:
        """What a served model answers: by name, a function of named tensors and the shape and dtype of each of them.

        `export_saved_model` asks a model for this method, and so may any other exporter. Images are numbers in [0, 1].
        """
        dtype = self.compute_dtype
        images, z = {"images": ((None, *self.image_shape), dtype)}, {"z": ((None, self.dimension), dtype)}
        numbers = {"n": ((), "int32"), "seed": ((), "int64"), "temperature": ((), dtype)}

        def encode(images: Any) -> dict[str, Any]:
            z, log_det = self._encode(images)
            return {"z": z, "log_det": log_det}

        def log_prob(images: Any) -> dict[str, Any]:
            return {"log_prob": self._log_prob(images)}

        def decode(z: Any) -> dict[str, Any]:
            return {"images": self._decode(z)}

        def sample(n: Any, seed: Any, temperature: Any) -> dict[str, Any]:
            import tensorflow as tf

            tf.debugging.assert_non_negative(temperature, "`temperature` must not be negative.")
            z = temperature * normal(n, self.dimension, tf.stack([seed, tf.zeros_like(seed)]), dtype)
            return {"images": keras.ops.clip(self._decode(z), 0, 1)}

        return {
            "serving_default": (log_prob, images),
            "log_prob": (log_prob, images),
            "encode": (encode, images),
            "decode": (decode, z),
            "sample": (sample, numbers),
        }

    def get_config(self) -> dict[str, Any]:
        flow = self.flow.get_config()
        return {
            **super().get_config(),
            "image_shape": self.image_shape,
            "bits": self.bits,
            "squash": self.squash,
            **{key: flow[key] for key in ("levels", "steps", "hidden", "mixing", "seed", "coupling")},
            "dequantisation": self.dequantisation,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "Glow":
        return cls(**config)


def log_normal(z: Any) -> Any:
    """log N(z; 0, I)."""
    return -0.5 * keras.ops.sum(keras.ops.square(z), axis=-1) - 0.5 * z.shape[-1] * math.log(2 * math.pi)
