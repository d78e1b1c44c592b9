"""Methods of a model that the backend compiles: the only place of flows that differs between TensorFlow, JAX and torch."""

import functools
from collections.abc import Callable
from typing import Any

import keras


def compiled(method: Callable[..., Any]) -> Any:
    """A method of a model that only computes from tensors, compiled.

    On TensorFlow a `tf.function`, on JAX a `jax.jit` of the function of the model's weights and the arguments, on torch the
    method itself. In all of them gradients pass through, to arguments and to weights.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.function(method, reduce_retracing=True, autograph=False)
    return _jitted(method) if backend == "jax" else method


def _jitted(method: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    name = f"_jitted_{method.__name__}"

    @functools.wraps(method)
    def call(self: Any, *args: Any) -> Any:
        if name not in self.__dict__:
            # Outside of what Keras tracks. The function holds the model and the model the function: they go together.
            def pure(values: list[Any], *args: Any) -> Any:
                with keras.StatelessScope(state_mapping=list(zip(self.variables, values, strict=True))):
                    return method(self, *args)

            object.__setattr__(self, name, jax.jit(pure))
        return self.__dict__[name]([variable.value for variable in self.variables], *args)

    return call
