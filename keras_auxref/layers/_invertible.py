"""What every invertible layer offers."""

from typing import Any

import keras

from keras_auxref.layers._checks import require_built


class Invertible:
    """The contract of an invertible Keras layer, and the part of it that is the same for all.

        y = layer(x)      x = layer.inverse(y)      layer.log_det_jacobian(x) = log|det ∂y/∂x|

    One event is the last `event_ndims` axes of x, the part that the Jacobian is taken over; a log-determinant has the axes
    before it. A layer overrides `forward_and_log_det`, the primitive of flows, where computing both at once saves work, and
    `inverse_event_ndims` and `inverse_output_shape` where it changes the shape of an event.
    """

    event_ndims: int = 1
    cheap_log_det: bool = False
    """True where `forward_and_log_det` costs hardly more than `call`: a bijector then always asks for both."""
    built: bool
    compute_dtype: str

    def inverse(self, y: Any) -> Any:
        """x with layer(x) = y."""
        raise NotImplementedError

    def log_det_jacobian(self, x: Any) -> Any:
        """log|det ∂y/∂x| of every event, shape `x.shape[:-event_ndims]`."""
        raise NotImplementedError

    def forward_and_log_det(self, x: Any) -> tuple[Any, Any]:
        """(y, log|det ∂y/∂x|)."""
        return self(x), self.log_det_jacobian(x)  # type: ignore[operator]

    @property
    def inverse_event_ndims(self) -> int:
        """How many trailing axes one event of the output has."""
        return self.event_ndims

    def inverse_output_shape(self, output_shape: Any) -> Any:
        """The shape of `inverse(y)` for y of a shape: the counterpart of `compute_output_shape`."""
        return output_shape

    def inverse_parts(self) -> list[Any]:
        """The invertible layers that `inverse` runs through: this one, or those that it is made of."""
        return [self]

    def bijector(self, **kwargs: Any) -> Any:
        """A new TFP bijector over the weights of this layer: a view, never a copy."""
        require_built(self, "bijector")
        from keras_auxref.bijectors.layer import LayerBijector

        return LayerBijector(self, **kwargs)

    def _tensor(self, x: Any, name: str) -> Any:
        """x as a tensor in the precision of the layer, for a method `name` that needs weights and is not `call`."""
        require_built(self, name)
        return keras.ops.convert_to_tensor(x, dtype=self.compute_dtype)
