"""A density of vectors, trained by maximum likelihood."""

import random
from typing import Any, Self, Unpack

import keras

from keras_auxref.certificate import Certificate
from keras_auxref.flows.conditions import Condition
from keras_auxref.flows.copies import Hidden
from keras_auxref.flows.coupling import check_coupling, coupling_config, coupling_of_config, coupling_template
from keras_auxref.flows.mixing import Part, check_mixing, mixing_template
from keras_auxref.flows.model import FlowModel, Signatures, log_normal
from keras_auxref.flows.steps import each_mixing, flow_steps
from keras_auxref.flows.vectors import check_varies, check_vectors
from keras_auxref.initializers import SignedPermutation
from keras_auxref.layers.checks import require_precision
from keras_auxref.ops import backend
from keras_auxref.ops.checks import whole_number
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, LayerArguments, PathLike, Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class Flow(FlowModel):
    """A normalizing flow for vectors, trained by maximum likelihood: z = n(x) with z ~ N(0, I).

        log p(x) = log N(n(x); 0, I) + log|det ∂n/∂x|

    n is `steps` steps of ActNorm → a map of all entries (`mixing`) → coupling. `fit(x)` minimises −log p(x), in nats per vector.
    The first `fit` initialises every ActNorm from data, which standardises them, and compiles the model with `Flow.optimizer()`
    if `compile` has not been called. That averages the weights, and `fit` leaves their average in the model.

    **What to give it.** Floating-point numbers of shape `(batch, d)`, of any scale. NaN, infinity, whole numbers and other shapes
    are refused with a `ValueError`, and so are columns that are constant at the start. `fit` and `evaluate` look at all of an
    array, and at the first batch of anything else. Inside a `tf.function` and in a served model values cannot be checked.

    **Context.** With `context=k` the flow is a conditional density p(x | c) for a vector c of k numbers, with `classes=n` for a
    label 0 … n − 1, which the networks of all couplings see. In `fit(x, y)`, y is the context; every other method has an argument
    `context`. Contexts are not standardised. Without a context, y is ignored.

    **Backends.** TensorFlow, JAX and torch; a `.keras` file written on one loads on the others. `sample(seed=…)` draws the same
    numbers on each. `bijector` and `distribution` need TensorFlow.

    Args:
        d: The number of entries of a vector, 2 or more.
        steps: The number of steps.
        hidden: Units of the hidden layers of the coupling networks.
        mixing: One of `flows.MIXINGS`, see `Glow`, or a template: any `Invertible` Keras layer that keeps the shape of vectors,
            of which every step gets a copy.
        coupling: One of `flows.COUPLINGS`, or a template: `"spline"`, see `SplineCoupling`, `"affine"`, `"additive"` or
            `"logistic_mixture"`.
        context: The number k of entries of a context, or None.
        classes: The number n of labels that the flow is conditioned on, or None.
        seed: Seed of the starts of the mixings: permutations of the entries, with signs, that exchange the two halves.
        unroll: Whether to write the steps out instead of running them as a loop; by default the faster. See `flows.Repeat`.
        **kwargs: Arguments of `keras.Model`: `name`, `dtype` (float32 or float64), …

    Example:
    >>> import numpy as np
    >>> from keras_auxref import Flow
    >>> x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
    >>> model = Flow(3, steps=2, hidden=8)
    >>> history = model.fit(x, verbose=0)
    >>> model.log_prob(x).shape, model.sample(5, seed=1).shape
    (TensorShape([64]), TensorShape([5, 3]))

    Reference: Dinh, Sohl-Dickstein & Bengio, "Density Estimation using Real NVP", ICLR 2017; Durkan, Bekasov, Murray &
    Papamakarios, "Neural Spline Flows", NeurIPS 2019; Winkler, Worrall, Hoogeboom & Welling, "Learning Likelihoods with
    Conditional Normalizing Flows", 2019.
    """

    initial_size = 8192

    def __init__(
        self,
        d: int,
        steps: int = 8,
        hidden: int = 64,
        mixing: Part = "conv",
        coupling: Part = "spline",
        context: int | None = None,
        classes: int | None = None,
        seed: int | None = None,
        unroll: bool | None = None,
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        super().__init__(**kwargs)
        d, steps, hidden = whole_number("d", d, 2), whole_number("steps", steps), whole_number("hidden", hidden)
        require_precision(self)
        self.d, self.steps, self.hidden, self.unroll = d, steps, hidden, unroll
        self._parts = Hidden((check_mixing(mixing), check_coupling(coupling)))
        self.condition = Condition(context, classes, self.compute_dtype)
        self.seed = random.randint(1, 2**31 - 1) if seed is None else int(seed)
        dtype = self.dtype_policy
        mixing = mixing_template(self.mixing, self.seed, dtype, SignedPermutation)
        self.flow = flow_steps(
            mixing, coupling_template(self.coupling, hidden, dtype, self.condition.width), steps, "flow", dtype, unroll
        )
        self.flow.build((None, d))
        self.noise = keras.random.SeedGenerator(seed)
        self.nats_metric = keras.metrics.Mean(name="nats")
        self.supports_jit = backend.NAME != "tensorflow" or self.flow.supports_xla
        self.built = True

    @property
    def mixing(self) -> Part:
        """The name of the mixing, or its template."""
        return self._parts.value[0]

    @property
    def coupling(self) -> Part:
        """The name of the coupling, or its template."""
        return self._parts.value[1]

    @property
    def loss_metric(self) -> keras.metrics.Mean:
        return self.nats_metric

    @property
    def dimension(self) -> int:
        """The number of entries d of a vector."""
        return self.d

    def call(self, inputs: Tensor | tuple[Tensor, Tensor], training: bool | None = None) -> Tensor:
        """−log p of every vector, in nats, of shape `(batch,)`: the loss. With a context, of pairs (x, context)."""
        x, context = self.inputs_and_context(inputs)
        self.check_data(x)
        z, log_det = self.flow.forward_and_log_det(x, training=training, context=context)
        return -(log_normal(z) + log_det)

    def initialize(self, x: Tensor, context: Tensor | None = None) -> None:
        """Starts every ActNorm from these vectors; a few hundred are enough. The first `fit` does this with its first vectors."""
        x = self.as_events(x)
        check_varies(x, self.compute_dtype)
        self.flow.initialize(x, context=self._rows(context, x))

    def check_data(self, x: Tensor) -> None:
        check_vectors(x, self.d)

    def as_events(self, x: Tensor) -> Tensor:
        x = x if hasattr(x, "dtype") and hasattr(x, "shape") else keras.ops.convert_to_tensor(x)
        check_vectors(x, self.d)
        return keras.ops.cast(keras.ops.convert_to_tensor(x), self.compute_dtype)

    def certificates(self) -> dict[str, Certificate]:
        """What is proven about the invertibility of every mixing, by name of the layer. All else inverts by construction."""
        return each_mixing(self.flow, lambda layer: layer.certificate())

    def export(self, filepath: PathLike, format: str = "tf_saved_model", **kwargs: object) -> None:
        """`keras.Model.export`: `serve` returns −log p of vectors. `export_saved_model` writes all signatures of a flow."""
        if kwargs.get("input_signature") is None:
            kwargs["input_signature"] = self.input_specs((self.d,))
        super().export(filepath, format=format, **kwargs)

    def export_signatures(self) -> Signatures:
        """The signatures of a served model: `log_prob`, `encode`, `decode` and `sample` of vectors `x`, with a `context` if any.

        `export_saved_model` calls this method, and other exporters may.
        """
        return self.signatures("x", (self.d,))

    def get_config(self) -> Config:
        mixing = self.mixing if isinstance(self.mixing, str) else keras.saving.serialize_keras_object(self.mixing)
        return {
            **super().get_config(),
            "d": self.d,
            "steps": self.steps,
            "hidden": self.hidden,
            "mixing": mixing,
            **coupling_config(self.coupling),
            "context": self.condition.size,
            "classes": self.condition.classes,
            "seed": self.seed,
            "unroll": self.unroll,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, object] | None = None) -> Self:
        return cls(**coupling_of_config(config))
