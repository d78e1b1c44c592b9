"""What a flow is conditioned on: numbers or labels that the networks of its couplings see."""

import keras
import numpy as np

from keras_auxref.certificate import Certificate
from keras_auxref.flows.vectors import check_finite_columns
from keras_auxref.invertible import Invertible
from keras_auxref.ops.checks import is_concrete, whole_number_or_none
from keras_auxref.typing import Shape, Tensor


class Condition:
    """The context of a flow: a vector of `size` numbers, one of `classes` labels, or nothing.

    Args:
        size: The number of entries of a context, or None.
        classes: The number of labels 0, 1, …, or None.
        dtype: The precision of the flow.
    """

    def __init__(self, size: int | None, classes: int | None, dtype: str) -> None:
        size, classes = whole_number_or_none("context", size), whole_number_or_none("classes", classes)
        if size is not None and classes is not None:
            raise ValueError(f"A flow has numbers or labels for a context. Received: context={size} and classes={classes}")
        self.size, self.classes, self.dtype = size, classes, dtype

    def __bool__(self) -> bool:
        return self.width is not None

    @property
    def width(self) -> int | None:
        """The number of entries that networks see: one for every class."""
        return self.size or self.classes

    @property
    def signature(self) -> dict[str, tuple[Shape, str]]:
        """The input that a served model has for it, by name; none without a context."""
        if not self:
            return {}
        return {"context": ((None,), "int32") if self.classes else ((None, self.size), self.dtype)}

    def rows(self, context: Tensor | None, single: bool = False) -> Tensor | None:
        """The checked context as networks see it, of shape `(batch, width)`. With `single`, no batch axis means one row."""
        context = self.check(context, single)
        if context is None:
            return None
        context = keras.ops.convert_to_tensor(context)
        if self.classes:
            return keras.ops.one_hot(context, self.classes, dtype=self.dtype)
        return keras.ops.cast(context, self.dtype)

    def check(self, context: Tensor | None, single: bool = False) -> Tensor | None:
        """Refuses a context that does not fit, and returns it with a batch axis, otherwise as it is."""
        if not self:
            if context is not None:
                raise ValueError(
                    "This flow was made without a context. Expected no context. "
                    f"Received: shape {tuple(np.shape(context) if not hasattr(context, 'shape') else context.shape)}"
                )
            return None
        if context is None:
            raise ValueError(
                f"This flow was made with {self._made}, and needs a context. Expected {self._expected}. Received: none"
            )
        context = context if hasattr(context, "shape") else np.asarray(context)
        return self._labels(context, single) if self.classes else self._numbers(context, single)

    @property
    def _made(self) -> str:
        return f"classes={self.classes}" if self.classes else f"context={self.size}"

    @property
    def _expected(self) -> str:
        return f"whole numbers 0 … {self.classes - 1} of shape (batch,)" if self.classes else f"shape (batch, {self.size})"

    def _numbers(self, context: Tensor, single: bool) -> Tensor:
        if single and len(context.shape) == 1:
            context = context[None]
        if len(context.shape) != 2 or context.shape[-1] != self.size:
            raise ValueError(f"The context does not fit this model. Expected {self._expected}. Received: {tuple(context.shape)}")
        check_finite_columns(context, "The context does not fit this model.")
        return context

    def _labels(self, labels: Tensor, single: bool) -> Tensor:
        if single and len(labels.shape) == 0:
            labels = labels[None] if hasattr(labels, "__getitem__") else np.asarray([labels])
        if len(labels.shape) == 2 and labels.shape[-1] == 1:
            labels = labels[:, 0]
        dtype = keras.backend.standardize_dtype(labels.dtype)
        if len(labels.shape) != 1 or not keras.backend.is_int_dtype(dtype):
            raise ValueError(
                f"The labels do not fit this model. Expected {self._expected}. Received: {dtype} of shape {tuple(labels.shape)}"
            )
        if isinstance(labels, np.ndarray) or is_concrete(labels):
            values = np.asarray(keras.ops.convert_to_numpy(labels))
            if values.size and not (values.min() >= 0 and values.max() < self.classes):
                raise ValueError(
                    f"The labels do not fit this model. Expected {self._expected}. Received: numbers from {values.min()} to "
                    f"{values.max()}"
                )
        return labels


class Conditioned(Invertible):
    """An invertible layer with a fixed context: a map of x alone that shares the weights of the layer.

    Args:
        layer: A built layer whose methods take `context`.
        context: Tensor of shape `(rows, k)`. One row serves all x; several belong to the last axis before an event, so that
            samples have the shape `(n, rows, d)`.
    """

    def __init__(self, layer: keras.layers.Layer, context: Tensor) -> None:
        self.layer, self.context, self.input_spec = layer, context, layer.input_spec
        self.event_ndims, self.compute_dtype = layer.event_ndims, layer.compute_dtype
        self.cheap_log_det, self.constant_jacobian = layer.cheap_log_det, layer.constant_jacobian
        self.built, self.name, self.weights = True, layer.name, layer.weights

    @property
    def inverse_event_ndims(self) -> int:
        return self.layer.inverse_event_ndims

    def __call__(self, x: Tensor, training: bool | None = None) -> Tensor:
        return self.layer(x, context=self._rows(x))

    def forward_and_log_det(self, x: Tensor, training: bool | None = None) -> tuple[Tensor, Tensor]:
        return self.layer.forward_and_log_det(x, context=self._rows(x))

    def inverse(self, y: Tensor) -> Tensor:
        return self.layer.inverse(y, context=self._rows(y))

    def _rows(self, x: Tensor) -> Tensor:
        rows, n = keras.ops.shape(self.context)[0], keras.ops.shape(x)[0]
        return keras.ops.tile(self.context, (n // rows, 1))

    def certificate(self) -> Certificate:
        return self.layer.certificate()

    def proof(self) -> Tensor | None:
        return self.layer.proof()

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return self.layer.compute_output_shape(input_shape)

    def inverse_output_shape(self, output_shape: Shape) -> Shape:
        return self.layer.inverse_output_shape(output_shape)

    def inverse_parts(self) -> list[Invertible]:
        return self.layer.inverse_parts()
