"""A whole recurrence h_t = φ(T(h_{t−1}) + V x_t + b) as one function with its gradient in closed form, for TensorFlow."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_auxref.ops._checks import HALF, as_tensor, check_vectors_and_matrix, require_tensorflow
from keras_auxref.ops._rows import epsilon

TRANSITIONS = ("aux", "linear")
ACTIVATIONS = ("linear", "modrelu", "relu", "sigmoid", "tanh")
"""The activations whose derivative is a function of their output: nothing else has to be stored."""


class Transition(NamedTuple):
    """T with its vector-Jacobian product. `forward(h)` gives T(h) and what to save; `backward(g, h, *saved)` gives the cotangent
    of h and the gu whose Σ gu hᵀ is the gradient of the kernel.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    saved_sizes: tuple[int, ...]


def modrelu(x: Any, bias: Any) -> Any:
    """The real modReLU, sign(x) · relu(|x| + b), for b broadcast against x. Zero stays zero, whatever b.

    Example:
    >>> import numpy as np
    >>> print(modrelu(np.array([-3.0, 0.5, 0.0]), np.array([-1.0, -1.0, 1.0])).numpy())
    [-2.  0.  0.]

    Reference: Arjovsky, Shah & Bengio, "Unitary Evolution Recurrent Neural Networks", ICML 2016.
    """
    x = ops.convert_to_tensor(x)
    return ops.sign(x) * ops.relu(ops.abs(x) + bias)


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
    step of this size costs. Second derivatives are exact: they come from automatic differentiation. TensorFlow only.

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
    require_tensorflow("recurrence")
    x, state, kernel, v = (as_tensor(t, n) for t, n in ((x, "x"), (state, "state"), (kernel, "kernel"), (input_kernel, "V")))
    _check(x, state, kernel, v, activation_bias, transition, activation)
    # Both know the size of the batch or neither: a loop may not lose it on the way.
    x.set_shape((None, state.shape[0], None))
    state.set_shape((x.shape[1], None))
    zeros = ops.zeros(kernel.shape[:1], dtype=kernel.dtype)
    biases = (zeros if b is None else as_tensor(b, "bias") for b in (input_bias, activation_bias))
    plain, fast = _implementations(transition, activation, return_sequences)
    return (fast if closed_form else plain)(x, state, kernel, v, *biases)


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


@functools.cache
def _implementations(transition: str, activation: str, return_sequences: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The recurrence that TensorFlow differentiates, and the one with its gradient in closed form."""
    import tensorflow as tf

    from keras_auxref.ops._gradients import with_reference_gradient
    from keras_auxref.ops._xla import inside_xla

    make_transition = {"aux": _aux, "linear": _linear}[transition]
    activate, deactivate = _activation(activation)

    def project(x: tf.Tensor, state: tf.Tensor, v: tf.Tensor, b: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """The number of steps, and V x_t + b for all of them."""
        steps = tf.shape(x)[0] if x.shape[0] is None else x.shape[0]
        z = tf.nn.bias_add(tf.matmul(tf.reshape(x, (-1, v.shape[0])), v), b)
        z = tf.reshape(z, (steps, *tf.unstack(tf.shape(state))))
        return steps, tf.ensure_shape(z, (x.shape[0], *state.shape))

    def run(unroll: bool, x: Any, state: Any, kernel: Any, v: Any, b: Any, bias: Any) -> tf.Tensor:
        """The recurrence in operations that differentiate themselves, which keeps no more than is asked for."""
        steps, projected = project(x, state, v, b)
        step = make_transition(kernel)

        def body(t: Any, h: tf.Tensor, states: list[tf.TensorArray]) -> Any:
            h = activate(step.forward(h)[0] + projected[t], bias)
            return t + 1, h, [a.write(t, h) for a in states]

        loop: Any = (0, state, [tf.TensorArray(x.dtype, steps, element_shape=state.shape)] if return_sequences else [])
        if unroll:
            for _ in range(steps):
                loop = body(*loop)
        else:  # XLA differentiates only a loop with a known end
            loop = tf.while_loop(lambda t, *_: t < steps, body, loop, maximum_iterations=steps)
        return loop[2][0].stack() if return_sequences else loop[1]

    def reference(g: tf.Tensor, *arguments: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            y = run(inside_xla(), *arguments)  # which cannot compile the gradient of the gradient of a loop
        return tape.gradient(y, list(arguments), g, unconnected_gradients=tf.UnconnectedGradients.ZERO)

    @tf.custom_gradient
    def closed_form(
        x: tf.Tensor, state: tf.Tensor, kernel: tf.Tensor, v: tf.Tensor, b: tf.Tensor, bias: tf.Tensor
    ) -> tuple[tf.Tensor, Callable[..., Any]]:
        steps, projected = project(x, state, v, b)
        step = make_transition(kernel)
        # At this size an addition that broadcasts takes as long as three that do not.
        full_bias = tf.broadcast_to(bias, tf.shape(state))

        def array(size: Any, last: int) -> tf.TensorArray:
            return tf.TensorArray(x.dtype, size, element_shape=(state.shape[0], last), clear_after_read=False)

        def forward(t: tf.Tensor, h: tf.Tensor, states: tf.TensorArray, saved: list[tf.TensorArray]) -> Any:
            y, values = step.forward(h)
            h = activate(y + projected[t], full_bias)
            saved = [a.write(t, value) for a, value in zip(saved, values, strict=True)]
            return t + 1, h, states.write(t + 1, h), saved

        start = (array(steps + 1, state.shape[1]).write(0, state), [array(steps, size) for size in step.saved_sizes])
        _, last, states, saved = tf.while_loop(lambda t, *_: t < steps, forward, (0, state, *start))

        def fast(g: tf.Tensor, x: tf.Tensor, state: tf.Tensor, kernel: tf.Tensor, v: tf.Tensor, *_: tf.Tensor) -> Any:
            def backward(
                t: tf.Tensor, h: tf.Tensor, gh: tf.Tensor, sums: tuple[tf.Tensor, ...], gx: tf.TensorArray
            ) -> tuple[Any, ...]:
                previous = states.read(t)
                gz, gb = deactivate(gh + g[t] if return_sequences else gh, h)
                gh, gu = step.backward(gz, previous, *(a.read(t) for a in saved))
                # Sums in every step: to keep every gu and gz for one product after the loop takes longer.
                terms = (tf.matmul(gu, previous, transpose_a=True), tf.matmul(x[t], gz, transpose_a=True), gz, gb)
                sums = tuple(total if term is None else total + term for total, term in zip(sums, terms, strict=True))
                return t - 1, previous, gh, sums, gx.write(t, tf.matmul(gz, v, transpose_b=True))

            zeros = tf.zeros_like(state)
            sums = (tf.zeros_like(kernel), tf.zeros_like(v), zeros, zeros)
            loop = (steps - 1, last, zeros if return_sequences else g, sums, array(steps, v.shape[0]))
            _, _, gh, (gk, gv, gz, gb), gx = tf.while_loop(lambda t, *_: t >= 0, backward, loop)
            return gx.stack(), gh, gk, gv, tf.reduce_sum(gz, axis=0), tf.reduce_sum(gb, axis=0)

        y = states.stack()[1:] if return_sequences else last
        return y, lambda g: with_reference_gradient(fast, reference)(g, x, state, kernel, v, b, bias)

    return functools.partial(run, False), closed_form


def _linear(kernel: Any) -> Transition:
    import tensorflow as tf

    transposed = tf.transpose(kernel)
    return Transition(lambda h: (tf.matmul(h, transposed), ()), lambda g, h: (tf.matmul(g, kernel), g), ())


def _aux(kernel: Any) -> Transition:
    """f(h) = H(Wh) h as in `reflect`, with what depends on W alone computed once."""
    import tensorflow as tf

    transposed = tf.transpose(kernel)
    bound = 4 * epsilon(kernel.dtype.name) * math.sqrt(kernel.shape[0]) * tf.reduce_max(tf.abs(tf.stop_gradient(kernel)))

    def forward(h: tf.Tensor) -> Any:
        u = tf.matmul(h, transposed)
        # The length of u is no matter to H(u), so that its scale may be a constant to the gradient.
        magnitude, size = (tf.reduce_max(tf.abs(tf.stop_gradient(t)), axis=-1, keepdims=True) for t in (u, h))
        # A row that W annihilates gets scale, factor and coefficient 0. A NaN comes through in the direction.
        scale = tf.math.divide_no_nan(tf.cast(magnitude > bound * size, h.dtype), magnitude)
        direction = u * scale
        factor = tf.math.divide_no_nan(tf.constant(2, h.dtype), tf.reduce_sum(tf.square(direction), axis=-1, keepdims=True))
        coefficient = factor * tf.reduce_sum(direction * h, axis=-1, keepdims=True)
        return h - coefficient * direction, (direction, scale, factor, scale * coefficient)

    def backward(g: tf.Tensor, h: tf.Tensor, direction: tf.Tensor, scale: tf.Tensor, factor: tf.Tensor, scaled: tf.Tensor) -> Any:
        k = factor * tf.reduce_sum(g * direction, axis=-1, keepdims=True)
        e = k * direction - g
        gu = scaled * e - (scale * k) * h
        return tf.matmul(gu, kernel) - e, gu

    return Transition(forward, backward, (kernel.shape[0], 1, 1, 1))


def _activation(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """φ(z) with the bias of modReLU; and from the cotangent g of φ(z) and φ(z) itself, those of z and of the bias."""
    import tensorflow as tf

    def deactivate_modrelu(g: tf.Tensor, h: tf.Tensor) -> Any:
        sign = tf.sign(h)
        gb = g * sign
        return gb * sign, gb

    return {
        "linear": (lambda z, _: z, lambda g, h: (g, None)),
        "modrelu": (modrelu, deactivate_modrelu),
        "relu": (lambda z, _: tf.nn.relu(z), lambda g, h: (g * tf.sign(h), None)),
        "sigmoid": (lambda z, _: tf.sigmoid(z), lambda g, h: (g * h * (1 - h), None)),
        "tanh": (lambda z, _: tf.tanh(z), lambda g, h: (g * (1 - tf.square(h)), None)),
    }[name]
