"""The recurrence for JAX: `jax.lax.scan` forward, and another one backward for the gradient."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from keras import ops

from keras_auxref.typing import Tensor


class Scan(NamedTuple):
    """One kind of recurrence. The methods are those of the TensorFlow version."""

    parts: Callable[[Any], Any]
    return_sequences: bool

    @staticmethod
    def aligned(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Unchanged: JAX knows all sizes."""
        return x, state

    def plain(self, x: Tensor, state: Tensor, kernel: Tensor, v: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        """The recurrence with automatic differentiation. It keeps only what the caller needs."""
        step, activate, _ = self.parts(kernel)

        def body(h: Tensor, projected: Tensor) -> Any:
            h = activate(step.forward(h)[0] + projected, bias)
            return h, h if self.return_sequences else None

        last, states = jax.lax.scan(body, state, ops.matmul(x, v) + b)
        return states if self.return_sequences else last

    def forward(self, x: Tensor, state: Tensor, kernel: Tensor, v: Tensor, b: Tensor, bias: Tensor, _: object) -> Any:
        """The states, and what the transition saves of every step."""
        step, activate, _ = self.parts(kernel)

        def body(h: Tensor, projected: Tensor) -> Any:
            y, saved = step.forward(h)
            h = activate(y + projected, bias)
            return h, (h, saved)

        last, (states, saved) = jax.lax.scan(body, state, ops.matmul(x, v) + b)
        return states if self.return_sequences else last, (states, saved)

    def backward(
        self, g: Tensor, kept: Any, x: Tensor, state: Tensor, kernel: Tensor, v: Tensor, *rest: object
    ) -> tuple[Tensor, ...]:
        """The gradients for all six arguments: one loop from the last step to the first, and one product for each weight."""
        states, saved = kept
        step, _, deactivate = self.parts(kernel)
        previous = ops.concatenate([state[None], states[:-1]])

        def body(carry: Any, now: Any) -> Any:
            gh, total = carry
            h, before, values, arrived = now
            gz, gb = deactivate(gh if arrived is None else gh + arrived, h)
            gh, gu = step.backward(gz, before, *values)
            return (gh, total if gb is None else total + gb), (gz, gu)

        zeros = ops.zeros_like(state)
        first = (zeros if self.return_sequences else g, zeros)
        rows = (states, previous, saved, g if self.return_sequences else None)
        (gh, gb), (gz, gu) = jax.lax.scan(body, first, rows, reverse=True)
        gk, gv = _over_time(gu, previous), _over_time(x, gz)
        return ops.matmul(gz, ops.transpose(v)), gh, gk, gv, ops.sum(gz, axis=(0, 1)), ops.sum(gb, axis=0)

    def reference(self, g: Tensor, *arguments: Tensor) -> tuple[Tensor, ...]:
        return jax.vjp(self.plain, *arguments[:-1])[1](g)


def _over_time(a: Tensor, b: Tensor) -> Tensor:
    """Σ a bᵀ over time and batch, as one matrix product."""
    a, b = (ops.reshape(t, (-1, t.shape[-1])) for t in (a, b))
    return ops.matmul(ops.transpose(a), b)
