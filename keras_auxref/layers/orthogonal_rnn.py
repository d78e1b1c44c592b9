"""The recurrent network over `OrthogonalRNNCell`."""

from typing import Any

import keras

from keras_auxref._keras import PACKAGE
from keras_auxref.layers._checks import as_input
from keras_auxref.layers._frozen import given
from keras_auxref.layers.modrelu import ModReLU
from keras_auxref.layers.orthogonal_rnn_cell import OrthogonalRNNCell
from keras_auxref.ops.activations import ACTIVATIONS
from keras_auxref.ops.recurrence import is_fused, recurrence
from keras_auxref.typing import Shape, Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class OrthogonalRNN(keras.layers.RNN):
    """A recurrent network whose transition preserves norms: h_t = activation(T(h_{t−1}) + V x_t + b).

    What does not depend on the state, V x_t + b for every t and the kernel of T, is computed once per sequence. On TensorFlow and
    JAX the rest is one loop (`ops.recurrence`), with its gradient in closed form while training, unless a mask,
    `recurrent_dropout`, `unroll`, half precision or an activation without a known derivative asks for the general loop of
    Keras. Both compute the same.

    Args:
        units: Positive integer, the size n of the state.
        transition: T: `"aux"` (an auxiliary reflection), `"householder"`, `"cayley"` or `"exp"`.
        reflections: The number of Householder reflections; by default n. Only for `"householder"`.
        activation, use_bias, kernel_initializer, recurrent_initializer, bias_initializer, kernel_regularizer,
            recurrent_regularizer, bias_regularizer, kernel_constraint, bias_constraint, dropout, recurrent_dropout, seed: See
            `OrthogonalRNNCell`.
        train_initial_state: Whether the first state is trained or zero. With `stateful` it is zero.
        return_sequences: Whether to return every output instead of the last.
        return_state: Whether to return the last state too.
        go_backwards: Whether to read the sequence backwards (and to return it reversed).
        stateful: Whether the state is carried over from batch to batch, until `reset_state()`.
        unroll: Whether to unroll the loop. Only for short sequences.
        **kwargs: Arguments of `keras.layers.RNN` and `keras.layers.Layer`: `zero_output_for_mask`, `name`, `dtype`, …

    Call arguments:
        sequences: Tensor of shape `(batch, time, features)`.
        initial_state: A state, or a list of it, instead of the layer's own first state. A layer whose first call has one holds no
            trained state, and starts from zero where a later call has none.
        mask: Boolean tensor of shape `(batch, time)`. A masked step keeps the state.
        training: Whether to apply dropout.

    Output: A tensor of shape `(batch, units)`, or `(batch, time, units)` with `return_sequences`; a tuple of it and the state
        with `return_state`.

    Example:
    >>> import numpy as np
    >>> OrthogonalRNN(16, return_sequences=True)(np.ones((2, 100, 3), "float32")).shape
    TensorShape([2, 100, 16])
    """

    def __init__(
        self,
        units: int,
        transition: str = "aux",
        reflections: int | None = None,
        activation: Any = "modrelu",
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        recurrent_initializer: Any = None,
        bias_initializer: Any = "zeros",
        train_initial_state: bool = True,
        kernel_regularizer: Any = None,
        recurrent_regularizer: Any = None,
        bias_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        return_sequences: bool = False,
        return_state: bool = False,
        go_backwards: bool = False,
        stateful: bool = False,
        unroll: bool = False,
        seed: int | None = None,
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
            # A state that is carried over lives in a variable, through which no gradient reaches a trained one.
            train_initial_state=train_initial_state and not stateful,
            kernel_regularizer=kernel_regularizer,
            recurrent_regularizer=recurrent_regularizer,
            bias_regularizer=bias_regularizer,
            kernel_constraint=kernel_constraint,
            bias_constraint=bias_constraint,
            dropout=dropout,
            recurrent_dropout=recurrent_dropout,
            seed=seed,
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
        self.input_spec = [keras.layers.InputSpec(ndim=3)]

    @property
    def units(self) -> int:
        """The size of the state."""
        return self.cell.units

    def build(self, sequences_shape: Shape, initial_state_shape: Shape = None) -> None:
        # A first state that is given leaves a trained one without gradient.
        self.cell.holds_initial_state = initial_state_shape is None
        super().build(sequences_shape, initial_state_shape)

    def call(self, sequences: Tensor, initial_state: Any = None, mask: Any = None, training: bool = False) -> Tensor:
        return super().call(as_input(self, sequences), initial_state=initial_state, mask=mask, training=training)

    def inner_loop(self, sequences: Tensor, initial_state: Any, mask: Any, training: bool = False) -> Any:
        cell = self.cell
        kernel, sequences = cell.transition_kernel(), cell.drop(sequences, training)
        activation = self._fused_activation(mask, training)
        if activation is None:
            with given(cell, transition=kernel):
                return super().inner_loop(cell.project(sequences), initial_state, mask, training)
        weights = (cell.kernel, cell.bias, cell.activation.bias if activation == "modrelu" else None)
        v, bias, activation_bias = (None if w is None else keras.ops.cast(w, cell.compute_dtype) for w in weights)
        x = keras.ops.transpose(sequences, (1, 0, 2))
        outputs = recurrence(
            keras.ops.flip(x, axis=0) if self.go_backwards else x,
            initial_state[0],
            kernel,
            v,
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

    def _fused_activation(self, mask: Any, training: bool) -> str | None:
        """The name by which `recurrence` knows the activation, or None where the general loop is needed."""
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

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["cell"]
        return {**self.cell.get_config(), **config}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "OrthogonalRNN":
        return cls(**config)
