"""Closed-form gradients whose own gradients stay right."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def with_reference_gradient(fast: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is computed by `fast` and differentiated through `reference`.

    A closed-form gradient computed from saved intermediates is a constant to an outer tape, so differentiating it again would
    be silently wrong. Here second and higher derivatives come from automatic differentiation of `reference`, which computes the
    same value from the arguments in differentiable operations; it runs only when such a derivative is asked for.
    """

    @tf.custom_gradient
    def function(*arguments: tf.Tensor) -> Any:
        def gradient(*cotangents: tf.Tensor) -> Any:
            # In the body of a loop the tape does not see what is computed from the arguments themselves: TensorFlow moves it.
            inputs = [tf.identity(argument) for argument in arguments]
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                outputs = reference(*inputs)
            outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
            return tape.gradient(outputs, inputs, list(cotangents), unconnected_gradients=tf.UnconnectedGradients.ZERO)

        return fast(*arguments), gradient

    return function
