"""What depends on weights alone, computed once instead of at every use, in a model that is no longer trained."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import keras

from keras_auxref.ops.backend import outside_graphs
from keras_auxref.typing import Tensor

T = TypeVar("T")


@dataclass
class _State:
    """The frozen layers, how to store a tensor, and what has been computed so far."""

    layers: frozenset[int] = frozenset()
    keep: Callable[[Tensor], Tensor] = lambda tensor: tensor
    constants: dict[tuple[object, ...], Any] = field(default_factory=dict)
    copy: tuple[int, ...] = ()
    scope: Callable[[], AbstractContextManager[object]] = nullcontext


_STATE: ContextVar[_State] = ContextVar("keras_auxref_frozen", default=_State())  # noqa: B039, nothing is written into it


class Freezable:
    """A layer that computes something from its weights: W, a factorisation of it, an orthogonal matrix.

    The constants are stored outside the layer, which must neither save nor track them.
    """

    @property
    def is_frozen(self) -> bool:
        """True inside `frozen`."""
        return id(self) in _STATE.get().layers

    def once(self, name: str, compute: Callable[[], T]) -> T:
        """compute(), a nest of tensors; in a frozen layer the first result, as a constant."""
        state, key = _STATE.get(), (id(self), name)
        if id(self) not in state.layers:
            return compute()
        place = (*key, state.copy)
        if place not in state.constants:
            with outside_graphs(), state.scope():  # from values, outside the function that is being traced
                state.constants[place] = _map_tensors(state.keep, compute())
        # A variable is read where it is used.
        return _map_tensors(keras.ops.convert_to_tensor, state.constants[place])


def _map_tensors(function: Callable[[Tensor], Tensor], nest: T) -> T:
    return keras.tree.map_structure(lambda t: t if isinstance(t, int) else function(t), nest)


@contextmanager
def frozen(model: keras.layers.Layer, keep: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Iterator[None]:
    """A context in which every part of a model uses constants instead of functions of its weights.

    A function traced inside it does not factor W or multiply reflections at every call. Nor does it follow later changes
    of the weights, and it has no gradient for them.

    Args:
        model: A built model or layer.
        keep: How to store a tensor, for instance as a variable with its value.
    """
    layers = frozenset(id(layer) for layer in model._flatten_layers() if isinstance(layer, Freezable))
    with _while(_State(layers, keep)):
        yield


@contextmanager
def frozen_copy(model: keras.layers.Layer, number: int, scope: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """A context inside `frozen` in which the parts of a model are frozen too, with separate constants for every number.

    Args:
        model: A model or layer that is used with several sets of weights in turn.
        number: Which of them.
        scope: The scope in which the model has the values of this set.
    """
    state = _STATE.get()
    layers = state.layers | {id(layer) for layer in model._flatten_layers() if isinstance(layer, Freezable)}
    with _while(replace(state, layers=layers, copy=(*state.copy, number), scope=scope)):
        yield


@contextmanager
def _while(state: _State) -> Iterator[None]:
    token = _STATE.set(state)
    try:
        yield
    finally:
        _STATE.reset(token)
