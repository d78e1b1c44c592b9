"""What depends on weights alone, computed once and not at every use, in a model whose training is over."""

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
    """The layers that are frozen, what is made of a tensor to keep it, and what has been computed so far."""

    layers: frozenset[int] = frozenset()
    keep: Callable[[Tensor], Tensor] = lambda tensor: tensor
    constants: dict[tuple[object, ...], Any] = field(default_factory=dict)
    copy: tuple[int, ...] = ()
    scope: Callable[[], AbstractContextManager[object]] = nullcontext


_STATE: ContextVar[_State] = ContextVar("keras_auxref_frozen", default=_State())  # noqa: B039, nothing is written into it


class Freezable:
    """A layer that computes something from its weights: W, a factorisation of it, an orthogonal matrix.

    The constants live outside the layer, which must neither save nor track them.
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
            with outside_graphs(), state.scope():  # by values and not in the function that is being traced
                state.constants[place] = _map_tensors(state.keep, compute())
        # A variable is read where it is used.
        return _map_tensors(keras.ops.convert_to_tensor, state.constants[place])


def _map_tensors(function: Callable[[Tensor], Tensor], nest: T) -> T:
    return keras.tree.map_structure(lambda t: t if isinstance(t, int) else function(t), nest)


@contextmanager
def frozen(model: keras.layers.Layer, keep: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Iterator[None]:
    """While this lasts, every part of a model uses constants instead of functions of its weights.

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
def frozen_copy(model: keras.layers.Layer, number: int, scope: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """While this lasts inside `frozen`, the parts of a model are frozen too, with constants of their own for every number.

    Args:
        model: A model or layer that takes turns with several sets of weights.
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
