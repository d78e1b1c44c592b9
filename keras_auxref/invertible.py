"""The interface of invertible layers: everything that bijectors, flows and exporters need to know about them."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import keras

from keras_auxref.certificate import Certificate
from keras_auxref.methods import METHODS, checked
from keras_auxref.ops.backend import require_tensorflow
from keras_auxref.typing import Shape, Tensor

T = TypeVar("T")


class Invertible:
    """The interface of an invertible Keras layer, and the part of it that is the same for all.

        y = layer(x)      x = layer.inverse(y)      layer.log_det_jacobian(x) = log|det ∂y/∂x|

    One event is the last `event_ndims` axes of x, over which the Jacobian is taken; a log-determinant has the axes
    before it. **A layer must have two methods, `forward_and_log_det` and `inverse`**; `call` and `log_det_jacobian` follow from
    the first. (A layer with `call` and `log_det_jacobian` instead gets `forward_and_log_det` from these.) It overrides
    `certificate` to state what is proven; `proof` if the inverse may not be unique; `inverse_event_ndims` and
    `inverse_output_shape` if it changes the shape of an event; `inverse_parts` if it consists of other invertible layers.
    An optional method `initialize(x)` initialises it from data; a weight or property `initialized` is then true. If its methods
    take a keyword argument `context`, they get the context of the flow.

    Put it before the layer: `class MyLayer(Invertible, keras.layers.Layer)`.

    Example:
    >>> import numpy as np
    >>> from keras_auxref import FactoredReflection, Invertible
    >>> layer, x = FactoredReflection(), np.ones((2, 4), "float32")
    >>> isinstance(layer, Invertible)
    True
    >>> y = layer(x)
    >>> np.allclose(layer.inverse(y), x, atol=1e-5), layer.log_det_jacobian(x).shape
    (True, TensorShape([2]))
    """

    event_ndims: int = 1
    cheap_log_det: bool = False
    """True if `forward_and_log_det` costs hardly more than `call`: a bijector then always computes both."""
    constant_jacobian: bool = False
    """True if ∂y/∂x does not depend on x: a linear map, a shift, a permutation."""
    elementary: bool = True
    """True if `forward_and_log_det` and `inverse` are sums and products, once what depends on weights alone is known."""
    supports_xla: bool = True
    """False if TensorFlow's XLA lacks an operation that the layer needs."""
    built: bool
    compute_dtype: str
    name: str

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for name in METHODS:
            if name in cls.__dict__:
                setattr(cls, name, checked(cls.__dict__[name]))

    @checked
    def forward_and_log_det(self, x: Tensor, training: bool | None = None) -> tuple[Tensor, Tensor]:
        """(y, log|det ∂y/∂x|): a log-determinant for every event, of shape `x.shape[:-event_ndims]`."""
        if type(self).log_det_jacobian is Invertible.log_det_jacobian:
            raise NotImplementedError(f"{type(self).__name__} lacks `forward_and_log_det`, which an invertible layer must have.")
        return self(x, training=training), self.log_det_jacobian(x)  # type: ignore[operator]

    def inverse(self, y: Tensor) -> Tensor:
        """x with layer(x) = y."""
        raise NotImplementedError(f"{type(self).__name__} lacks `inverse`, which an invertible layer must have.")

    if not TYPE_CHECKING:  # every layer has its own arguments besides the inputs

        def call(self, inputs: Tensor, training: bool | None = None, context: Tensor | None = None) -> Tensor:
            """y alone."""
            return pass_on(self.forward_and_log_det, inputs, training=training, context=context)[0]

        def compute_output_shape(self, input_shape: Shape) -> Shape:
            """The shape of the input, unless a layer overrides this."""
            return input_shape

    @checked
    def log_det_jacobian(self, x: Tensor) -> Tensor:
        """log|det ∂y/∂x| of every event, shape `x.shape[:-event_ndims]`."""
        return self.forward_and_log_det(x)[1]

    def certificate(self) -> Certificate:
        """What is proven about the invertibility of this layer, with its current weights and precision."""
        raise NotImplementedError(
            f"Nothing is known about the invertibility of layer '{self.name}': {type(self).__name__} does not implement "
            "`certificate`, and a certificate never guesses."
        )

    def proof(self) -> Tensor | None:
        """Whether `inverse` is proven to return the only preimage: None if it always does, else a scalar boolean tensor.

        Unlike `certificate` this also works inside a graph.
        """
        return None

    @property
    def in_doubt(self) -> bool:
        """True if only a certificate tells whether the inverse is unique, and training may lose it: for a free W."""
        return any(part.in_doubt for part in self.inverse_parts() if part is not self)

    def require_certificate(self, name: str) -> None:
        """Warns or raises, as set in a layer that is `in_doubt`, if its method `name` is used without a certificate."""
        for part in self.inverse_parts():
            if part is not self:
                part.require_certificate(name)

    @property
    def inverse_event_ndims(self) -> int:
        """How many trailing axes one event of the output has."""
        return self.event_ndims

    def inverse_output_shape(self, output_shape: Shape) -> Shape:
        """The shape of `inverse(y)` for the shape of y: the counterpart of `compute_output_shape`."""
        return output_shape

    def inverse_parts(self) -> list["Invertible"]:
        """The invertible layers that `inverse` runs through: this one, or those that it consists of."""
        return [self]

    def bijector(self, **kwargs: object) -> Any:
        """A new TFP bijector over the weights of this layer: a view, never a copy. TensorFlow only."""
        require_built(self, "bijector")
        require_tensorflow("bijector")  # it would not see the variables of another backend, and training it would change nothing
        # Bijectors are a floor above this one, and TensorFlow Probability is imported only if one is needed.
        return importlib.import_module("keras_auxref.bijectors").LayerBijector(self, **kwargs)

    def _tensor(self, x: Tensor, name: str) -> Tensor:
        """x as a tensor in the precision of the layer, for a method `name` that needs weights and is not `call`."""
        require_built(self, name)
        return keras.ops.convert_to_tensor(x, dtype=self.compute_dtype)


def pass_on(method: Callable[..., T], x: Tensor, **extra: object) -> T:
    """method(x) with those keyword arguments that are not None and that it accepts."""
    return method(x, **{name: value for name, value in extra.items() if value is not None and takes(method, name)})


def takes(method: Callable[..., object], name: str) -> bool:
    """Whether a function or method has a parameter of this name."""
    return name in _parameters(getattr(method, "__func__", method))


@functools.lru_cache(maxsize=1024)
def _parameters(function: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def require_built(layer: keras.layers.Layer, name: str) -> None:
    """Refuses access to an attribute that needs weights before there are any."""
    if not layer.built:
        raise ValueError(
            f"`{name}` needs weights, and layer '{layer.name}' has not been built. Call it on data, or `build(shape)`."
        )
