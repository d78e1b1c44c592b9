"""Names for what the signatures of this package mean."""

from typing import Any, TypeAlias

Tensor: TypeAlias = Any
"""A tensor of the backend that Keras runs on, or what it makes one of: an array, a nest of numbers, a `keras.Variable`."""

Shape: TypeAlias = Any
"""A tuple of integers, with None where a size is unknown."""
