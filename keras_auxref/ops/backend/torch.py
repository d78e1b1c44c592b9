"""PyTorch, eagerly."""

from collections.abc import Callable
from typing import Any

import keras
import torch
from torch.utils._pytree import tree_map


def wide_dtype() -> str:
    """The most precise floating-point dtype."""
    return "float64"


def inside_xla() -> bool:
    """No."""
    return False


def tanh(x: Any) -> Any:
    """tanh in the dtype of x: Keras' own passes float64 through float32 on JAX."""
    return keras.ops.tanh(x) if isinstance(x, keras.KerasTensor) else torch.tanh(x)


def solve_upper(t: Any, b: Any) -> Any:
    """T⁻¹b for an upper triangular T of (m, m)."""
    return keras.ops.solve_triangular(t, b)


def vjp(function: Callable[..., Any]) -> Callable[..., Any]:
    """(cotangents, *arguments) → gradients: the vector-Jacobian product of a function, by automatic differentiation."""
    return lambda cotangents, *arguments: torch.func.vjp(function, *arguments)[1](cotangents)


def closed_form(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    reference: Callable[..., Any],
    arguments: tuple[torch.Tensor, ...],
    constants: Any = (),
    plain: Callable[..., Any] | None = None,
) -> Any:
    """forward(*arguments, constants), differentiated by `backward`. A second derivative is refused by PyTorch, with an error.

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


def shared(function: Callable[..., Any], *arguments: Any, rows: int = 0, **static: Any) -> Any:
    """function(*arguments, **static)."""
    return function(*arguments, **static)


def picks_rows() -> bool:
    """Whether `only_rows` costs in proportion to the rows that are chosen."""
    return True


def only_rows(chosen: torch.Tensor, function: Callable[..., Any], current: Any, *rows: Any, total: Any = ()) -> Any:
    """`current`, a nest of (n, …), with the rows where `chosen` (n, 1) replaced by what a function gives for these rows alone.

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
