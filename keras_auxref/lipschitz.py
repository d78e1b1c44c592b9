"""By how much a whole model bends distances: the product of what is proven of its layers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import ArrayLike

from keras_auxref.certificate import ISOMETRY, Bounds, bounds_of, diagonal_bounds, linear_bounds, upwards
from keras_auxref.invertible import Invertible, require_built
from keras_auxref.ops.rows import epsilon
from keras_auxref.typing import Tensor

_ONE = Bounds(1.0)
_ACTIVATIONS: dict[str, Bounds] = {
    "linear": ISOMETRY,
    "leaky_relu": Bounds(1.0, 5.05),  # the slope 0.2, rounded to any dtype
    "sigmoid": Bounds(0.25),
    **dict.fromkeys(
        ["elu", "hard_sigmoid", "hard_tanh", "log_sigmoid", "relu", "relu6", "softmax", "softplus", "softsign", "tanh"], _ONE
    ),
}
"""With the arguments that they have by name."""


@dataclass(frozen=True)
class LipschitzBounds:
    """What `lipschitz_bounds` finds.

    Attributes:
        lipschitz: An upper bound on ‖f(x) − f(x′)‖/‖x − x′‖ over all inputs x ≠ x′ of the model.
        inverse_lipschitz: An upper bound on ‖x − x′‖/‖f(x) − f(x′)‖; None where a layer may map two points to one, as ReLU does.
        layers: The same two numbers of every layer by its name, in order.
    """

    lipschitz: float
    inverse_lipschitz: float | None
    layers: dict[str, tuple[float, float | None]]


def lipschitz_bounds(model: keras.layers.Layer) -> LipschitzBounds:
    """Upper bounds on how far a model moves points apart and together: the product of the bounds of its layers.

        ‖f(x) − f(x′)‖ ≤ lipschitz ‖x − x′‖        ‖x − x′‖ ≤ inverse_lipschitz ‖f(x) − f(x′)‖

    Norms are Euclidean, over all entries of one input and one output. The bounds are those of inference, for the weights as they
    are now and as the layers use them, in exact arithmetic; rounding adds a few ε of the size of the activations. A class
    that leads by a margin m of the logits cannot be changed by moving the input less than m/(√2 · lipschitz).

    It knows the layers of this package by their `certificate()`; `Dense` and `BatchNormalization` by their weights; ReLU, tanh
    and other activations, average and max pooling, `Flatten`, `Reshape`, `Permute`, `ZeroPadding2D`, `Rescaling`, and dropout and
    noise, which inference leaves out.

    Args:
        model: A built layer, `keras.Sequential`, or functional model in which one layer follows the other.

    Returns:
        A `LipschitzBounds`.

    Raises:
        ValueError: Where a layer has no bound or is not known. A bound is never guessed.

    Example:
    >>> import keras
    >>> from keras_auxref import FactoredReflection, lipschitz_bounds
    >>> layers = [FactoredReflection(lipschitz=1.2), keras.layers.ReLU(), FactoredReflection(lipschitz=1.2)]
    >>> bounds = lipschitz_bounds(keras.Sequential([keras.Input((8,)), *layers]))
    >>> bounds.lipschitz <= 1.2**2, bounds.inverse_lipschitz
    (True, None)
    """
    product, found = ISOMETRY, {}
    for layer in _chain(model):
        bounds = _bounds_of_layer(layer)
        if bounds.lipschitz is None:
            raise ValueError(f"Layer '{layer.name}' has no proven Lipschitz constant. {_reason(layer)}")
        name = layer.name
        while name in found:  # a layer that is used twice, or has a namesake in a model within the model
            name += "'"
        found[name] = (bounds.lipschitz, bounds.inverse_lipschitz)
        product = product.then(bounds)
    if product.lipschitz is None:
        raise ValueError(f"The product of the constants is no floating-point number. Received: {found}")
    return LipschitzBounds(product.lipschitz, product.inverse_lipschitz, found)


def activation_bounds(activation: Callable[..., Tensor]) -> Bounds:
    """The bounds of an activation, a Keras function or layer; none for one that is not known."""
    if isinstance(activation, keras.layers.Layer):
        known = isinstance(activation, Invertible) or type(activation) in _RULES
        return _bounds_of_layer(activation) if known and activation.built else Bounds()
    name = getattr(activation, "__name__", "")
    return _ACTIVATIONS.get(name, Bounds()) if activation is getattr(keras.activations, name, None) else Bounds()


def _chain(model: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The layers of a model in the order in which they are applied, those of models within it included."""
    if not isinstance(model, keras.layers.Layer):
        raise ValueError(f"`model` must be a Keras layer or model. Expected a `keras.layers.Layer`. Received: {model!r}")
    if not isinstance(model, keras.Model):
        require_built(model, "lipschitz_bounds")
        return [model]
    # Keras' own classes, here and below: a subclass may compute anything.
    if not isinstance(model, keras.Sequential | keras.Function) or not type(model).__module__.startswith("keras."):
        raise ValueError(
            f"Model '{model.name}' is no chain of layers that can be read. Expected a layer, a `keras.Sequential` or a "
            f"functional model. Received: {type(model).__name__}"
        )
    require_built(model, "lipschitz_bounds")
    steps: list[keras.layers.Layer] = []
    for layer in model.layers if isinstance(model, keras.Sequential) else _along(model):
        if not isinstance(layer, keras.layers.InputLayer):
            steps += _chain(layer)
    return steps


def _along(model: keras.Model) -> list[keras.layers.Layer]:
    """The operations from the input of a functional model to its output, each with one tensor in and one out."""
    steps: list[Any] = []
    tensor = model.outputs[0] if len(model.outputs) == len(model.inputs) == 1 else None
    while tensor is not None and tensor is not model.inputs[0]:
        operation, index, _ = tensor._keras_history
        node = operation._inbound_nodes[index]
        inputs = node.input_tensors
        if len(inputs) != 1 or len(node.output_tensors) != 1:
            break
        if not isinstance(operation, keras.layers.Layer):
            raise ValueError(
                f"The model uses an operation that is no layer. Expected Keras layers only. Received: {type(operation).__name__}"
            )
        _require_plain_call(operation, node.arguments)
        steps.append(operation)
        tensor = inputs[0]
    if tensor is not model.inputs[0]:
        raise ValueError(
            f"Model '{model.name}' is not a chain: the constants of branches do not multiply. Expected one input, one output, "
            "and one layer after the other between them"
        )
    return steps[::-1]


def _require_plain_call(layer: keras.layers.Layer, arguments: Any) -> None:
    """Refuses `training=True` in a graph, with which dropout drops at inference too, and whatever else a call may set."""
    given = {f"argument {i}": value for i, value in enumerate(arguments.args[1:], 2)} | arguments.kwargs
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    if given.keys() - {"inputs", "x"}:
        raise ValueError(
            f"Layer '{layer.name}' is called with arguments that change what it computes at inference. Expected its input alone. "
            f"Received: {given}"
        )


def _bounds_of_layer(layer: keras.layers.Layer) -> Bounds:
    if isinstance(layer, Invertible):
        try:
            return bounds_of(layer.certificate())
        except NotImplementedError as error:
            raise ValueError(str(error)) from error
    rule = _RULES.get(type(layer))
    if rule is None:
        raise ValueError(
            f"Nothing is known of layer '{layer.name}'. Expected a layer of keras_auxref or one of "
            f"{sorted(known.__name__ for known in _RULES)}. Received: {type(layer).__name__}"
        )
    return rule(layer) if _has_finite_weights(layer) else Bounds()


def _has_finite_weights(layer: keras.layers.Layer) -> bool:
    return all(np.isfinite(_numpy(weight)).all() for weight in layer.weights)


def _reason(layer: keras.layers.Layer) -> str:
    if isinstance(layer, Invertible):
        return layer.certificate().reason
    if not _has_finite_weights(layer):
        return "Its weights are not finite."
    if getattr(layer, "quantization_mode", None):
        return f"It rounds its inputs, in steps. Expected a layer that is not quantized. Received: {layer.quantization_mode!r}"
    activation = getattr(layer, "activation", None)
    if activation is not None and activation_bounds(activation).lipschitz is None:
        name = getattr(activation, "__name__", activation)
        return f"Expected an activation of {sorted(_ACTIVATIONS)}. Received: {name!r}"
    config = {name: value for name, value in layer.get_config().items() if name not in ("name", "trainable", "dtype")}
    return f"Expected finite slopes, no jump, and one output for every entry. Received: {type(layer).__name__} with {config}"


def _dense(layer: keras.layers.Layer) -> Bounds:
    if layer.quantization_mode:
        return Bounds()  # it rounds its inputs too: a step
    kernel = keras.ops.cast(layer.kernel, layer.compute_dtype)
    return linear_bounds(keras.ops.transpose(kernel)).then(activation_bounds(layer.activation))


def _batch_normalization(layer: keras.layers.Layer) -> Bounds:
    variance = _numpy(layer.moving_variance)
    gamma = _numpy(layer.gamma) if layer.scale else np.ones_like(variance)
    with np.errstate(invalid="ignore", divide="ignore"):  # a variance below 0 gives NaN, which has no bounds
        scales = gamma / np.sqrt(variance + layer.epsilon)
    return _scaled_by(scales, layer)


def _relu(layer: keras.layers.Layer) -> Bounds:
    slope, threshold = float(layer.negative_slope), float(layer.threshold or 0)
    if threshold > 0:
        return Bounds()  # it jumps there
    return _bent(slope, layer) if layer.max_value is None else Bounds(_bent(slope, layer).lipschitz)


def _leaky_relu(layer: keras.layers.Layer) -> Bounds:
    return _bent(float(layer.negative_slope), layer)


def _bent(slope: float, layer: keras.layers.Layer) -> Bounds:
    """Slope 1 for positive entries and another one for negative."""
    high, low = _scaled_by(_as_used(slope, layer), layer)
    return Bounds(None if high is None else max(1.0, high), max(1.0, low) if low is not None and slope > 0 else None)


def _average_pooling(layer: keras.layers.Layer) -> Bounds:
    disjoint = all(stride >= size for stride, size in zip(layer.strides, layer.pool_size, strict=True))
    if layer.padding != "valid" and not disjoint:
        raise ValueError(
            f"The windows of layer '{layer.name}' overlap and are cut off at the border, where their means may add up to more "
            f"than 1. Expected padding='valid' or strides of at least pool_size. Received: padding={layer.padding!r}, "
            f"strides={layer.strides}, pool_size={layer.pool_size}"
        )
    return _ONE


def _max_pooling(layer: keras.layers.Layer) -> Bounds:
    """√k where an entry lies in at most k windows."""
    windows = math.prod(math.ceil(size / stride) for size, stride in zip(layer.pool_size, layer.strides, strict=True))
    return Bounds(math.sqrt(windows) * (1 + 1e-15) if windows > 1 else 1.0)


def _rescaling(layer: keras.layers.Layer) -> Bounds:
    scale, offset = np.shape(layer.scale), np.shape(layer.offset)
    if scale and keras.config.image_data_format() == "channels_first":
        scale += (1,) * (3 - len(scale))
    shape = tuple(n or 1 for n in layer.get_build_config()["input_shape"][1:])
    if np.broadcast_shapes(shape, scale, offset) != shape:
        return Bounds()  # it makes several entries of one
    return _scaled_by(_as_used(layer.scale, layer), layer)


def _as_used(scales: ArrayLike, layer: keras.layers.Layer) -> np.ndarray:
    """Numbers as they are and as the dtype of the layer has them: backends use the one or the other."""
    exact = np.reshape(np.asarray(scales, np.float64), -1)
    return np.concatenate([exact, _numpy(keras.ops.cast(exact, layer.compute_dtype))])


def _scaled_by(scales: np.ndarray, layer: keras.layers.Layer) -> Bounds:
    """The bounds of x ↦ s ⊙ x for an s that the layer computes in its dtype."""
    room = 1 + 4 * epsilon(layer.compute_dtype)
    high, low = diagonal_bounds(scales)
    return Bounds(None if high is None else upwards(room * high), None if low is None else upwards(room * low))


def _numpy(x: Tensor) -> np.ndarray:
    return keras.ops.convert_to_numpy(x).astype(np.float64)


_L = keras.layers
_RULES: dict[type, Callable[[Any], Bounds]] = {
    _L.Dense: _dense,
    _L.BatchNormalization: _batch_normalization,
    _L.Activation: lambda layer: activation_bounds(layer.activation),
    _L.ReLU: _relu,
    _L.LeakyReLU: _leaky_relu,
    _L.ELU: lambda layer: Bounds(_bent(float(layer.alpha), layer).lipschitz),
    _L.Softmax: lambda layer: _ONE,
    _L.Rescaling: _rescaling,
    **dict.fromkeys([_L.AveragePooling1D, _L.AveragePooling2D, _L.AveragePooling3D], _average_pooling),
    **dict.fromkeys([_L.MaxPooling1D, _L.MaxPooling2D, _L.MaxPooling3D], _max_pooling),
    **dict.fromkeys([_L.Cropping1D, _L.Cropping2D, _L.Cropping3D], lambda layer: _ONE),
    **dict.fromkeys([_L.GlobalAveragePooling1D, _L.GlobalAveragePooling2D, _L.GlobalAveragePooling3D], lambda layer: _ONE),
    **dict.fromkeys([_L.GlobalMaxPooling1D, _L.GlobalMaxPooling2D, _L.GlobalMaxPooling3D], lambda layer: _ONE),
    **dict.fromkeys([_L.Flatten, _L.Reshape, _L.Permute, _L.Identity], lambda layer: ISOMETRY),
    **dict.fromkeys([_L.ZeroPadding1D, _L.ZeroPadding2D, _L.ZeroPadding3D], lambda layer: ISOMETRY),
    **dict.fromkeys([_L.Dropout, _L.AlphaDropout, _L.GaussianDropout, _L.GaussianNoise], lambda layer: ISOMETRY),
    **dict.fromkeys([_L.SpatialDropout1D, _L.SpatialDropout2D, _L.SpatialDropout3D], lambda layer: ISOMETRY),
    _L.ActivityRegularization: lambda layer: ISOMETRY,
}
