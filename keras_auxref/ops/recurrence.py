"""A whole recurrence h_t = φ(T(h_{t−1}) + V x_t + b) as one function with its gradient in closed form: TensorFlow, JAX."""

import functools
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops._checks import HALF, as_tensor, check_vectors_and_matrix
from keras_auxref.ops._scan import Scan
from keras_auxref.ops._transitions import TRANSITIONS, parts
from keras_auxref.ops.activations import ACTIVATIONS
from keras_auxref.typing import Tensor


def recurrence(
    x: Any,
    state: Any,
    kernel: Any,
    input_kernel: Any,
    input_bias: Any = None,
    activation_bias: Any = None,
    *,
    transition: str = "aux",
    activation: str = "modrelu",
    return_sequences: bool = False,
    closed_form: bool = True,
) -> Any:
    """Runs a recurrence over the first axis of x.

        h_t = φ(T(h_{t−1}) + V x_t + b),      t = 1 … time,      h_0 = state
        aux:     T(h) = H(Wh) h, W the kernel, with the rules of `reflect`: T(h) = h where W h = 0, and no overflow
        linear:  T(h) = U h, U the kernel

    V x_t + b is one matrix product for all t. Then comes one loop forward, which keeps the states and for `aux` the directions of
    the reflections, and one backward, which carries the cotangent of the state and the sums for the weights. Automatic
    differentiation of the same loop would store the result of every operation of every step; what is stored is most of what a
    step of this size costs. Second derivatives are exact: they come from automatic differentiation. TensorFlow and JAX.

    Args:
        x: Tensor of shape `(time, batch, d)`, in float32 or float64.
        state: Tensor of shape `(batch, n)`.
        kernel: Tensor of shape `(n, n)`.
        input_kernel: Vᵀ, of shape `(d, n)`, as Keras has it.
        input_bias: b, of shape `(n,)`, or None.
        activation_bias: The bias of modReLU, of shape `(n,)`; for the other activations None.
        transition: `"aux"` or `"linear"`.
        activation: φ, one of `ACTIVATIONS`.
        return_sequences: Whether to return every state instead of the last.
        closed_form: With False nothing is kept for the gradient, for inference and for export (a SavedModel cannot hold what the
            closed form keeps). The value is the same, and the gradient right, by automatic differentiation.

    Returns:
        A tensor of shape `(batch, n)`, or `(time, batch, n)` with `return_sequences`.
    """
    if not is_fused():
        raise NotImplementedError(
            f"`recurrence` needs Keras' backend TensorFlow or JAX. Received: KERAS_BACKEND={keras.backend.backend()!r}"
        )
    x, state, kernel, v = (as_tensor(t, n) for t, n in ((x, "x"), (state, "state"), (kernel, "kernel"), (input_kernel, "V")))
    _check(x, state, kernel, v, activation_bias, transition, activation)
    zeros = ops.zeros(kernel.shape[:1], dtype=kernel.dtype)
    biases = (zeros if b is None else as_tensor(b, "bias") for b in (input_bias, activation_bias))
    loop = (Scan if keras.backend.backend() == "jax" else _Loop)(transition, activation, return_sequences)
    if isinstance(loop, _Loop):  # both know the size of the batch or neither: a loop may not lose it on the way
        x.set_shape((None, state.shape[0], None))
        state.set_shape((x.shape[1], None))
    arguments = (x, state, kernel, v, *biases)
    return backend.closed_form(loop.forward, loop.backward, loop.reference, arguments) if closed_form else loop.plain(*arguments)


def is_fused() -> bool:
    """Whether this backend has the loops of `recurrence`."""
    return keras.backend.backend() in ("tensorflow", "jax")


def _check(x: Any, state: Any, kernel: Any, v: Any, activation_bias: Any, transition: str, activation: str) -> None:
    if transition not in TRANSITIONS:
        raise ValueError(f"Unknown transition. Expected one of {list(TRANSITIONS)}. Received: {transition!r}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"Unknown activation. Expected one of {list(ACTIVATIONS)}. Received: {activation!r}")
    if (activation_bias is None) == (activation == "modrelu"):
        raise ValueError(
            "`activation_bias` is the bias of modReLU. Expected a tensor for activation='modrelu' and None for the others. "
            f"Received: activation={activation!r}, activation_bias={'None' if activation_bias is None else 'a tensor'}"
        )
    check_vectors_and_matrix(state, kernel, "state")
    shapes = tuple(tuple(t.shape) for t in (x, state, v))
    if [len(shape) for shape in shapes] != [3, 2, 2] or shapes[2] != (shapes[0][2], shapes[1][1]):
        raise ValueError(
            "Expected shapes (time, batch, d) for `x`, (batch, n) for `state` and (d, n) for `input_kernel`. Received: "
            "x {}, state {}, input_kernel {}".format(*shapes)
        )
    dtypes = [keras.backend.standardize_dtype(t.dtype) for t in (x, kernel, v)]
    if len(set(dtypes)) > 1 or dtypes[0] in HALF:
        raise ValueError(f"Expected one dtype, float32 or float64. Received: x {dtypes[0]}, kernel {dtypes[1]}, V {dtypes[2]}")


class _Loop(NamedTuple):
    """One kind of recurrence, for TensorFlow, which owns the loops and arrays."""

    transition: str
    activation: str
    return_sequences: bool

    def plain(self, x: Tensor, state: Tensor, kernel: Tensor, v: Tensor, b: Tensor, bias: Tensor, unroll: bool = False) -> Tensor:
        """The recurrence in operations that differentiate themselves, which keeps no more than is asked for."""
        import tensorflow as tf

        steps, projected = _project(x, state, v, b)
        step, activate, _ = parts(self.transition, self.activation, kernel)

        def body(t: Any, h: tf.Tensor, states: list[tf.TensorArray]) -> Any:
            h = activate(step.forward(h)[0] + projected[t], bias)
            return t + 1, h, [a.write(t, h) for a in states]

        arrays = [tf.TensorArray(x.dtype, steps, element_shape=state.shape)] if self.return_sequences else []
        loop: Any = (0, state, arrays)
        if unroll:
            for _ in range(steps):
                loop = body(*loop)
        else:  # XLA differentiates only a loop with a known end
            loop = tf.while_loop(lambda t, *_: t < steps, body, loop, maximum_iterations=steps)
        return loop[2][0].stack() if self.return_sequences else loop[1]

    def forward(self, x: Tensor, state: Tensor, kernel: Tensor, v: Tensor, b: Tensor, bias: Tensor, _: Any) -> Any:
        """The states, and what the transition saves of every step."""
        import tensorflow as tf

        steps, projected = _project(x, state, v, b)
        step, activate, *_ = parts(self.transition, self.activation, kernel)
        # At this size an addition that broadcasts takes as long as three that do not.
        full_bias = tf.broadcast_to(bias, tf.shape(state))

        def body(t: tf.Tensor, h: tf.Tensor, states: tf.TensorArray, saved: list[tf.TensorArray]) -> Any:
            y, values = step.forward(h)
            h = activate(y + projected[t], full_bias)
            saved = [a.write(t, value) for a, value in zip(saved, values, strict=True)]
            return t + 1, h, states.write(t + 1, h), saved

        states = _array(state, steps + 1, state.shape[1]).write(0, state)
        arrays = [_array(state, steps, size) for size in step.saved_sizes]
        _, last, states, saved = tf.while_loop(lambda t, *_: t < steps, body, (0, state, states, arrays))
        return (states.stack()[1:] if self.return_sequences else last), (steps, last, states, saved)

    def backward(
        self, g: Tensor, kept: Any, x: Tensor, state: Tensor, kernel: Tensor, v: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        """The gradients for all six arguments, in one loop from the last step to the first."""
        import tensorflow as tf

        steps, last, states, saved = kept
        step, _, deactivate = parts(self.transition, self.activation, kernel)

        def body(t: tf.Tensor, h: tf.Tensor, gh: tf.Tensor, sums: tuple[tf.Tensor, ...], gx: tf.TensorArray) -> tuple[Any, ...]:
            previous = states.read(t)
            gz, gb = deactivate(gh + g[t] if self.return_sequences else gh, h)
            gh, gu = step.backward(gz, previous, *(a.read(t) for a in saved))
            # Sums in every step: to keep every gu and gz for one product after the loop takes longer.
            terms = (tf.matmul(gu, previous, transpose_a=True), tf.matmul(x[t], gz, transpose_a=True), gz, gb)
            sums = tuple(total if term is None else total + term for total, term in zip(sums, terms, strict=True))
            return t - 1, previous, gh, sums, gx.write(t, tf.matmul(gz, v, transpose_b=True))

        zeros = tf.zeros_like(state)
        sums = (tf.zeros_like(kernel), tf.zeros_like(v), zeros, zeros)
        loop = (steps - 1, last, zeros if self.return_sequences else g, sums, _array(state, steps, v.shape[0]))
        _, _, gh, (gk, gv, gz, gb), gx = tf.while_loop(lambda t, *_: t >= 0, body, loop)
        return gx.stack(), gh, gk, gv, tf.reduce_sum(gz, axis=0), tf.reduce_sum(gb, axis=0)

    def reference(self, g: Tensor, *arguments: Any) -> Any:
        # XLA cannot compile the gradient of the gradient of a loop.
        return backend.vjp(functools.partial(self.plain, unroll=backend.inside_xla()))(g, *arguments[:-1])


def _project(x: Tensor, state: Tensor, v: Tensor, b: Tensor) -> tuple[Any, Tensor]:
    """The number of steps, and V x_t + b for all of them."""
    import tensorflow as tf

    steps = tf.shape(x)[0] if x.shape[0] is None else x.shape[0]
    z = tf.nn.bias_add(tf.matmul(tf.reshape(x, (-1, v.shape[0])), v), b)
    z = tf.reshape(z, (steps, *tf.unstack(tf.shape(state))))
    return steps, tf.ensure_shape(z, (x.shape[0], *state.shape))


def _array(state: Tensor, size: Any, last: int) -> Any:
    import tensorflow as tf

    return tf.TensorArray(state.dtype, size, element_shape=(state.shape[0], last), clear_after_read=False)
