"""The contract of invertible layers: what layers offer, and all that bijectors, flows and exporters need to know of them."""

from collections.abc import Callable
from typing import Any

import keras

from keras_auxref.kernels import Certificate
from keras_auxref.typing import Shape, Tensor

_make_bijector: Callable[..., Any] | None = None


class Invertible:
    """The contract of an invertible Keras layer, and the part of it that is the same for all.

        y = layer(x)      x = layer.inverse(y)      layer.log_det_jacobian(x) = log|det ∂y/∂x|

    One event is the last `event_ndims` axes of x, the part that the Jacobian is taken over; a log-determinant has the axes
    before it. A layer overrides `inverse`, `log_det_jacobian` and `certificate`; `forward_and_log_det`, the primitive of flows,
    where computing both at once saves work; `proof` where the inverse may not be unique; `inverse_event_ndims` and
    `inverse_output_shape` where it changes the shape of an event; `inverse_parts` where it is made of other invertible layers.
    """

    event_ndims: int = 1
    cheap_log_det: bool = False
    """True where `forward_and_log_det` costs hardly more than `call`: a bijector then always asks for both."""
    constant_jacobian: bool = False
    """True where ∂y/∂x does not depend on x: a linear map, a shift, a permutation."""
    elementary: bool = True
    """True where `forward_and_log_det` and `inverse` are sums and products, once what depends on weights alone is known."""
    built: bool
    compute_dtype: str
    name: str

    def inverse(self, y: Tensor) -> Tensor:
        """x with layer(x) = y."""
        raise NotImplementedError

    def log_det_jacobian(self, x: Tensor) -> Tensor:
        """log|det ∂y/∂x| of every event, shape `x.shape[:-event_ndims]`."""
        raise NotImplementedError

    def forward_and_log_det(self, x: Tensor, training: bool | None = None) -> tuple[Tensor, Tensor]:
        """(y, log|det ∂y/∂x|)."""
        return self(x, training=training), self.log_det_jacobian(x)  # type: ignore[operator]

    def certificate(self) -> Certificate:
        """What is proven about the invertibility of this layer, with the weights and the precision that it has now."""
        raise NotImplementedError(
            f"Nothing is known about the invertibility of layer '{self.name}': {type(self).__name__} does not implement "
            "`certificate`, and a certificate never guesses."
        )

    def proof(self) -> Tensor | None:
        """Whether `inverse` is proven to return the only preimage: None where it always does, else a scalar boolean tensor.

        Unlike `certificate` this also works inside of a graph.
        """
        return None

    @property
    def inverse_event_ndims(self) -> int:
        """How many trailing axes one event of the output has."""
        return self.event_ndims

    def inverse_output_shape(self, output_shape: Shape) -> Shape:
        """The shape of `inverse(y)` for y of a shape: the counterpart of `compute_output_shape`."""
        return output_shape

    def inverse_parts(self) -> list["Invertible"]:
        """The invertible layers that `inverse` runs through: this one, or those that it is made of."""
        return [self]

    def bijector(self, **kwargs: Any) -> Any:
        """A new TFP bijector over the weights of this layer: a view, never a copy. TensorFlow only."""
        require_built(self, "bijector")
        backend = keras.backend.backend()
        if backend != "tensorflow":
            raise NotImplementedError(
                "A bijector is TensorFlow Probability on TensorFlow: it would see no variables of another backend, and training "
                f"it would change nothing. Expected the TensorFlow backend of Keras. Received: KERAS_BACKEND={backend!r}"
            )
        assert _make_bijector is not None, "`keras_auxref` registers its bijector when it is imported."
        return _make_bijector(self, **kwargs)

    def _tensor(self, x: Tensor, name: str) -> Tensor:
        """x as a tensor in the precision of the layer, for a method `name` that needs weights and is not `call`."""
        require_built(self, name)
        return keras.ops.convert_to_tensor(x, dtype=self.compute_dtype)


def register_bijector(make: Callable[..., Any]) -> None:
    """Says how `Invertible.bijector` makes one: make(layer, **kwargs). So layers need not know bijectors, nor these layers."""
    global _make_bijector
    _make_bijector = make


def require_built(layer: Any, name: str) -> None:
    """Refuses an attribute that needs weights before there are any."""
    if not layer.built:
        raise ValueError(
            f"`{name}` needs weights, and layer '{layer.name}' has not been built. Call it on data, or `build(shape)`."
        )
