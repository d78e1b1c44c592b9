"""Names for what the signatures of this package mean."""

import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias, TypedDict

import keras
import numpy as np

Shape: TypeAlias = tuple[int | None, ...]
"""Sizes of axes, with None where one is unknown."""


class Tensor(Protocol):
    """A tensor of the backend that Keras runs on, or an array that becomes one: numbers with a shape and a dtype.

    What all of them have in common: arithmetic entry by entry, `@`, comparisons and indexing.
    """

    @property
    def shape(self) -> Any:
        """The sizes of the axes: a `Shape`, in a type of the backend."""

    @property
    def dtype(self) -> Any:
        """The kind of numbers, in a type of the backend: `rows.dtype_of` has its name."""

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
"""A kind of numbers, as Keras takes it: its name, its type, or a policy of layers."""
PathLike: TypeAlias = str | os.PathLike[str]
Seed: TypeAlias = int | keras.random.SeedGenerator
Config: TypeAlias = dict[str, object]
"""Arguments by name, as `get_config` gives them: numbers, words, and dictionaries of these."""

Initializer: TypeAlias = str | Config | Callable[..., Tensor] | keras.initializers.Initializer
"""What makes first values, as Keras takes it: an object, a name or a configuration. So are the next three."""
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
