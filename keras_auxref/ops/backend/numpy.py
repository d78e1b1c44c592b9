"""The defaults for what a backend does not do in its own way. A backend without its own module, as NumPy, has no gradients."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import keras

from keras_auxref.ops.backend._philox import philox_normal, philox_uniform
from keras_auxref.typing import Tensor

T = TypeVar("T")
N = TypeVar("N")
Sizes: TypeAlias = Tensor | tuple[int | Tensor, ...] | list[int]
"""Whole numbers, each known or a tensor."""


def wide_dtype() -> str:
    """The most precise floating-point dtype."""
    return "float64"


def as_tensor(value: object) -> Tensor:
    """A tensor, never a variable."""
    return keras.ops.convert_to_tensor(value)


def kind_of(tensor: object) -> str:
    """Whether a tensor is "dense", "sparse" or "ragged"."""
    return "dense"


def is_concrete(tensor: object) -> bool:
    """Whether the values of a tensor can be read now."""
    return True


def inside_xla() -> bool:
    """Whether TensorFlow traces for XLA, which lacks some operations."""
    return False


def outside_graphs() -> AbstractContextManager[object]:
    """The scope in which initial values are numbers and not nodes of the graph being traced."""
    return nullcontext()


def at_the_start(method: Callable[..., T]) -> Callable[..., T]:
    """A method of a layer that runs a few times, on numbers: unchanged."""
    return method


def compiled(method: Callable[..., T]) -> Callable[..., T]:
    """A method of a model that only computes from tensors, compiled. Gradients pass through, to arguments and to weights."""
    return method


def normal(shape: Sizes, seed: Sizes, dtype: str) -> Tensor:
    """Draws from N(0, 1), the same for the same pair of whole numbers as seed on every backend."""
    return keras.ops.convert_to_tensor(philox_normal(_numbers(shape), _numbers(seed), dtype), dtype=dtype)


def uniform(shape: Sizes, seed: Sizes, dtype: str) -> Tensor:
    """Draws from the uniform distribution on [0, 1), the same for the same pair of whole numbers as seed on every backend."""
    return keras.ops.convert_to_tensor(philox_uniform(_numbers(shape), _numbers(seed), dtype), dtype=dtype)


def _numbers(values: Any) -> Any:
    values = values if isinstance(values, tuple | list) else keras.ops.convert_to_numpy(values)
    return tuple(int(value) for value in values)


def tanh(x: Tensor) -> Tensor:
    """tanh in the dtype of x: Keras' own passes float64 through float32 on JAX and torch."""
    return keras.ops.tanh(x)


def split(x: Tensor, indices: list[int]) -> list[Tensor]:
    """The parts of x before, between and after these places of the last axis."""
    return keras.ops.split(x, indices, axis=-1)


def sizes_between(x: Tensor, indices: list[int]) -> list[int]:
    """The sizes of the parts of `split`."""
    return [end - start for start, end in pairwise([0, *indices, x.shape[-1]])]


def solve_upper(t: Tensor, b: Tensor) -> Tensor:
    """T⁻¹b for an upper triangular T of (m, m)."""
    return keras.ops.solve_triangular(t, b)


def vjp(function: Callable[..., object]) -> Callable[..., tuple[Tensor, ...]]:
    """(cotangents, *arguments) → gradients: the vector-Jacobian product of a function, by automatic differentiation."""
    raise NotImplementedError(f"Keras' backend {keras.backend.backend()!r} computes no gradients.")


def closed_form(
    forward: Callable[..., tuple[T, object]],
    backward: Callable[..., Iterable[Tensor | None]],
    reference: Callable[..., Iterable[Tensor]],
    arguments: tuple[object, ...],
    constants: object = (),
    plain: Callable[..., T] | None = None,
) -> T:
    """forward(*arguments, constants). The arguments are those of the TensorFlow version."""
    return forward(*arguments, constants)[0]


def shared(function: Callable[..., T], *arguments: object, rows: int = 0, **static: object) -> T:
    """function(*arguments, **static)."""
    return function(*arguments, **static)


def picks_rows() -> bool:
    """Whether `only_rows` costs in proportion to the rows that are chosen."""
    return False


def only_rows(
    chosen: Tensor, function: Callable[..., tuple[N, object]], current: N, *rows: object, total: object = ()
) -> tuple[N, object]:
    """`current`, a nest of (n, …), with the rows where `chosen` (n, 1) replaced by what a function returns for these rows alone.

    The arguments are those of the TensorFlow version. All rows are computed.
    """
    masked = keras.tree.map_structure(lambda t: keras.ops.where(chosen, t, 0), rows[0])
    new, extra = function(masked, *rows[1:])
    current = keras.tree.map_structure(lambda a, b: keras.ops.where(chosen, a, b), new, current)
    return current, keras.tree.map_structure(lambda a, b: a + b, total, extra)


def prefers_loops(x: Tensor, convolves: bool) -> bool:
    """Whether equal steps on x run faster as a loop than written out: here both are the same."""
    return False


def convolve(x: Tensor, kernel: Tensor, padding: str) -> Tensor:
    """The convolution of x (batch, …, channels in) with a kernel (…, channels in, channels out), in steps of one pixel."""
    return keras.ops.conv(x, kernel, padding=padding, data_format="channels_last")


def loop(
    body: Callable[..., tuple[T, list[Tensor]]], carry: T, steps: list[Tensor], states: list[Tensor], reverse: bool = False
) -> tuple[T, list[Tensor]]:
    """Never called: steps are written out."""
    raise NotImplementedError(f"Keras' backend {keras.backend.backend()!r} has no loops.")


def on_each_device(
    function: Callable[[T, list[Tensor]], tuple[T, list[Tensor]]], rows: T, weights: list[Tensor]
) -> tuple[T, list[Tensor]]:
    """function(rows, weights): only JAX splits a batch within a computation."""
    return function(rows, weights)


def recomputed(function: Callable[..., T]) -> Callable[..., T]:
    """A function of tensors that keeps only its arguments for the backward pass and is recomputed there."""
    return function


def together(*tensors: Any) -> tuple[Any, ...]:
    """The same tensors, each available only when all are, as is always the case where operations run in order."""
    return tensors


def replicas() -> int:
    """How many replicas of a model a strategy of `tf.distribute` trains at once."""
    return 1
