"""The recurrent network made of `OrthogonalRNNCell`."""

import functools
from types import SimpleNamespace
from typing import Any, TypeAlias

import keras

from keras_auxref.kernels import KernelLike
from keras_auxref.layers.checks import as_input, check_sequences
from keras_auxref.layers.modrelu import ModReLU
from keras_auxref.layers.orthogonal_rnn_cell import OrthogonalRNNCell
from keras_auxref.ops.activations import ACTIVATIONS
from keras_auxref.ops.recurrence import is_fused, recurrence
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Activation, Config, Constraint, Initializer, Regularizer, Shape, Tensor

_LOOP = ("go_backwards", "return_sequences", "stateful", "unroll", "zero_output_for_mask")
"""What the loop of Keras needs to know."""

Loop: TypeAlias = tuple[Tensor, Tensor, list[Tensor]]
"""The last output, all outputs and the last state."""


@keras.saving.register_keras_serializable(PACKAGE)
class OrthogonalRNN(keras.layers.RNN):
    """A recurrent network whose transition preserves norms: h_t = activation(T(h_{t−1}) + V x_t + b).

    What does not depend on the state, V x_t + b for every t and the kernel of T, is computed once per sequence. On TensorFlow and
    JAX the rest is one loop (`ops.recurrence`), with a closed-form gradient in training. A mask, `recurrent_dropout`, `unroll`,
    half precision or an activation without a known derivative needs Keras' general loop, which computes the same.

    Args:
        units: Positive integer, the size n of the state.
        transition: T: `"aux"` (an auxiliary reflection), `"householder"`, `"cayley"` or `"exp"`.
        reflections: The number of Householder reflections; by default n. Only for `"householder"`.
        kernel: How weights become the W of `"aux"`: see `OrthogonalRNNCell`. W is computed once per sequence, so a step
            costs the same for every kernel.
        activation, use_bias, kernel_initializer, recurrent_initializer, bias_initializer, kernel_regularizer,
            recurrent_regularizer, bias_regularizer, kernel_constraint, bias_constraint, dropout, recurrent_dropout, seed: See
            `OrthogonalRNNCell`.
        train_initial_state: Whether the initial state is trained or zero. With `stateful` it is the first state of a stream.
        return_sequences: Whether to return every output instead of the last.
        return_state: Whether to return the last state too.
        go_backwards: Whether to read the sequence backwards (and to return it reversed).
        stateful: Whether the state is carried over from batch to batch, until `reset_state()`. The weights are those of a layer
            that is not stateful, so you can train one and run the other on a stream: `stream.set_weights(
            trained.get_weights())`.
        unroll: Whether to unroll the loop. Only for short sequences.
        **kwargs: Arguments of `keras.layers.RNN` and `keras.layers.Layer`: `zero_output_for_mask`, `name`, `dtype`, …

    Call arguments:
        sequences: Tensor of shape `(batch, time, features)`.
        initial_state: A state, or a list with one, instead of the layer's own initial state. If the first call has one, the layer
            has no trained state, and later calls without one start from zero.
        mask: Boolean tensor of shape `(batch, time)`. A masked step keeps the state and repeats it as output.
        training: Whether to apply dropout.

    Output: A tensor of shape `(batch, units)`, or `(batch, time, units)` with `return_sequences`; with `return_state`, a tuple
        of this and the state.

    Example:
    >>> import numpy as np
    >>> from keras_auxref import OrthogonalRNN
    >>> OrthogonalRNN(16, return_sequences=True)(np.ones((2, 100, 3), "float32")).shape
    TensorShape([2, 100, 16])
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
        return_sequences: bool = False,
        return_state: bool = False,
        go_backwards: bool = False,
        stateful: bool = False,
        unroll: bool = False,
        seed: int | None = None,
        kernel: KernelLike | None = None,
        **kwargs: Any,
    ) -> None:
        cell = OrthogonalRNNCell(
            units,
            transition=transition,
            reflections=reflections,
            activation=activation,
            use_bias=use_bias,
            kernel_initializer=kernel_initializer,
            recurrent_initializer=recurrent_initializer,
            bias_initializer=bias_initializer,
            train_initial_state=train_initial_state,
            kernel_regularizer=kernel_regularizer,
            recurrent_regularizer=recurrent_regularizer,
            bias_regularizer=bias_regularizer,
            kernel_constraint=kernel_constraint,
            bias_constraint=bias_constraint,
            dropout=dropout,
            recurrent_dropout=recurrent_dropout,
            seed=seed,
            kernel=kernel,
            dtype=kwargs.get("dtype"),
            trainable=kwargs.get("trainable", True),
            name="orthogonal_rnn_cell",
        )
        super().__init__(
            cell,
            return_sequences=return_sequences,
            return_state=return_state,
            go_backwards=go_backwards,
            stateful=stateful,
            unroll=unroll,
            **kwargs,
        )
        self.input_spec: list[keras.layers.InputSpec] | None = (
            None  # until the layer is built: Keras' own check would print whole tensors
        )

    @property
    def units(self) -> int:
        """The size of the state."""
        return self.cell.units

    def build(self, sequences_shape: Shape | None = None, initial_state_shape: Shape | None = None) -> None:
        check_sequences(self, sequences_shape)
        self.input_spec = [keras.layers.InputSpec(ndim=3)]
        # If an initial state is given, a trained one would get no gradient.
        self.cell.holds_initial_state = initial_state_shape is None
        super().build(sequences_shape, initial_state_shape)
        if self.stateful and not hasattr(self, "is_streaming"):
            self.is_streaming = keras.Variable(False, trainable=False, dtype="bool", name="is_streaming")
            self._untrack_variable(self.is_streaming)  # like the state, it is not a weight

    def call(
        self, sequences: Tensor, initial_state: list[Tensor] | None = None, mask: Tensor | None = None, training: bool = False
    ) -> Tensor:
        sequences = as_input(self, sequences)
        if self.stateful and initial_state is None:
            initial_state = self._carried_state()
        outputs = super().call(sequences, initial_state=initial_state, mask=mask, training=training)
        if self.stateful:
            self.is_streaming.assign(True)
        return outputs

    def _carried_state(self) -> list[Tensor]:
        """The state after the last batch, or at the start of a stream the current trained state, with its gradient."""
        [state] = self.states
        [first] = self.get_initial_state(batch_size=state.shape[0])
        is_streaming = keras.ops.convert_to_tensor(self.is_streaming)
        return [keras.ops.where(is_streaming, keras.ops.cast(state, first.dtype), first)]

    def reset_state(self) -> None:
        """Begins a new stream from the trained initial state."""
        if self.stateful and self.built:
            [state] = self.states
            state.assign(keras.ops.cast(self.get_initial_state(batch_size=state.shape[0])[0], state.dtype))
            self.is_streaming.assign(False)

    def inner_loop(self, sequences: Tensor, initial_state: list[Tensor], mask: Tensor | None, training: bool = False) -> Loop:
        cell = self.cell
        kernel, sequences = cell.transition_kernel(), cell.drop(sequences, training)
        activation = self._fused_activation(mask, training)
        if activation is None:
            # Keras' loop over the step after the projection, with a kernel that is computed once.
            settings = {name: getattr(self, name) for name in _LOOP}
            loop = SimpleNamespace(cell=functools.partial(cell.step, kernel=kernel, training=training), **settings)
            found = keras.layers.RNN.inner_loop(loop, cell.project(sequences), initial_state, mask)
            return found if mask is None or self.zero_output_for_mask else self._keep_state(found, initial_state, mask)
        biases = (cell.bias, cell.activation.bias if activation == "modrelu" else None)
        bias, activation_bias = (None if b is None else keras.ops.cast(b, cell.compute_dtype) for b in biases)
        x = keras.ops.transpose(sequences, (1, 0, 2))
        outputs = recurrence(
            keras.ops.flip(x, axis=0) if self.go_backwards else x,
            initial_state[0],
            kernel,
            keras.ops.cast(cell.kernel, cell.compute_dtype),
            bias,
            activation_bias,
            transition="aux" if cell.transition == "aux" else "linear",
            activation=activation,
            return_sequences=self.return_sequences,
            closed_form=training,
        )
        if not self.return_sequences:
            return outputs, outputs[:, None], [outputs]
        return outputs[-1], keras.ops.transpose(outputs, (1, 0, 2)), [outputs[-1]]

    def _keep_state(self, found: Loop, initial_state: list[Tensor], mask: Tensor) -> Loop:
        """The initial state as the output of leading masked steps, where TensorFlow and torch put zeros, and JAX the state."""
        _, outputs, states = found
        if not self.return_sequences:
            return states[0], states[0][:, None], states
        mask = keras.ops.flip(mask, axis=1) if self.go_backwards else mask
        begun = keras.ops.cumsum(keras.ops.cast(mask, "int32"), axis=1)[..., None] > 0
        return states[0], keras.ops.where(begun, outputs, initial_state[0][:, None]), states

    def _fused_activation(self, mask: Tensor | None, training: bool) -> str | None:
        """The name by which `recurrence` knows the activation, or None if the general loop is needed."""
        cell = self.cell
        if (
            not is_fused()
            or mask is not None
            or self.unroll
            or (training and cell.recurrent_dropout)
            or cell.compute_dtype not in ("float32", "float64")
        ):
            return None
        if isinstance(cell.activation, ModReLU):
            return "modrelu"
        return next((name for name in ACTIVATIONS if cell.activation is getattr(keras.activations, name, None)), None)

    def get_config(self) -> Config:
        config = super().get_config()
        del config["cell"]
        return {**self.cell.get_config(), **config}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "OrthogonalRNN":
        return cls(**config)
