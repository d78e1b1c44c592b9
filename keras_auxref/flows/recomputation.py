"""Equal steps that are recomputed in the backward pass instead of being kept: from their inputs, or with their inverses."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import keras

from keras_auxref.invertible import Invertible
from keras_auxref.ops import backend
from keras_auxref.ops.rows import epsilon
from keras_auxref.typing import Tensor

T = TypeVar("T")
Body: TypeAlias = Callable[..., tuple[T, list[Tensor]]]
"""One step of a loop: (carry, weights, states) → (carry, states)."""


def from_inputs(body: Body[T], carry: T, weights: int, states: int, context: Tensor | None) -> Body[T]:
    """The body of a loop, recomputed when its gradient is needed, as a function of all tensors that it depends on."""
    more = [] if context is None else [context]
    nest = (carry, [0] * weights, [0] * states, more)
    size = len(keras.tree.flatten(carry))

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        carry, weights, states, more = keras.tree.pack_sequence_as(nest, tensors)
        moved, changed = body(carry, weights, states, *more)
        return (*keras.tree.flatten(moved), *changed)

    run = backend.recomputed(flat)

    def again(carry: T, weights: list[Tensor], states: list[Tensor]) -> tuple[T, list[Tensor]]:
        found = run(*keras.tree.flatten((carry, weights, states, more)))
        return keras.tree.pack_sequence_as(carry, list(found[:size])), list(found[size:])

    return again


def by_inverse(
    step: Callable[..., T],
    undo: Callable[..., Tensor],
    start: Callable[[Tensor], T],
    loop: Callable[..., Any],
    x: Tensor,
    weights: list[Tensor],
    context: Tensor | None,
) -> T:
    """K steps of which nothing is kept but the input x and the output y.

    The backward pass goes from the last step to the first: x_k = step_k⁻¹(x_{k+1}), then the gradients of step k at x_k. They
    are right as long as this ends at x; if it misses x by more than half of the digits, all gradients are NaN.

    Args:
        step: (carry, weights of one step, context) → carry: x, or x and the log-determinants so far.
        undo: (y, weights of one step, context) → x.
        start: x → the first carry.
        loop: `backend.loop`, or the same written out.
        x: The input of the first step.
        weights: Tensors of (K, …).
        context: A tensor, or None.
    """
    floating = [keras.backend.is_float_dtype(keras.backend.standardize_dtype(weight.dtype)) for weight in weights]
    floats, whole = ([w for w, f in zip(weights, floating, strict=True) if f is kind] for kind in (True, False))
    count, more = len(floats), [] if context is None else [context]

    def merged(floats: list[Tensor], whole: list[Tensor]) -> list[Tensor]:
        parts = {True: iter(floats), False: iter(whole)}
        return [next(parts[f]) for f in floating]

    def plain(x: Tensor, tensors: tuple[Tensor, ...], whole: list[Tensor]) -> T:
        def body(carry: T, slices: list[Tensor], _: list[Tensor]) -> tuple[T, list[Tensor]]:
            return step(carry, merged(slices[:count], slices[count:]), *tensors[count:]), []

        return loop(body, start(x), [*tensors[:count], *whole], [])[0]

    def forward(x: Tensor, *given: Any) -> tuple[T, Tensor]:
        outputs = plain(x, given[:-1], given[-1])
        return outputs, keras.tree.flatten(outputs)[0]

    def backward(cotangents: Any, y: Tensor, x: Tensor, *given: Any) -> Any:
        g, *of_log_det = keras.tree.flatten(cotangents)
        context = list(given[count:-1])

        def body(carry: Any, whole: list[Tensor], floats: list[Tensor]) -> tuple[Any, list[Tensor]]:
            y, g, sums = carry
            x = undo(y, merged(floats, whole), *context)

            def again(x: Tensor, *tensors: Tensor) -> T:
                return step(start(x), merged(list(tensors[:count]), whole), *tensors[count:])

            g, *found = backend.vjp(again)((g, *of_log_det) if of_log_det else g, x, *floats, *context)
            # No inverse before the gradients of the step above: otherwise the activations of many steps are in memory at once.
            x, g = backend.together(x, g)
            return (x, g, [a + b for a, b in zip(sums, found[count:], strict=True)]), found[:count]

        first = (y, g, [keras.ops.zeros_like(tensor) for tensor in context])
        # To the loop the weights are states: each slice is replaced by its gradient.
        (found, g, sums), of_weights = loop(body, first, given[-1], list(given[:count]), reverse=True)
        limit = math.sqrt(epsilon(keras.backend.standardize_dtype(x.dtype))) * keras.ops.max(keras.ops.abs(x))
        missed = keras.ops.logical_not(keras.ops.max(keras.ops.abs(found - x)) <= limit)
        return tuple(keras.ops.where(missed, float("nan"), gradient) for gradient in (g, *of_weights, *sums))

    def reference(cotangents: Any, x: Tensor, *given: Any) -> Any:
        return backend.vjp(lambda x, *tensors: plain(x, tensors, given[-1]))(cotangents, x, *given[:-1])

    return backend.closed_form(forward, backward, reference, (x, *floats, *more), whole)


def as_function(layer: keras.layers.Layer, step: Callable[..., T]) -> Callable[..., T]:
    """A step with a layer as a function of the carry, the weights of the layer and a context. It must not change the weights."""
    variables = layer.variables

    def run(carry: T, weights: list[Tensor], *context: Tensor) -> T:
        with keras.StatelessScope(list(zip(variables, weights, strict=True))) as scope:
            before = [scope.get_current_value(variable) for variable in variables]
            carry = step(carry, *context)
        for variable, value in zip(variables, before, strict=True):
            if scope.get_current_value(variable) is not value:
                raise ValueError(
                    '`remat="inverse"` runs every step a second time. Expected steps that change no state in training. '
                    f"Received: a change of '{variable.path}'. `remat=True` takes any layer."
                )
        return carry

    return run


def refuse_in_doubt(layer: Invertible, name: str) -> None:
    """Refuses a layer of the flow `name` if a part of it has no certificate or may lose it in training."""
    for part in layer.inverse_parts():
        try:
            reason = "W is free, and may lose its certificate in training." if part.in_doubt else part.certificate().reason
            fits = not part.in_doubt and part.certificate().invertible
        except NotImplementedError as error:
            fits, reason = False, str(error)
        if not fits:
            raise ValueError(
                f'`remat="inverse"` needs an inverse that is proven. Expected layers with a certificate. Received: layer '
                f"'{part.name}' of '{name}'. {reason} `remat=True` takes any layer."
            )
