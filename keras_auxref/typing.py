"""Type aliases for the signatures of this package."""

import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias, TypedDict

import keras
import numpy as np

Shape: TypeAlias = tuple[int | None, ...]
"""Sizes of axes, with None for an unknown size."""


class Tensor(Protocol):
    """A tensor of the backend that Keras runs on, or an array that becomes one: numbers with a shape and a dtype.

    All of them have elementwise arithmetic, `@`, comparisons and indexing.
    """

    @property
    def shape(self) -> Any:
        """The sizes of the axes: a `Shape`, in a type of the backend."""

    @property
    def dtype(self) -> Any:
        """The dtype, in a type of the backend: `rows.dtype_of` gives its name."""

    def __getitem__(self, key: Any, /) -> "Tensor": ...
    def __add__(self, other: Any, /) -> "Tensor": ...
    def __radd__(self, other: Any, /) -> "Tensor": ...
    def __sub__(self, other: Any, /) -> "Tensor": ...
    def __rsub__(self, other: Any, /) -> "Tensor": ...
    def __mul__(self, other: Any, /) -> "Tensor": ...
    def __rmul__(self, other: Any, /) -> "Tensor": ...
    def __truediv__(self, other: Any, /) -> "Tensor": ...
    def __rtruediv__(self, other: Any, /) -> "Tensor": ...
    def __pow__(self, other: Any, /) -> "Tensor": ...
    def __matmul__(self, other: Any, /) -> "Tensor": ...
    def __neg__(self) -> "Tensor": ...
    def __invert__(self) -> "Tensor": ...
    def __lt__(self, other: Any, /) -> "Tensor": ...
    def __le__(self, other: Any, /) -> "Tensor": ...
    def __gt__(self, other: Any, /) -> "Tensor": ...
    def __ge__(self, other: Any, /) -> "Tensor": ...


DType: TypeAlias = str | type | np.dtype | keras.DTypePolicy
"""A dtype, as Keras takes it: its name, its type, or the policy of a layer."""
PathLike: TypeAlias = str | os.PathLike[str]
Seed: TypeAlias = int | keras.random.SeedGenerator
Config: TypeAlias = dict[str, object]
"""Arguments by name, as `get_config` returns them: numbers, strings, and dictionaries of these."""

Initializer: TypeAlias = str | Config | Callable[..., Tensor] | keras.initializers.Initializer
"""An initializer, as Keras takes it: an object, a name or a configuration. The next ones are similar."""
Regularizer: TypeAlias = str | Config | Callable[[Tensor], Tensor] | keras.regularizers.Regularizer
Constraint: TypeAlias = str | Config | Callable[[Tensor], Tensor] | keras.constraints.Constraint
Activation: TypeAlias = str | Config | Callable[[Tensor], Tensor]
Data: TypeAlias = Tensor | tuple[Tensor, ...] | Iterable[Tensor | tuple[Tensor, ...]] | keras.utils.PyDataset
"""What `fit` reads: arrays, or batches of them from a dataset or a generator."""


class LayerArguments(TypedDict, total=False):
    """What every layer passes on to `keras.layers.Layer`."""

    name: str | None
    dtype: DType | None
    trainable: bool
    autocast: bool
    activity_regularizer: Regularizer | None
