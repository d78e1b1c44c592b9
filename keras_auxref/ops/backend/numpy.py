"""NumPy and whatever else Keras runs on: values without gradients."""

from collections.abc import Callable
from typing import Any

import keras


def wide_dtype() -> str:
    """The most precise floating-point dtype."""
    return "float64"


def inside_xla() -> bool:
    """No."""
    return False


def tanh(x: Any) -> Any:
    """tanh in the dtype of x: Keras' own passes float64 through float32 on JAX."""
    return keras.ops.tanh(x)


def solve_upper(t: Any, b: Any) -> Any:
    """T⁻¹b for an upper triangular T of (m, m)."""
    return keras.ops.solve_triangular(t, b)


def vjp(function: Callable[..., Any]) -> Callable[..., Any]:
    """There is no automatic differentiation."""
    raise NotImplementedError(f"Keras' backend {keras.backend.backend()!r} computes no gradients.")


def closed_form(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    reference: Callable[..., Any],
    arguments: tuple[Any, ...],
    constants: Any = (),
    plain: Callable[..., Any] | None = None,
) -> Any:
    """forward(*arguments, constants)."""
    return forward(*arguments, constants)[0]


def shared(function: Callable[..., Any], *arguments: Any, rows: int = 0, **static: Any) -> Any:
    """function(*arguments, **static)."""
    return function(*arguments, **static)


def picks_rows() -> bool:
    """Whether `only_rows` costs in proportion to the rows that are chosen."""
    return False


def only_rows(chosen: Any, function: Callable[..., Any], current: Any, *rows: Any, total: Any = ()) -> Any:
    """`current`, a nest of (n, …), with the rows where `chosen` (n, 1) replaced by what a function gives for these rows alone.

    The arguments are those of the TensorFlow version. All rows are computed.
    """
    masked = keras.tree.map_structure(lambda t: keras.ops.where(chosen, t, 0), rows[0])
    new, extra = function(masked, *rows[1:])
    current = keras.tree.map_structure(lambda a, b: keras.ops.where(chosen, a, b), new, current)
    return current, keras.tree.map_structure(lambda a, b: a + b, total, extra)
