"""One step of a recurrent network whose transition preserves norms."""

import math
from typing import Any, TypeAlias, Unpack

import keras
import numpy as np

from keras_auxref import initializers, kernels, ops
from keras_auxref.initializers import Cayley, ReflectionOf
from keras_auxref.layers.aux_reflection import AuxReflection
from keras_auxref.layers.checks import as_input, last_axis, require_floating
from keras_auxref.layers.frozen import Freezable
from keras_auxref.layers.modrelu import ModReLU
from keras_auxref.layers.orthogonal_dense import OrthogonalDense
from keras_auxref.ops.checks import whole_number
from keras_auxref.ops.rows import map_rows
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Activation, Config, Constraint, Initializer, LayerArguments, Regularizer, Shape, Tensor

_TRANSITIONS = ("aux", "cayley", "exp", "householder")

States: TypeAlias = Tensor | list[Tensor]


@keras.saving.register_keras_serializable(PACKAGE)
class OrthogonalRNNCell(Freezable, keras.layers.SimpleRNNCell):
    """One step of a recurrent network whose transition preserves norms: h' = activation(T(h) + V x + b).

        aux:           T(h) = H(Wh) h, the auxiliary reflection
        householder:   T(h) = U h, U = H(v₁) … H(v_k)
        cayley, exp:   T(h) = U h, U by the Cayley map or the matrix exponential (see `OrthogonalDense`)

    The transition changes neither the norm of the state nor, if T is orthogonal, that of its gradient. The
    auxiliary reflection represents every orthogonal U (W = I − U) and starts as one.

    `OrthogonalRNN` runs the cell over a sequence and computes the kernel of T once; `keras.layers.RNN` and
    `keras.layers.StackedRNNCells` also take the cell, but compute the kernel in every step.

    Args:
        units: Positive integer, the size n of the state.
        transition: `"aux"`, `"householder"`, `"cayley"` or `"exp"`.
        kernel: How weights become the W of the auxiliary reflection: see `AuxReflection`. Only for `"aux"`, by default `"free"`.
            `kernels.RelaxedCayley(lipschitz=L)` bounds the growth of a gradient by L per step for all weights; a free W has
            no bound.
        reflections: The number k of Householder reflections; by default n. Only for `"householder"`.
        activation: `"modrelu"` (with a trained bias, see `ModReLU`), a Keras activation, or a layer.
        use_bias: Whether to add b.
        kernel_initializer: Keras initializer for V.
        recurrent_initializer: The orthogonal matrix that T starts as: `"cayley"` (expRNN, the default), `"henaff"`, another
            initializer of orthogonal matrices (see `OrthogonalDense`), or an array; aux starts there by W = I − U, Householder by
            QR. Any other initializer makes the weights themselves. Fewer than n reflections cannot start there: they have the
            default of `OrthogonalDense`.
        bias_initializer: Keras initializer for b.
        train_initial_state: Whether the initial state is trained, starting from U(−√(3/2n), √(3/2n)) as in Arjovsky et al., or
            zero.
        kernel_regularizer, recurrent_regularizer, bias_regularizer: Keras regularizers for V, for the weights of T and for b.
        kernel_constraint, bias_constraint: Keras constraints for V and b. T needs none.
        dropout, recurrent_dropout: The fraction of the inputs and of the state to drop, one mask per sequence.
        seed: Seed of the dropout.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: Tensor of shape `(batch, features)`.
        states: The state, of shape `(batch, units)`, or a list with it.
        training: Whether to apply dropout.

    Example:
    >>> import keras
    >>> import numpy as np
    >>> from keras_auxref import OrthogonalRNNCell
    >>> keras.layers.RNN(OrthogonalRNNCell(16))(np.ones((2, 5, 3), "float32")).shape
    TensorShape([2, 16])

    Reference: Arjovsky, Shah & Bengio, "Unitary Evolution Recurrent Neural Networks", ICML 2016; Lezcano-Casado &
    Martínez-Rubio, "Cheap Orthogonal Constraints in Neural Networks", ICML 2019; Mathiasen & Hvilshøj, "One Reflection Suffice",
    2020.
    """

    def __init__(
        self,
        units: int,
        transition: str = "aux",
        reflections: int | None = None,
        activation: Activation = "modrelu",
        use_bias: bool = True,
        kernel_initializer: Initializer = "glorot_uniform",
        recurrent_initializer: Initializer | None = None,
        bias_initializer: Initializer = "zeros",
        train_initial_state: bool = True,
        kernel_regularizer: Regularizer | None = None,
        recurrent_regularizer: Regularizer | None = None,
        bias_regularizer: Regularizer | None = None,
        kernel_constraint: Constraint | None = None,
        bias_constraint: Constraint | None = None,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        seed: int | None = None,
        kernel: kernels.KernelLike | None = None,
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        _check(units, transition, reflections)
        _check_rates(dropout=dropout, recurrent_dropout=recurrent_dropout)
        # Keras' cell provides dropout, with one mask per sequence, and the configuration.
        super().__init__(
            int(units),
            activation=None,
            use_bias=use_bias,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            kernel_regularizer=kernel_regularizer,
            recurrent_regularizer=recurrent_regularizer,
            bias_regularizer=bias_regularizer,
            kernel_constraint=kernel_constraint,
            bias_constraint=bias_constraint,
            dropout=dropout,
            recurrent_dropout=recurrent_dropout,
            seed=seed,
            **kwargs,
        )
        require_floating(self, self.compute_dtype)
        self.transition, self.reflections = transition, reflections
        self.train_initial_state = bool(train_initial_state)
        self.holds_initial_state = True
        self._activation_name = activation if activation == "modrelu" else None
        if self._activation_name:
            activation = ModReLU(dtype=self.dtype_policy, name="modrelu")
        self.activation = keras.activations.get(activation)
        self.parametrization = _checked_kernel(kernel, transition)
        self.recurrent_initializer = self._start(recurrent_initializer)
        self.transition_map = self._make_transition()

    def _start(self, start: Initializer | None) -> keras.initializers.Initializer | None:
        if start is None:
            fewer = self.reflections is not None and self.reflections < self.units
            return None if fewer or isinstance(self.parametrization, kernels.Spectral) else Cayley()
        return initializers.get(start)

    def _make_transition(self) -> AuxReflection | OrthogonalDense:
        start = self.recurrent_initializer
        arguments = {"kernel_regularizer": self.recurrent_regularizer, "dtype": self.dtype_policy, "name": "transition"}
        if self.parametrization is not None:
            # Also for Keras' "identity", which means W itself for a single layer.
            is_orthogonal = initializers.orthogonal_start(start) is start is not None
            start = ReflectionOf(start) if is_orthogonal else start
            return AuxReflection(self.parametrization, kernel_initializer=start, **arguments)
        return OrthogonalDense(self.transition, self.reflections, kernel_initializer=start, **arguments)

    def build(self, input_shape: Shape) -> None:
        d = last_axis(self, input_shape)
        self.kernel = self.add_weight(
            name="kernel",
            shape=(d, self.units),
            initializer=self.kernel_initializer,
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
        )
        self.bias = None
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias",
                shape=(self.units,),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )
        self.initial_state = None
        if self.train_initial_state and self.holds_initial_state:
            limit = math.sqrt(1.5 / self.units)
            uniform = keras.initializers.RandomUniform(-limit, limit)
            self.initial_state = self.add_weight(name="initial_state", shape=(self.units,), initializer=uniform)
        self.transition_map.build((None, self.units))
        if isinstance(self.activation, keras.layers.Layer) and not self.activation.built:
            self.activation.build((None, self.units))

    def call(self, inputs: Tensor, states: States, training: bool = False) -> tuple[Tensor, States]:
        kernel = self.once("transition", self.transition_kernel)
        return self.step(self.project(self.drop(as_input(self, inputs), training)), states, kernel=kernel, training=training)

    def step(self, projected: Tensor, states: States, *, kernel: Tensor, training: bool) -> tuple[Tensor, States]:
        """`call` after the projection V x + b of its inputs, with a given kernel."""
        h = states[0] if isinstance(states, list | tuple) else states
        mask = self.get_recurrent_dropout_mask(h)
        if training and mask is not None:
            h = h * mask
        output = self.activation(self._move(h, kernel) + projected)
        return output, [output] if isinstance(states, list | tuple) else output

    def _move(self, h: Tensor, kernel: Tensor) -> Tensor:
        if self.transition == "aux":
            return keras.ops.cast(ops.reflect(keras.ops.cast(h, kernel.dtype), kernel), h.dtype)
        return keras.ops.matmul(h, keras.ops.transpose(kernel))

    def transition_kernel(self) -> Tensor:
        """W of an auxiliary reflection or the orthogonal matrix U, of shape (n, n)."""
        if self.parametrization is not None and self.parametrization.promises:
            return self.transition_map.kernel  # in float32 at least: rounding it further would break the guarantee
        kernel = self.transition_map.kernel if self.transition == "aux" else self.transition_map.matrix
        return keras.ops.cast(kernel, self.compute_dtype)

    def drop(self, inputs: Tensor, training: bool) -> Tensor:
        """The inputs of one step, or of all with shape `(batch, time, features)`, with dropout in training."""
        if not (training and self.dropout):
            return inputs
        is_step = len(inputs.shape) == 2
        mask = self.get_dropout_mask(inputs if is_step else inputs[:, 0])
        return inputs * (mask if is_step else mask[:, None])

    def project(self, inputs: Tensor) -> Tensor:
        """V x + b on the last axis of inputs of any rank."""
        projected = map_rows(lambda rows: keras.ops.matmul(rows, self.kernel), inputs)
        return projected if self.bias is None else projected + self.bias

    def get_initial_state(self, batch_size: int | None = None) -> list[Tensor]:
        state = keras.ops.zeros((batch_size, self.units), dtype=self.compute_dtype)
        # A sum instead of a broadcast, for which torch makes rows that share memory and cannot be written to.
        return [state if self.initial_state is None else state + keras.ops.cast(self.initial_state, self.compute_dtype)]

    def load_own_variables(self, store: Any) -> None:
        own = [self.kernel, self.bias, self.initial_state]
        weights = [weight for weight in own if weight is not None]
        if self.initial_state is None or len(store.keys()) != len(weights) - 1:
            return super().load_own_variables(store)
        # A file of a layer that started from zero, as stateful layers once did.
        for i, weight in enumerate(weights[:-1]):
            weight.assign(store[str(i)])
        self.initial_state.assign(keras.ops.zeros_like(self.initial_state))

    def get_config(self) -> Config:
        config = super().get_config()
        del config["recurrent_constraint"]
        if isinstance(self.activation, keras.layers.Layer):
            config["activation"] = self._activation_name or keras.saving.serialize_keras_object(self.activation)
        return {
            **config,
            "transition": self.transition,
            "kernel": None if self.parametrization is None else keras.saving.serialize_keras_object(self.parametrization),
            "reflections": self.reflections,
            "train_initial_state": self.train_initial_state,
        }


def _checked_kernel(kernel: kernels.KernelLike | None, transition: str) -> kernels.Kernel | None:
    if transition == "aux":
        return kernels.get("free" if kernel is None else kernel)
    if kernel is not None:
        raise ValueError(
            f'`kernel` is for auxiliary reflections. Expected transition="aux". Received: transition={transition!r}, '
            f"kernel={kernel!r}"
        )
    return None


def _check(units: int, transition: str, reflections: int | None) -> None:
    whole_number("units", units)
    if transition not in _TRANSITIONS:
        raise ValueError(f"Unknown transition. Expected one of {list(_TRANSITIONS)}. Received: {transition!r}")
    if reflections is not None and transition != "householder":
        raise ValueError(
            '`reflections` counts Householder reflections. Expected transition="householder". Received: '
            f"transition={transition!r}, reflections={reflections}"
        )
    if reflections is not None and reflections > units:
        raise ValueError(
            f"More reflections than dimensions add nothing. Expected 1 ≤ reflections ≤ {units}. Received: {reflections}"
        )


def _check_rates(**rates: object) -> None:
    # Keras clips a rate to [0, 1], so 2.0 would drop everything.
    for name, rate in rates.items():
        if isinstance(rate, bool) or not isinstance(rate, int | float | np.number) or not 0 <= rate <= 1:
            raise ValueError(f"`{name}` is the fraction to drop. Expected a number with 0 ≤ {name} ≤ 1. Received: {rate!r}")
