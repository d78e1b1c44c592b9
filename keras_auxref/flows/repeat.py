"""Equal layers in a row, with stacked weights, run by one loop."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, Self, TypeVar, Unpack

import keras
import numpy as np

from keras_auxref.certificate import Certificate
from keras_auxref.flows.chain import all_proven, called, check_template, combined, is_initialized
from keras_auxref.flows.copies import Hidden, clone, serialized
from keras_auxref.flows.parts.coupling import Conv2D
from keras_auxref.flows.recomputation import Body, as_function, by_inverse, from_inputs, refuse_in_doubt
from keras_auxref.invertible import Invertible, pass_on
from keras_auxref.layers.checks import has_value, require_built
from keras_auxref.layers.frozen import Freezable, frozen_copy
from keras_auxref.ops import backend
from keras_auxref.ops.backend import outside_graphs
from keras_auxref.ops.checks import check_finite, whole_number
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, LayerArguments, Shape, Tensor

T = TypeVar("T")


@keras.saving.register_keras_serializable(PACKAGE)
class Repeat(Freezable, Invertible, keras.layers.Layer):
    """An invertible layer applied `times` times, each time with its own weights: y = l_K(… l_2(l_1(x))).

    Every weight of the layer is held once, with a first axis of K entries: a flow of many steps has the variables of one. The
    steps run as one loop (`tf.while_loop`, `lax.scan`), so only one step is traced and compiled instead of K.

    Args:
        layer: A template, any `Invertible` Keras layer that keeps the shape of its input and is not built. Every copy is made
            from its configuration and has its own initial values: with a seed in the configuration, they follow from that seed
            and the number of the copy; without one they are random.
        times: The number K of copies.
        unroll: Whether to write the steps out instead of running them in a loop. None takes the faster of the two: a loop in
            graphs; steps written out eagerly, on torch, and where XLA (or JAX) compiles for a CPU and the layer has convolutions
            other than those of the couplings' default networks, because XLA on a CPU is slow at their gradients inside a loop.
        remat: Whether to recompute a step in the backward pass instead of keeping its activations. True keeps the input of every
            step: less memory, at the price of a second forward pass. `"inverse"` keeps only the input of the first step and the
            output of the last, and recomputes the inputs in between with the inverses: memory hardly grows with K, at the price
            of a third pass. The steps must be certified, and their states must not change in training. If rounding errors grow
            on the way back until half of the digits are lost, the gradients are NaN.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: Tensor of a shape that the layer takes and keeps.

    Output: A tensor of the same shape.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.flows import Chain, InvertibleDense, AffineCoupling, Repeat
    >>> layer = Repeat(Chain([InvertibleDense(), AffineCoupling(hidden=8)]), times=4)
    >>> x = np.ones((2, 6), "float32")
    >>> np.allclose(layer.inverse(layer(x)), x, atol=1e-4)
    True
    >>> tuple(layer.weights[0].shape)
    (4, 6, 6)
    """

    def __init__(
        self,
        layer: keras.layers.Layer,
        times: int,
        unroll: bool | None = None,
        remat: bool | Literal["inverse"] = False,
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        kwargs.setdefault("dtype", check_template(layer, "layer").dtype_policy)
        super().__init__(**kwargs)
        times = whole_number("times", times)
        if unroll not in (None, True, False):
            raise ValueError(f"`unroll` must be True, False or None. Received: {unroll!r}")
        if remat not in (True, False, "inverse"):
            raise ValueError(f'`remat` must be True, False or "inverse". Received: {remat!r}')
        self.times, self.unroll, self.remat = times, unroll, remat
        self._hidden = Hidden(clone(layer))
        self.supports_xla, self.constant_jacobian = layer.supports_xla, layer.constant_jacobian
        self.elementary, self.cheap_log_det = layer.elementary, layer.cheap_log_det

    def template(self) -> keras.layers.Layer:
        """The layer that is repeated. Not a property, because Keras would save its value."""
        return self._hidden.value

    def build(self, inputs_shape: Shape, context_shape: Shape | None = None) -> None:
        # A layer may be built while a function is traced, where the values of new variables are not known yet.
        with outside_graphs():
            self._build(tuple(inputs_shape))

    def _build(self, shape: Shape) -> None:
        template = self.template()
        template.build(shape)
        found = tuple(template.compute_output_shape(shape))
        if found != shape:
            raise ValueError(f"The layer must keep the shape of its input. Expected output shape {shape}. Received: {found}")
        self._refuse_losses()
        self._convolves = _convolves(template)
        self.event_ndims = template.event_ndims
        starts = [_values(template)]
        for k in range(1, self.times):
            copy = clone(template, k)
            copy.build(shape)
            starts.append(_values(copy))
        own = {id(v) for layer in template._flatten_layers() for v in layer._trainable_variables}
        self._stacked: list[Any] = []
        for i, variable in enumerate(template.variables):
            start = np.stack([values[i] for values in starts])
            weight = self.add_weight(
                name=variable.path.removeprefix(f"{template.path}/").replace("/", "_"),
                shape=start.shape,
                dtype=variable.dtype,
                initializer=lambda shape, dtype=None, start=start: keras.ops.convert_to_tensor(start, dtype=dtype),
                trainable=id(variable) in own and variable.trainable,
                regularizer=_for_each(getattr(variable, "regularizer", None), sum),
                constraint=_for_each(getattr(variable, "constraint", None), keras.ops.stack),
                autocast=False,
                # Of several replicas that computed a state, one sets it.
                aggregation="only_first_replica"
                if variable.aggregation == "none" and id(variable) not in own
                else variable.aggregation,
            )
            self._stacked.append(weight)
        # Variables that are never trainable, not even if a layer is not frozen, may change during training.
        self._states = [i for i, variable in enumerate(template.variables) if id(variable) not in own]
        if self.remat == "inverse":
            self._each(lambda layer: refuse_in_doubt(layer, self.name))

    def _refuse_losses(self) -> None:
        for layer in self.template()._flatten_layers():
            if getattr(layer, "activity_regularizer", None) is not None:
                raise ValueError(
                    "A loss of activations cannot leave a loop. Expected a layer without `activity_regularizer`. Received: "
                    f"'{layer.name}' with {layer.activity_regularizer!r}"
                )

    # ------------------------------------------------------------------------------------------------------- the loop

    def call(self, inputs: Tensor, training: bool | None = None, context: Tensor | None = None) -> Tensor:
        def step(x: Tensor, context: Tensor | None = None) -> Tensor:
            return called(self.template(), x, training=training, context=context)

        return self._run(step, lambda x: x, inputs, context, training)

    def forward_and_log_det(
        self, x: Tensor, training: bool | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x = self._tensor(x, "forward_and_log_det")
        self._ask("forward_and_log_det", x)

        def start(x: Tensor) -> tuple[Tensor, Tensor]:
            return x, keras.ops.zeros(keras.ops.shape(x)[: len(x.shape) - self.event_ndims], dtype=x.dtype)

        def step(carry: tuple[Tensor, Tensor], context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            y, log_det = pass_on(self.template().forward_and_log_det, carry[0], training=training, context=context)
            return y, carry[1] + keras.ops.cast(log_det, carry[1].dtype)

        y, log_det = self._run(step, start, x, context, training)
        return y, log_det

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        y = self._tensor(y, "inverse")
        self._ask("inverse", y)
        return self._run(self._undo, lambda y: y, y, context, reverse=True)

    def _undo(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        return pass_on(self.template().inverse, y, context=context)

    def _run(
        self,
        step: Callable[..., T],
        start: Callable[[Tensor], T],
        x: Tensor,
        context: Tensor | None,
        training: bool | None = None,
        reverse: bool = False,
    ) -> T:
        """step(… step(start(x))), with the weights of one copy after the other instead of those of the template."""
        around = self._constants if self.is_frozen else lambda k: nullcontext()
        written_out = self.is_frozen or self._written_out(x)
        loop = partial(_one_by_one, times=self.times, around=around) if written_out else backend.loop
        on_devices = backend.on_each_device if _keeps_rows_apart(self.template()) else _together
        if self.remat == "inverse" and self._stacked and not self.is_frozen and not reverse:
            weights = [backend.as_tensor(weight) for weight in self._stacked]
            forth, back = as_function(self.template(), step), as_function(self.template(), self._undo)

            def recomputing(rows: Any, weights: list[Tensor]) -> tuple[T, list[Tensor]]:
                x, context = rows
                return by_inverse(forth, back, start, loop, x, weights, context), []

            return on_devices(recomputing, (x, context), weights)[0]
        template, indices = self.template(), self._states if training and self.trainable else []
        variables = template.variables
        state = [variables[i] for i in indices]
        rest = [i for i in range(len(variables)) if i not in indices]

        def body(carry: T, weights: list[Tensor], states: list[Tensor], context: Tensor | None = None) -> tuple[T, list[Tensor]]:
            mapping = [*zip([variables[i] for i in rest], weights, strict=True), *zip(state, states, strict=True)]
            with keras.StatelessScope(mapping) as scope:
                carry = step(carry, context)
            return carry, [scope.get_current_value(variable) for variable in state]

        steps = [keras.ops.convert_to_tensor(self._stacked[i]) for i in rest]
        states = [keras.ops.copy(keras.ops.convert_to_tensor(self._stacked[i])) for i in indices]  # torch assigns in place

        def looping(rows: Any, weights: list[Tensor]) -> tuple[T, list[Tensor]]:
            x, context = rows
            carry, count = start(x), len(rest)
            run = from_inputs(body, carry, count, len(state), context) if self.remat else partial(body, context=context)
            return loop(run, carry, weights[:count], weights[count:], reverse=reverse)

        carry, changed = on_devices(looping, (x, context), [*steps, *states])
        for i, value in zip(indices, changed, strict=True):
            self._stacked[i].assign(value)
        return carry

    def _written_out(self, x: Tensor) -> bool:
        if not self._stacked:
            return True
        return not backend.prefers_loops(x, self._convolves) if self.unroll is None else self.unroll

    def _ask(self, name: str, x: Tensor) -> None:
        """Requires certificates before a function is traced; eagerly every copy does so by itself."""
        if not backend.is_concrete(x):
            self.require_certificate(name)

    def require_certificate(self, name: str) -> None:
        if self.in_doubt and all(has_value(weight.value) for weight in self._stacked):
            with outside_graphs():
                self._each(lambda layer: layer.require_certificate(name))

    @property
    def in_doubt(self) -> bool:
        return self.template().in_doubt

    def _constants(self, k: int) -> AbstractContextManager[object]:
        """Constants instead of what copy k computes from its weights, in a model that is no longer trained."""
        return frozen_copy(self.template(), k, lambda: self._copy(k))

    # --------------------------------------------------------------------------------------------------- single copies

    @contextmanager
    def _copy(self, k: int) -> Iterator[keras.StatelessScope]:
        """A context in which the template has the weights of copy k."""
        values = [keras.ops.convert_to_tensor(weight)[k] for weight in self._stacked]
        with keras.StatelessScope(list(zip(self.template().variables, values, strict=True))) as scope:
            yield scope

    @contextmanager
    def copy(self, k: int) -> Iterator[keras.layers.Layer]:
        """A context in which the layer has the weights of copy k: `with repeat.copy(2) as layer: layer.certificate()`."""
        require_built(self, "copy")
        with self._copy(range(self.times)[k]):
            yield self.template()

    def initialize(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Initialises every part that needs data, one copy after the other; returns layer(x)."""
        x = keras.ops.convert_to_tensor(x, dtype=self.compute_dtype)
        if not self.built:
            self.build((None, *x.shape[1:]))
        if not hasattr(self.template(), "initialize"):
            return called(self, x, context=context)
        check_finite(x, "x")
        found = []
        for k in range(self.times):
            x, values = self._start(x, context, k)
            found.append(values)
        for weight, *values in zip(self._stacked, *found, strict=True):
            weight.assign(np.stack([keras.ops.convert_to_numpy(value) for value in values]))
        return x

    @backend.at_the_start
    def _start(self, x: Tensor, context: Tensor | None, k: int) -> tuple[Tensor, list[Tensor]]:
        """The output of copy k for x, and its weights, after they were initialised from x."""
        with self._copy(k) as scope:
            y = pass_on(self.template().initialize, x, context=context)
            y = called(self.template(), x, context=context) if y is None else y
        return y, [scope.get_current_value(variable) for variable in self.template().variables]

    @property
    def initialized(self) -> bool:
        """True when everything that starts from data has done so."""
        return all(self._each(is_initialized)) if self.built else not hasattr(self.template(), "initialize")

    def certificate(self) -> Certificate:
        """A bijection where every copy is proven to be one."""
        require_built(self, "certificate")
        return combined({f"{self.name}_{k + 1}": c for k, c in enumerate(self._each(lambda layer: layer.certificate()))})

    def proof(self) -> Tensor | None:
        require_built(self, "proof")
        return all_proven(self._each(lambda layer: layer.proof()))

    def _each(self, function: Callable[[keras.layers.Layer], T]) -> list[T]:
        found = []
        for k in range(self.times):
            with self._copy(k):
                found.append(function(self.template()))
        return found

    def compute_output_shape(self, inputs_shape: Shape, context_shape: Shape | None = None) -> Shape:
        return inputs_shape

    def get_config(self) -> Config:
        own = {"times": self.times, "unroll": self.unroll, "remat": self.remat}
        return {**super().get_config(), "layer": serialized(self.template()), **own}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(**{**config, "layer": keras.saving.deserialize_keras_object(config["layer"])})


def _one_by_one(
    body: Body[T],
    carry: T,
    steps: list[Tensor],
    states: list[Tensor],
    reverse: bool = False,
    *,
    times: int,
    around: Callable[[int], AbstractContextManager[object]],
) -> tuple[T, list[Tensor]]:
    """`backend.loop`, step by step."""
    # Split at once: the gradient of K slices would add up K arrays of the whole size.
    slices = [[t[0] for t in keras.ops.split(tensor, times, axis=0)] for tensor in (*steps, *states)]
    found: list[list[Tensor]] = [[] for _ in range(times)]
    for k in reversed(range(times)) if reverse else range(times):
        here = [tensor[k] for tensor in slices]
        with around(k):
            carry, found[k] = body(carry, here[: len(steps)], here[len(steps) :])
    return carry, [keras.ops.stack(values) for values in zip(*found, strict=True)]


def _together(function: Callable[[Any, list[Tensor]], T], rows: object, weights: list[Tensor]) -> T:
    """`backend.on_each_device`, with all rows in one place."""
    return function(rows, weights)


def _keeps_rows_apart(layer: keras.layers.Layer) -> bool:
    """Whether a layer treats every row of a batch by itself, apart from averages: not if it holds other statistics, or draws."""
    parts = [part for part in layer._flatten_layers() if not type(part).__module__.startswith(f"{PACKAGE}.")]
    return not any(part._non_trainable_variables or part._seed_generators for part in parts)


def _convolves(layer: keras.layers.Layer) -> bool:
    """Whether a layer convolves, otherwise than by `Conv2D` of couplings: whether it has kernels of more than two axes."""
    return any(
        _convolves(part.template())
        if isinstance(part, Repeat)
        else not isinstance(part, Conv2D) and any(len(v.shape) > 2 for v in part._trainable_variables)
        for part in layer._flatten_layers()
    )


def _values(layer: keras.layers.Layer) -> list[np.ndarray]:
    return [keras.ops.convert_to_numpy(variable) for variable in layer.variables]


def _for_each(function: Any, join: Callable[[list[Any]], Any]) -> Any:
    """A regularizer or constraint of one array, for each of a stack of them."""
    if function is None:
        return None
    return lambda stacked: join([function(value) for value in keras.ops.unstack(stacked)])
