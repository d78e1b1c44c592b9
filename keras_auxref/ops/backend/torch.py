"""PyTorch, eagerly."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import keras
import torch
from torch.utils._pytree import tree_map

from keras_auxref.ops.backend.numpy import sizes_between
from keras_auxref.typing import Tensor

T = TypeVar("T")
N = TypeVar("N")


def tanh(x: Tensor) -> Tensor:
    """tanh in the dtype of x: Keras' own passes float64 through float32."""
    return keras.ops.tanh(x) if isinstance(x, keras.KerasTensor) else torch.tanh(x)


def split(x: Tensor, indices: list[int]) -> list[Tensor]:
    """The parts of x before, between and after these places of the last axis. Keras computes their sizes with tensors."""
    if isinstance(x, keras.KerasTensor):
        return keras.ops.split(x, indices, axis=-1)
    return list(torch.split(keras.ops.convert_to_tensor(x), sizes_between(x, indices), dim=-1))


def kind_of(tensor: object) -> str:
    """Whether a tensor is "dense" or "sparse", which is every layout but the strided one."""
    return "sparse" if isinstance(tensor, torch.Tensor) and tensor.layout != torch.strided else "dense"


def vjp(function: Callable[..., object]) -> Callable[..., tuple[Tensor, ...]]:
    """(cotangents, *arguments) → gradients: the vector-Jacobian product of a function, by automatic differentiation."""
    return lambda cotangents, *arguments: torch.func.vjp(function, *arguments)[1](cotangents)


def closed_form(
    forward: Callable[..., tuple[T, object]],
    backward: Callable[..., Iterable[Tensor | None]],
    reference: Callable[..., Iterable[Tensor]],
    arguments: tuple[torch.Tensor, ...],
    constants: object = (),
    plain: Callable[..., T] | None = None,
) -> T:
    """forward(*arguments, constants), differentiated by `backward`. PyTorch refuses a second derivative with an error.

    The arguments are those of the TensorFlow version.
    """

    class ClosedForm(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, *arguments: torch.Tensor) -> Any:
            outputs, context.saved = forward(*arguments, constants)
            context.save_for_backward(*arguments)
            return outputs

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(context: Any, *cotangents: torch.Tensor) -> Any:
            packed = cotangents[0] if len(cotangents) == 1 else cotangents
            return tuple(backward(packed, context.saved, *context.saved_tensors, constants))

    return ClosedForm.apply(*arguments)


def picks_rows() -> bool:
    """Whether `only_rows` costs in proportion to the rows that are chosen."""
    return True


def only_rows(
    chosen: torch.Tensor, function: Callable[..., tuple[N, object]], current: N, *rows: object, total: object = ()
) -> tuple[N, object]:
    """`current`, a nest of (n, …), with the rows where `chosen` (n, 1) replaced by what a function returns for these rows alone.

    The arguments are those of the TensorFlow version.
    """
    if not bool(chosen.any()):
        return current, total
    index = chosen[:, 0]

    def put(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        old = old.clone()
        old[index] = new
        return old

    new, extra = function(*tree_map(lambda t: t[index], rows))
    return tree_map(put, new, current), tree_map(torch.add, total, extra)


def recomputed(function: Callable[..., T]) -> Callable[..., T]:
    """A function of tensors that keeps only its arguments for the backward pass and is recomputed there."""
    return keras.remat(function)
