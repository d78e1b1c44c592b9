"""What depends on weights alone, computed once and not at every use: per sequence, or in a model that is trained no more."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import keras

from keras_auxref._keras import outside_graphs


@dataclass
class _State:
    """The layers that are frozen, what is made of a tensor to keep it, what has been computed so far, and what is given."""

    layers: frozenset[int] = frozenset()
    keep: Callable[[Any], Any] = lambda tensor: tensor
    constants: dict[tuple[int, str], Any] = field(default_factory=dict)
    given: dict[tuple[int, str], Any] = field(default_factory=dict)


_STATE: ContextVar[_State] = ContextVar("keras_auxref_frozen", default=_State())  # noqa: B039, nothing is written into it


class Freezable:
    """A layer that computes something from its weights: W, a factorisation of it, an orthogonal matrix.

    The constants live outside of the layer, which must neither save nor track them.
    """

    @property
    def is_frozen(self) -> bool:
        """True inside of `frozen`."""
        return id(self) in _STATE.get().layers

    def is_given(self, name: str) -> bool:
        """True inside of `given` with that name."""
        return (id(self), name) in _STATE.get().given

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """compute(), a nest of tensors; what is `given` under this name; or in a frozen layer the first result, as a constant."""
        state, key = _STATE.get(), (id(self), name)
        if key in state.given:
            return state.given[key]
        if id(self) not in state.layers:
            return compute()
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
    layers = frozenset(id(layer) for layer in model._flatten_layers() if isinstance(layer, Freezable))
    with _while(_State(layers, keep)):
        yield


@contextmanager
def given(layer: Freezable, **values: Any) -> Iterator[None]:
    """While this lasts, `once` of one layer finds these values by their names: tensors, which keep their gradients."""
    state = _STATE.get()
    own = {(id(layer), name): value for name, value in values.items()}
    with _while(replace(state, given={**state.given, **own})):
        yield


@contextmanager
def _while(state: _State) -> Iterator[None]:
    token = _STATE.set(state)
    try:
        yield
    finally:
        _STATE.reset(token)
