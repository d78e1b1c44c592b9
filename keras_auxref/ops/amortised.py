"""Validation of the parameters that an encoder gives to a flow. Their leading axes are those of the vectors that they move."""

from typing import Any, NamedTuple

from keras import ops

from keras_auxref.ops.checks import as_tensor, check_vector
from keras_auxref.ops.rows import dtype_of, working_dtype
from keras_auxref.typing import Tensor


class Amortised(NamedTuple):
    """Checked tensors in float32 at least, and the dtype of the result."""

    z: Tensor
    parameters: dict[str, Tensor]
    dtype: str


def prepare(z: Tensor, shapes: dict[str, tuple[str, ...]], **parameters: Tensor | None) -> Amortised:
    """z of shape (..., d), and parameters whose last axes have the names of `shapes`; one that is None is left out.

    Axes with one name have the same size, which must be known; `"d"` is that of z. Leading axes broadcast against those of z.
    """
    z = as_tensor(z, "z")
    check_vector(z, "z")
    dtype = dtype_of(z)
    working = working_dtype(dtype)
    tensors = {name: as_tensor(value, name) for name, value in parameters.items() if value is not None}
    sizes = {} if z.shape[-1] is None else {"d": z.shape[-1]}
    for name, tensor in tensors.items():
        check_vector(tensor, name)
        _check_shape(tuple(tensor.shape), shapes[name], sizes, name)
        if dtype_of(tensor) not in (dtype, working):
            raise ValueError(f"`{name}` must have the dtype of `z`. Expected {dtype}. Received: {dtype_of(tensor)}")
    return Amortised(ops.cast(z, working), {name: ops.cast(tensor, working) for name, tensor in tensors.items()}, dtype)


def _check_shape(shape: tuple[Any, ...], axes: tuple[str, ...], sizes: dict[str, int], name: str) -> None:
    expected = ", ".join(str(sizes.get(axis, axis)) for axis in axes)
    for axis, size in zip(axes, shape[-len(axes) :], strict=False):
        if len(shape) < len(axes) or size is None or sizes.setdefault(axis, size) != size:
            raise ValueError(f"`{name}` does not fit `z`. Expected shape (..., {expected}). Received: {shape}")
