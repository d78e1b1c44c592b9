"""One graph for all layers of the same size: what keeps a deep flow quick to trace."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_auxref.ops._xla import inside_xla


def shared(function: Callable[..., Any], *arguments: Any, **static: Any) -> Any:
    """function(*arguments, **static), in a graph as the call of a function that is traced once for its shapes and dtypes.

    The functions that factor W and use its factors hold a branch for every way in which that may turn out. A flow has dozens of
    layers with the same sizes: traced and optimised once and called, they cost TensorFlow what one costs. Outside of graphs
    nothing is traced.

    Args:
        function: A function of a module, of nests of tensors (and of integers, which stay what they are). It is a constant to
            automatic differentiation: call it inside of a custom gradient.
        *arguments: Its positional arguments.
        **static: Its keyword arguments: constants that can be hashed.
    """
    if tf.executing_eagerly():
        return function(*arguments, **static)
    # Without a way for gradients into the function, TensorFlow does not build its gradient beside it.
    arguments = tf.nest.map_structure(lambda t: tf.stop_gradient(t) if tf.is_tensor(t) else t, arguments)
    return _traced(function, tuple(sorted(static.items())), inside_xla())(*arguments)


@functools.lru_cache(maxsize=256)
def _traced(function: Callable[..., Any], static: tuple[tuple[str, Any], ...], xla: bool) -> Any:
    # `xla` is part of the key, because what is traced for XLA avoids operations that it lacks. Without inlining the
    # function is also optimised once, and not at every call.
    return tf.function(
        functools.partial(function, **dict(static)), autograph=False, experimental_attributes=None if xla else {"_noinline": True}
    )
