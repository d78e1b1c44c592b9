"""TensorFlow's automatic differentiation, and whether it traces for XLA."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

ZERO = tf.UnconnectedGradients.ZERO


def inside_xla() -> bool:
    """True while tracing a `tf.function(jit_compile=True)`, where there is no eigendecomposition of a general matrix.

    TensorFlow has no public function for this. If the private one is missing, the answer is False, and XLA reports the
    operation that it cannot compile.
    """
    if tf.executing_eagerly():
        return False
    try:
        from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
    except ImportError:
        return False
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def vjp(function: Callable[..., object]) -> Callable[..., tuple[tf.Tensor, ...]]:
    """(cotangents, *arguments) → gradients: the vector-Jacobian product of a function, by automatic differentiation."""

    def gradient(cotangents: object, *arguments: tf.Tensor) -> Any:
        # In the body of a loop the tape does not see what is computed from the arguments themselves, because TensorFlow moves it.
        inputs = [tf.identity(argument) for argument in arguments]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = function(*inputs)
        outputs, cotangents = tf.nest.flatten(outputs), tf.nest.flatten(cotangents)
        return tape.gradient(outputs, inputs, cotangents, unconnected_gradients=ZERO)

    return gradient
