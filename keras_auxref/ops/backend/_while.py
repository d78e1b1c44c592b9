"""The recurrence for TensorFlow: `tf.while_loop` forward, and another one for the gradient."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_auxref.ops.backend._tape import inside_xla, vjp


class Loop(NamedTuple):
    """One kind of recurrence. `parts(kernel)` are the transition T, φ, and the gradient of φ from its output."""

    parts: Callable[[Any], Any]
    return_sequences: bool

    @staticmethod
    def aligned(x: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Either both know the batch size or neither does: its static shape must not change in a loop."""
        x = tf.ensure_shape(x, (None, state.shape[0], None))
        return x, tf.ensure_shape(state, (x.shape[1], None))

    def plain(
        self, x: tf.Tensor, state: tf.Tensor, kernel: tf.Tensor, v: tf.Tensor, b: tf.Tensor, bias: tf.Tensor, unroll: bool = False
    ) -> tf.Tensor:
        """The recurrence with automatic differentiation. It keeps only what the caller needs."""
        steps, projected = _project(x, state, v, b)
        step, activate, _ = self.parts(kernel)

        def body(t: tf.Tensor, h: tf.Tensor, states: list[tf.TensorArray]) -> Any:
            h = activate(step.forward(h)[0] + projected[t], bias)
            return t + 1, h, [a.write(t, h) for a in states]

        arrays = [tf.TensorArray(x.dtype, steps, element_shape=state.shape)] if self.return_sequences else []
        loop: Any = (0, state, arrays)
        if unroll:
            for _ in range(steps):
                loop = body(*loop)
        else:  # XLA differentiates only loops of known length
            loop = tf.while_loop(lambda t, *_: t < steps, body, loop, maximum_iterations=steps)
        return loop[2][0].stack() if self.return_sequences else loop[1]

    def forward(
        self, x: tf.Tensor, state: tf.Tensor, kernel: tf.Tensor, v: tf.Tensor, b: tf.Tensor, bias: tf.Tensor, _: object
    ) -> Any:
        """The states, and what the transition saves of every step."""
        steps, projected = _project(x, state, v, b)
        step, activate, *_ = self.parts(kernel)
        # At this size an addition with broadcasting takes as long as three without.
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
        self, g: tf.Tensor, kept: tf.Tensor, x: tf.Tensor, state: tf.Tensor, kernel: tf.Tensor, v: tf.Tensor, *rest: object
    ) -> tuple[tf.Tensor, ...]:
        """The gradients for all six arguments, in one loop from the last step to the first."""
        steps, last, states, saved = kept
        step, _, deactivate = self.parts(kernel)

        def body(t: tf.Tensor, h: tf.Tensor, gh: tf.Tensor, sums: tuple[tf.Tensor, ...], gx: tf.TensorArray) -> tuple[Any, ...]:
            previous = states.read(t)
            gz, gb = deactivate(gh + g[t] if self.return_sequences else gh, h)
            gh, gu = step.backward(gz, previous, *(a.read(t) for a in saved))
            # Sum in every step: keeping every gu and gz for one product after the loop takes longer.
            terms = (tf.matmul(gu, previous, transpose_a=True), tf.matmul(x[t], gz, transpose_a=True), gz, gb)
            sums = tuple(total if term is None else total + term for total, term in zip(sums, terms, strict=True))
            return t - 1, previous, gh, sums, gx.write(t, tf.matmul(gz, v, transpose_b=True))

        zeros = tf.zeros_like(state)
        sums = (tf.zeros_like(kernel), tf.zeros_like(v), zeros, zeros)
        loop = (steps - 1, last, zeros if self.return_sequences else g, sums, _array(state, steps, v.shape[0]))
        _, _, gh, (gk, gv, gz, gb), gx = tf.while_loop(lambda t, *_: t >= 0, body, loop)
        return gx.stack(), gh, gk, gv, tf.reduce_sum(gz, axis=0), tf.reduce_sum(gb, axis=0)

    def reference(self, g: tf.Tensor, *arguments: tf.Tensor) -> tuple[tf.Tensor, ...]:
        # XLA cannot compile the gradient of the gradient of a loop.
        return vjp(functools.partial(self.plain, unroll=inside_xla()))(g, *arguments[:-1])


def _project(x: tf.Tensor, state: tf.Tensor, v: tf.Tensor, b: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The number of steps, and V x_t + b for all of them."""
    steps = tf.shape(x)[0] if x.shape[0] is None else x.shape[0]
    z = tf.nn.bias_add(tf.matmul(tf.reshape(x, (-1, v.shape[0])), v), b)
    z = tf.reshape(z, (steps, *tf.unstack(tf.shape(state))))
    return steps, tf.ensure_shape(z, (x.shape[0], *state.shape))


def _array(state: tf.Tensor, size: Any, last: int) -> Any:
    return tf.TensorArray(state.dtype, size, element_shape=(state.shape[0], last), clear_after_read=False)
