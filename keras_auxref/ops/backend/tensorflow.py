"""TensorFlow: eager, in graphs and under XLA."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_auxref.ops.backend._pfor import let_vectorise

ZERO = tf.UnconnectedGradients.ZERO


def wide_dtype() -> str:
    """The most precise floating-point dtype."""
    return "float64"


def inside_xla() -> bool:
    """True while tracing a `tf.function(jit_compile=True)`, where there is no eigendecomposition of a general matrix.

    TensorFlow offers no public question for this; where the private one is missing, the answer is False, and XLA reports the
    operation that it cannot compile.
    """
    if tf.executing_eagerly():
        return False
    try:
        from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
    except ImportError:
        return False
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def tanh(x: Any) -> Any:
    """tanh in the dtype of x: Keras' own passes float64 through float32 on JAX."""
    return keras.ops.tanh(x)


def solve_upper(t: Any, b: Any) -> Any:
    """T⁻¹b for an upper triangular T of (m, m)."""
    return keras.ops.solve_triangular(t, b)


def vjp(function: Callable[..., Any]) -> Callable[..., Any]:
    """(cotangents, *arguments) → gradients: the vector-Jacobian product of a function, by automatic differentiation."""

    def gradient(cotangents: Any, *arguments: tf.Tensor) -> Any:
        # In the body of a loop the tape does not see what is computed from the arguments themselves: TensorFlow moves it.
        inputs = [tf.identity(argument) for argument in arguments]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = function(*inputs)
        outputs, cotangents = tf.nest.flatten(outputs), tf.nest.flatten(cotangents)
        return tape.gradient(outputs, inputs, cotangents, unconnected_gradients=ZERO)

    return gradient


def closed_form(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    reference: Callable[..., Any],
    arguments: tuple[tf.Tensor, ...],
    constants: Any = (),
    plain: Callable[..., Any] | None = None,
) -> Any:
    """forward(*arguments, constants), differentiated by `backward`, and a second time through `reference`.

    A gradient that is computed from saved intermediates is a constant to an outer tape, so that differentiating it again would
    be silently wrong. Second and higher derivatives come from automatic differentiation of `reference`, which is the same
    gradient in differentiable operations. It runs only when such a derivative is asked for.

    Args:
        forward: (*arguments, constants) → (outputs, saved).
        backward: (cotangents, saved, *arguments, constants) → gradients for the arguments. With one output, `cotangents` is one
            tensor; with several, a tuple.
        reference: (cotangents, *arguments, constants) → the same gradients, differentiable.
        arguments: Tensors, not variables.
        constants: A nest of tensors that nothing is differentiated for.
        plain: (*arguments) → outputs in differentiable operations, for forward mode, which knows no gradients of one's own;
            without it forward mode is refused.
    """
    if _forward_mode(arguments):
        if plain is None:
            raise NotImplementedError(
                "Forward-mode differentiation (`tf.autodiff.ForwardAccumulator`) does not know the gradient of this function. "
                "Expected reverse mode (`tf.GradientTape`)."
            )
        return plain(*arguments)

    # What is computed inside is a constant to tapes and forward accumulators of its own: they use the gradient below.
    @tf.custom_gradient
    def function(*arguments: tf.Tensor) -> Any:
        still = tuple(tf.stop_gradient(t) for t in arguments)
        outputs, saved = forward(*still, constants)

        def gradient(*cotangents: tf.Tensor) -> Any:
            count = len(cotangents)

            def pack(cotangents: Any) -> Any:
                return cotangents[0] if count == 1 else tuple(cotangents)

            @tf.custom_gradient
            def differentiable(*tensors: tf.Tensor) -> Any:
                def second(*seconds: tf.Tensor) -> Any:
                    def plain(*tensors: tf.Tensor) -> Any:
                        return reference(pack(tensors[:count]), *tensors[count:], constants)

                    return vjp(plain)(list(seconds), *tensors)

                return backward(pack(tensors[:count]), saved, *tensors[count:], constants), second

            return differentiable(*cotangents, *arguments)

        return outputs, gradient

    return function(*arguments)


def _forward_mode(arguments: tuple[tf.Tensor, ...]) -> bool:
    """Whether a forward accumulator watches an argument. TensorFlow offers no public question for this."""
    try:
        from tensorflow.python.eager.forwardprop_util import pack_tangents
    except ImportError:
        return False
    return bool(pack_tangents(list(arguments)).tangents)


def shared(function: Callable[..., Any], *arguments: Any, rows: int = 0, **static: Any) -> Any:
    """function(*arguments, **static), in a graph as the call of a function that is traced once for its shapes and dtypes.

    The functions that factor W and use its factors hold a branch for every way in which that may turn out. A flow has dozens of
    layers with the same sizes: traced and optimised once and called, they cost TensorFlow what one costs. Outside of graphs
    nothing is traced.

    Args:
        function: A function of a module, of nests of tensors (and of integers, which stay what they are). It is a constant to
            automatic differentiation: call it inside of a closed form.
        *arguments: Its positional arguments.
        rows: How many of its first arguments are batches of rows, (n, …), as all its outputs then are: `tf.vectorized_map` makes
            one call with the rows of all iterations. With 0 it calls the function once for each.
        **static: Its keyword arguments: constants that can be hashed.
    """
    if tf.executing_eagerly():
        return function(*arguments, **static)
    # Without a way for gradients into the function, TensorFlow does not build its gradient beside it.
    arguments = tf.nest.map_structure(lambda t: tf.stop_gradient(t) if tf.is_tensor(t) else t, arguments)
    call = _traced(function, tuple(sorted(static.items())), inside_xla())
    outputs = call(*arguments)
    let_vectorise(outputs, call, arguments, rows)
    return outputs


@functools.lru_cache(maxsize=256)
def _traced(function: Callable[..., Any], static: tuple[tuple[str, Any], ...], xla: bool) -> Any:
    # `xla` is part of the key, because what is traced for XLA avoids operations that it lacks. Without inlining the
    # function is also optimised once, and not at every call.
    return tf.function(
        functools.partial(function, **dict(static)), autograph=False, experimental_attributes=None if xla else {"_noinline": True}
    )


def picks_rows() -> bool:
    """Whether `only_rows` costs in proportion to the rows that are chosen. XLA has static shapes."""
    return not inside_xla()


def only_rows(chosen: tf.Tensor, function: Callable[..., Any], current: Any, *rows: Any, total: Any = ()) -> Any:
    """`current`, a nest of (n, …), with the rows where `chosen` (n, 1) replaced by what a function gives for these rows alone.

    Args:
        chosen: Which rows.
        function: (*rows there) → (their part of `current`, what to add to `total`). What it adds must vanish for rows of which
            the first argument is zero: without a way to pick rows, all are computed.
        current: What is there.
        *rows: Nests of tensors of (n, …).
        total: A nest of tensors without rows.

    Returns:
        (current, total).
    """

    def add(extra: Any) -> Any:
        return tf.nest.map_structure(tf.add, total, extra)

    def picked() -> Any:
        index = tf.where(chosen[:, 0])
        new, extra = function(*tf.nest.map_structure(lambda t: tf.gather_nd(t, index), rows))
        return tf.nest.map_structure(lambda a, b: tf.tensor_scatter_nd_update(b, index, a), new, current), add(extra)

    def all_of_them() -> Any:
        masked = tf.nest.map_structure(lambda t: tf.where(chosen, t, tf.zeros_like(t)), rows[0])
        new, extra = function(masked, *rows[1:])
        return tf.nest.map_structure(lambda a, b: tf.where(chosen, a, b), new, current), add(extra)

    return tf.cond(tf.reduce_any(chosen), picked if picks_rows() else all_of_them, lambda: (current, total))
