"""A fixed permutation of the channels."""

from collections.abc import Sequence
from typing import Unpack

import keras
import numpy as np

from keras_auxref.certificate import ISOMETRY, Certificate, proven
from keras_auxref.invertible import Invertible
from keras_auxref.layers.checks import as_input, last_axis, require_floating
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, LayerArguments, Shape, Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class Permutation(Invertible, keras.layers.Layer):
    """y_i = x_{order(i)} on the last axis, log|det ∂y/∂x| = 0. Nothing to train.

    By default the order is reversed, as in NICE and RealNVP: couplings keep the first half of the channels and change the second,
    and the halves change roles at every step.

    Args:
        order: The index of the channel that goes to each place, every one of 0 … d − 1 once; None reverses the channels.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, …

    Call arguments:
        inputs: Tensor of shape `(batch, ..., d)`.

    Output: A tensor of the same shape.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.flows import Permutation
    >>> print(Permutation([2, 0, 1])(np.array([[1.0, 2.0, 3.0]])).numpy())
    [[3. 1. 2.]]

    Reference: Dinh, Krueger & Bengio, "NICE", ICLR 2015 (workshop); Dinh, Sohl-Dickstein & Bengio, "Density Estimation using Real
    NVP", ICLR 2017.
    """

    constant_jacobian = True
    cheap_log_det = True

    def __init__(self, order: Sequence[int] | None = None, **kwargs: Unpack[LayerArguments]) -> None:
        super().__init__(**kwargs)
        require_floating(self, self.compute_dtype)
        self.order = None if order is None else _checked(order)
        self.supports_masking = True

    def build(self, input_shape: Shape) -> None:
        d = last_axis(self, input_shape)
        if self.order is not None and len(self.order) != d:
            raise ValueError(
                f"`order` must have one entry for each channel. Expected a last axis of size {len(self.order)}. Received: {d}"
            )
        order = np.arange(d)[::-1] if self.order is None else np.array(self.order)
        self._places = tuple(int(i) for i in order), tuple(int(i) for i in np.argsort(order))
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: d})

    def call(self, inputs: Tensor) -> Tensor:
        return self._taken(as_input(self, inputs), 0)

    def inverse(self, y: Tensor) -> Tensor:
        """x with y_i = x_{order(i)}."""
        return self._taken(self._tensor(y, "inverse"), 1)

    def log_det_jacobian(self, x: Tensor) -> Tensor:
        """0 for every vector."""
        return keras.ops.zeros_like(keras.ops.convert_to_tensor(x, dtype=self.compute_dtype)[..., 0])

    def certificate(self) -> Certificate:
        """A permutation is orthogonal."""
        return proven("a permutation of the channels", 1.0, ISOMETRY)

    def _taken(self, x: Tensor, direction: int) -> Tensor:
        return keras.ops.take(x, self._places[direction], axis=-1)

    def get_config(self) -> Config:
        return {**super().get_config(), "order": None if self.order is None else list(self.order)}


def _checked(order: Sequence[int]) -> tuple[int, ...]:
    """Every one of 0 … d − 1 once, as plain integers."""
    values = np.asarray(order)
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer) or sorted(values.tolist()) != list(range(values.size)):
        raise ValueError(f"`order` must be a permutation. Expected each of 0 … d − 1 once. Received: {order!r}")
    return tuple(values.tolist())
