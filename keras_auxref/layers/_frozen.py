"""What depends on weights alone, computed once and not at every call: for a model that will not be trained any more."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import keras

from keras_auxref._keras import outside_graphs


@dataclass
class _Frozen:
    """The layers that are frozen, what has been computed of each so far, and what is made of a tensor to keep it."""

    layers: set[int]
    keep: Callable[[Any], Any]
    constants: dict[tuple[int, str], Any] = field(default_factory=dict)


_FROZEN: ContextVar[_Frozen | None] = ContextVar("keras_auxref_frozen", default=None)


class Freezable:
    """A layer that computes something from its weights: W, a factorisation of it, an orthogonal matrix.

    The constants live outside of the layer, which must neither save nor track them.
    """

    @property
    def is_frozen(self) -> bool:
        """True inside of `frozen`."""
        state = _FROZEN.get()
        return state is not None and id(self) in state.layers

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """compute(), a nest of tensors; in a frozen layer the result of the first call with this name, as a constant."""
        state = _FROZEN.get()
        if state is None or id(self) not in state.layers:
            return compute()
        key = (id(self), name)
        if key not in state.constants:
            with outside_graphs():  # by values and not in the function that is being traced
                state.constants[key] = _map_tensors(state.keep, compute())
        # A variable is read where it is used.
        return _map_tensors(keras.ops.convert_to_tensor, state.constants[key])


def _map_tensors(function: Callable[[Any], Any], nest: Any) -> Any:
    return keras.tree.map_structure(lambda t: t if isinstance(t, int) else function(t), nest)


@contextmanager
def frozen(model: keras.layers.Layer, keep: Callable[[Any], Any] = lambda tensor: tensor) -> Iterator[None]:
    """While this lasts, every part of a model takes constants in the place of functions of its weights.

    A function that is traced meanwhile does not factor W or multiply reflections at every call. It does not follow later changes
    of the weights either, and has no gradient for them.

    Args:
        model: A model or layer that is built.
        keep: What to keep of a tensor, for instance a variable with its value.
    """
    layers = {id(layer) for layer in model._flatten_layers() if isinstance(layer, Freezable)}
    token = _FROZEN.set(_Frozen(layers, keep))
    try:
        yield
    finally:
        _FROZEN.reset(token)
