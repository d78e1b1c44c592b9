"""What a flow of vectors and a flow of images have in common: an invertible layer, and the density that it makes."""

import math
import numbers
from collections.abc import Callable
from typing import Any, TypeAlias

import keras

from keras_auxref.certificate import Certificate
from keras_auxref.flows.conditions import Conditioned
from keras_auxref.flows.randomness import normal
from keras_auxref.flows.training import LikelihoodModel
from keras_auxref.invertible import pass_on
from keras_auxref.ops.backend import compiled
from keras_auxref.ops.checks import require_tensorflow
from keras_auxref.typing import Shape, Tensor

Signatures: TypeAlias = dict[str, tuple[Callable[..., dict[str, Tensor]], dict[str, tuple[Shape, str]]]]
"""By name: a function of named tensors, and the shape and dtype of each of them."""


class FlowModel(LikelihoodModel):
    """A density log p(x) = log N(n(x); 0, I) + log|det ∂n/∂x|, for an invertible layer n, `flow`, from events to vectors z.

    A subclass has `dimension`, the number D of entries of an event, and `as_events(x)`, which converts x to the input of `flow`.
    If the flow has a context, every method takes one.
    """

    flow: Any
    noise: Any

    @property
    def dimension(self) -> int:
        """The number of entries D of an event."""
        raise NotImplementedError

    @property
    def initialized(self) -> bool:
        """True when every ActNorm has been started from data."""
        return self.flow.initialized

    def as_events(self, x: Tensor) -> Tensor:
        """Checked events as a tensor in the precision of the flow."""
        raise NotImplementedError

    def as_samples(self, x: Tensor) -> Tensor:
        """Decoded events as `sample` returns them."""
        return x

    def encode(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """z = n(x) of shape `(batch, D)` and log|det ∂n/∂x| of shape `(batch,)`."""
        x = self.as_events(x)
        return self._compiled_encode(x, self._rows(context, x))

    def decode(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        """n⁻¹(z) for z of shape `(batch, D)`; NaN where an inverse finds no preimage."""
        z = keras.ops.convert_to_tensor(z, dtype=self.compute_dtype)
        if len(z.shape) != 2 or z.shape[-1] != self.dimension:
            raise ValueError(f"`z` does not fit this model. Expected shape (batch, {self.dimension}). Received: {tuple(z.shape)}")
        return self._compiled_decode(z, self._rows(context, z))

    def log_prob(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """log p(x), or log p(x | context), of shape `(batch,)`."""
        x = self.as_events(x)
        return self._compiled_log_prob(x, self._rows(context, x))

    def sample(self, n: int, seed: int | None = None, temperature: float = 1.0, context: Tensor | None = None) -> Tensor:
        """n events n⁻¹(temperature · ε), ε ~ N(0, I). The same seed gives the same ε on every backend.

        With a context: one context for all of them, or one for each.
        """
        if isinstance(n, bool) or not isinstance(n, numbers.Integral) or n < 0:
            raise ValueError(f"`n` must be a number of samples. Expected 0, 1, 2, … Received: {n!r}")
        if isinstance(temperature, bool) or not isinstance(temperature, numbers.Real) or not 0 <= temperature < math.inf:
            raise ValueError(f"`temperature` must be a number, not negative. Expected 0 or more. Received: {temperature!r}")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, numbers.Integral)):
            raise ValueError(f"`seed` must be a whole number or None. Received: {seed!r}")
        pair = self.noise.next() if seed is None else (int(seed), 0)
        z = float(temperature) * normal(int(n), self.dimension, pair, self.compute_dtype)
        return self.as_samples(self._compiled_decode(z, self._rows(context, z)))

    def _rows(self, context: Tensor | None, x: Tensor) -> Tensor | None:
        """A context for every event: its own, or one for all."""
        rows = self.condition.rows(context, single=True)
        if rows is None or rows.shape[0] is None or x.shape[0] is None or rows.shape[0] == x.shape[0]:
            return rows
        if rows.shape[0] != 1:
            raise ValueError(
                f"The context does not fit the events. Expected 1 context, or {x.shape[0]}. Received: {rows.shape[0]} contexts"
            )
        return keras.ops.repeat(rows, x.shape[0], axis=0)

    def _encode(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return pass_on(self.flow.forward_and_log_det, x, context=context)

    def _decode(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        return pass_on(self.flow.inverse, z, context=context)

    def _log_prob(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        z, log_det = pass_on(self.flow.forward_and_log_det, x, context=context)
        return log_normal(z) + log_det

    @compiled
    def _compiled_encode(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._encode(x, context)

    @compiled
    def _compiled_decode(self, z: Tensor, context: Tensor | None) -> Tensor:
        return self._decode(z, context)

    @compiled
    def _compiled_log_prob(self, x: Tensor, context: Tensor | None) -> Tensor:
        return self._log_prob(x, context)

    # ---------------------------------------------------------------------------------------------------- TFP and proof

    def bijector(self, context: Tensor | None = None, **kwargs: object) -> Any:
        """A new TFP bijector over the weights of this model, from events to z: a view, never a copy.

        Args:
            context: If the flow has one: one context, or as many as the last axis before an event has entries.
            **kwargs: Arguments of `bijectors.LayerBijector`.
        """
        rows = self.condition.rows(context, single=True)
        return (self.flow if rows is None else Conditioned(self.flow, rows)).bijector(**kwargs)

    def distribution(self, context: Tensor | None = None) -> Any:
        """The flow as a TFP distribution, over the weights of this model. Make a new one after training steps.

        With several contexts it is a batch of distributions, one for each.
        """
        require_tensorflow(f"{type(self).__name__}.distribution")
        import tensorflow as tf
        import tensorflow_probability as tfp

        rows = self.condition.rows(context, single=True)
        batch = [] if rows is None or rows.shape[0] == 1 else [tf.shape(rows)[0]]
        zero = tf.zeros([*batch, self.dimension], self.compute_dtype)
        base = tfp.distributions.MultivariateNormalDiag(loc=zero, scale_diag=tf.ones_like(zero))
        inverse = tfp.bijectors.Invert(self.bijector(context))
        return tfp.distributions.TransformedDistribution(base, inverse, name=self.name)

    def certificates(self) -> dict[str, Certificate]:
        """What is proven about the invertibility of every mixing, by name of the layer. All else inverts by construction."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------------------------------- serving

    def input_specs(self, shape: tuple[int, ...]) -> list[keras.InputSpec | list[keras.InputSpec]]:
        """What `call` takes, for `keras.Model.export`: events of a shape, or pairs of them and a context."""
        specs = [keras.InputSpec(shape=(None, *shape), dtype=self.compute_dtype)]
        specs += [keras.InputSpec(shape=shape, dtype=dtype) for shape, dtype in self.condition.signature.values()]
        return [specs] if self.condition else specs

    def signatures(self, name: str, shape: tuple[int, ...]) -> Signatures:
        """The signatures of a served model: by name, a function of named tensors and the shape and dtype of each of them.

        Args:
            name: What events are called.
            shape: Their shape.
        """
        dtype, context = self.compute_dtype, self.condition.signature
        events = {name: ((None, *shape), dtype), **context}
        z = {"z": ((None, self.dimension), dtype), **context}
        settings = {"n": ((), "int32"), "seed": ((), "int64"), "temperature": ((), dtype), **context}

        def rows(given: Tensor | None, n: Tensor) -> Tensor | None:
            found = self.condition.rows(given)
            return None if found is None else keras.ops.broadcast_to(found, (n, self.condition.width))

        def encode(context: Tensor | None = None, **events: Tensor) -> dict[str, Tensor]:
            z, log_det = self._encode(events[name], rows(context, keras.ops.shape(events[name])[0]))
            return {"z": z, "log_det": log_det}

        def log_prob(context: Tensor | None = None, **events: Tensor) -> dict[str, Tensor]:
            return {"log_prob": self._log_prob(events[name], rows(context, keras.ops.shape(events[name])[0]))}

        def decode(z: Tensor, context: Tensor | None = None) -> dict[str, Tensor]:
            return {name: self._decode(z, rows(context, keras.ops.shape(z)[0]))}

        def sample(n: Tensor, seed: Tensor, temperature: Tensor, context: Tensor | None = None) -> dict[str, Tensor]:
            import tensorflow as tf

            tf.debugging.assert_non_negative(temperature, "`temperature` must not be negative.")
            z = temperature * normal(n, self.dimension, tf.stack([seed, tf.zeros_like(seed)]), dtype)
            return {name: self.as_samples(self._decode(z, rows(context, n)))}

        return {
            "serving_default": (log_prob, events),
            "log_prob": (log_prob, events),
            "encode": (encode, events),
            "decode": (decode, z),
            "sample": (sample, settings),
        }


def log_normal(z: Tensor) -> Tensor:
    """log N(z; 0, I)."""
    return -0.5 * keras.ops.sum(keras.ops.square(z), axis=-1) - 0.5 * z.shape[-1] * math.log(2 * math.pi)
