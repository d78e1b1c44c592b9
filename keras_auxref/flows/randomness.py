"""Random numbers that are the same for the same seed on every backend and device.

Training takes `keras.random` instead, which is faster inside a compiled step and differs between backends.
"""

from typing import TypeAlias

from keras_auxref.ops import backend
from keras_auxref.typing import Tensor

SeedPair: TypeAlias = Tensor | tuple[int, int]


def normal(n: int | Tensor, dimension: int, seed: SeedPair, dtype: str) -> Tensor:
    """n draws from N(0, I), for a pair of whole numbers as seed."""
    return backend.normal((n, dimension), seed, dtype)


def uniform(shape: Tensor | tuple[int | Tensor, ...], seed: SeedPair, dtype: str) -> Tensor:
    """Draws from the uniform distribution on [0, 1), for a pair of whole numbers as seed."""
    return backend.uniform(shape, seed, dtype)
