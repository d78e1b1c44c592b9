"""A dense layer that trains its singular value decomposition."""

import math
from typing import Any

import keras
import numpy as np

from keras_auxref._keras import PACKAGE
from keras_auxref.invertible import Invertible
from keras_auxref.kernels.certificate import Certificate, not_proven, proven
from keras_auxref.layers._checks import last_axis, require_built
from keras_auxref.layers.aux_reflection import AuxReflection
from keras_auxref.layers.orthogonal_dense import OrthogonalDense
from keras_auxref.typing import Shape, Tensor

_START = (0.99, 1.01)


@keras.saving.register_keras_serializable(PACKAGE)
class SVDDense(Invertible, keras.layers.Layer):
    """A dense layer in the form of its singular value decomposition: y = activation(U Σ Vᵀ x + b).

        y = activation(f_U(σ ⊙ f_V(x)) + b)

    with f_U and f_V two auxiliary reflections, or two orthogonal matrices of one of the maps of `OrthogonalDense`. For
    `units` ≠ d the first min(d, units) coordinates of f_V(x) are kept, and zeros added after them: Σ is rectangular.

    Without bounds σ is the weight s itself, started in U(0.99, 1.01). With `singular_bounds=(low, high)`

        σ = low + (high − low) / (1 + exp(−s))

    stays inside them whatever the training does, and s starts where σ is in U(0.99, 1.01) as well.

    Where `units` is d and there is no activation, the layer is as invertible as its parts: x = f_V⁻¹(f_U⁻¹(y − b)/σ), with
    `inverse`, `log_det_jacobian`, `certificate` and `bijector`. With an orthogonal map it condenses into a `Dense` layer.

    Args:
        units: Positive integer, the size of the last axis of the output; by default that of the input.
        map: `"aux"`, `"householder"`, `"cayley"` or `"exp"`.
        activation: Keras activation.
        use_bias: Whether to add b.
        reflections: The number of Householder reflections in each of U and V; by default all. Only for `"householder"`.
        singular_bounds: None or (low, high) with 0 ≤ low ≤ 0.99 and 1.01 ≤ high.
        kernel_initializer: For U and V alike: see `AuxReflection` and `OrthogonalDense`. An initializer with a fixed seed makes
            them start equal. The default is the paper's: weights U(−1/√d, 1/√d), different for U and V.
        kernel_regularizer: Keras regularizer for the weights of U and V.
        bias_initializer: Keras initializer for b.
        bias_regularizer: Keras regularizer for b.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: Tensor of shape `(batch, ..., d)`.

    Output: A tensor of shape `(batch, ..., units)`.

    Example:
    >>> import numpy as np
    >>> layer = SVDDense(4, singular_bounds=(0.5, 2.0), activation="relu")
    >>> layer(np.ones((2, 8), "float32")).shape
    TensorShape([2, 4])

    Reference: Zhang, Lei & Dhillon, "Stabilizing Gradients for Deep Neural Networks via Efficient SVD Parameterization",
    ICML 2018.
    """

    def __init__(
        self,
        units: int | None = None,
        map: str = "aux",
        activation: Any = None,
        use_bias: bool = False,
        reflections: int | None = None,
        singular_bounds: tuple[float, float] | None = None,
        kernel_initializer: Any = None,
        kernel_regularizer: Any = None,
        bias_initializer: Any = "zeros",
        bias_regularizer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if units is not None and (not isinstance(units, int) or units < 1):
            raise ValueError(f"`units` must be a positive integer or None. Received: {units!r}")
        if map not in ("aux", "householder", "cayley", "exp"):
            raise ValueError(
                f"Unknown map. Expected one of ['aux', 'cayley', 'exp', 'householder']. Received: {map!r}",
            )
        if map == "aux" and reflections is not None:
            raise ValueError(
                '`reflections` counts Householder reflections. Expected map="householder". Received: map="aux", '
                f"reflections={reflections}"
            )
        self.units, self.map, self.use_bias, self.reflections = units, map, use_bias, reflections
        self.singular_bounds = _checked_bounds(singular_bounds)
        self.activation = keras.activations.get(activation)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.u, self.v = (self._orthogonal(name, kernel_initializer, kernel_regularizer) for name in ("u", "v"))
        self.bias = None
        self.supports_masking = True

    def _orthogonal(self, name: str, initializer: Any, regularizer: Any) -> Any:
        arguments = {
            "kernel_initializer": initializer,
            "kernel_regularizer": regularizer,
            "dtype": self.dtype_policy,
            "name": name,
        }
        if self.map == "aux":
            return AuxReflection(**arguments)
        return OrthogonalDense(self.map, self.reflections, **arguments)

    def build(self, input_shape: Shape) -> None:
        d = last_axis(self, input_shape)
        units = self.units or d
        self.v.build(input_shape)
        self.u.build((*input_shape[:-1], units))
        self.singular_weight = self.add_weight(
            name="singular", shape=(min(d, units),), initializer=self._initial_singular_weight, autocast=False
        )
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias", shape=(units,), initializer=self.bias_initializer, regularizer=self.bias_regularizer
            )
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: d})

    def _initial_singular_weight(self, shape: Shape, dtype: Any = None) -> Tensor:
        start = keras.random.uniform(shape, *_START, dtype="float32")
        if self.singular_bounds is not None:
            low, high = self.singular_bounds
            # Bounds of exactly 0.99 or 1.01 would put the ends of the interval at infinity.
            share = keras.ops.clip((start - low) / (high - low), 1e-4, 1 - 1e-4)
            start = keras.ops.log(share) - keras.ops.log(1 - share)
        return keras.ops.cast(start, dtype)

    def call(self, inputs: Tensor) -> Tensor:
        x = self.v(inputs)
        sigma = keras.ops.cast(self.singular_values, x.dtype)
        kept, units = sigma.shape[0], self.units or x.shape[-1]
        x = x[..., :kept] * sigma
        if units > kept:
            x = keras.ops.pad(x, [[0, 0]] * (len(x.shape) - 1) + [[0, units - kept]])
        x = self.u(x)
        if self.bias is not None:
            x = x + self.bias
        return self.activation(x)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return (*input_shape[:-1], self.units or input_shape[-1])

    @property
    def singular_values(self) -> Tensor:
        """σ as a tensor of shape (min(d, units),), computed from the trainable weight."""
        require_built(self, "singular_values")
        s = keras.ops.convert_to_tensor(self.singular_weight)
        if self.singular_bounds is None:
            return s
        low, high = self.singular_bounds
        # Rounding may pass a bound by one unit in the last place.
        return keras.ops.clip(low + (high - low) * keras.ops.sigmoid(s), low, high)

    def inverse(self, y: Tensor) -> Tensor:
        """x = f_V⁻¹(f_U⁻¹(y − b)/σ). Needs `units` = d and no activation."""
        self._require_invertible("inverse")
        y = self._tensor(y, "inverse")
        y = y if self.bias is None else y - keras.ops.cast(self.bias, y.dtype)
        return self.v.inverse(self.u.inverse(y) / keras.ops.cast(self.singular_values, y.dtype))

    def log_det_jacobian(self, x: Tensor) -> Tensor:
        """log|det ∂f_V| + Σ log|σ| + log|det ∂f_U| for every vector on the last axis of x. Needs what `inverse` needs."""
        return self.forward_and_log_det(x)[1]

    def forward_and_log_det(self, x: Tensor, training: bool | None = None) -> tuple[Tensor, Tensor]:
        """(y, log|det ∂y/∂x|). Needs `units` = d and no activation."""
        self._require_invertible("forward_and_log_det")
        x, first = self.v.forward_and_log_det(self._tensor(x, "forward_and_log_det"), training=training)
        sigma = keras.ops.cast(self.singular_values, x.dtype)
        y, second = self.u.forward_and_log_det(x * sigma, training=training)
        y = y if self.bias is None else y + keras.ops.cast(self.bias, y.dtype)
        return y, first + second + keras.ops.sum(keras.ops.log(keras.ops.abs(sigma)))

    def certificate(self) -> Certificate:
        """Proven where U and V are and no singular value is zero; not proven for other shapes and with an activation."""
        require_built(self, "certificate")
        if self._obstacle() is not None:
            return not_proven(str(self._obstacle()))
        sigma = keras.ops.convert_to_numpy(keras.ops.cast(self.singular_values, self.compute_dtype)).astype(np.float64)
        if not (np.isfinite(sigma).all() and (sigma != 0).all()):
            return not_proven("a singular value is zero or not finite")
        if self.bias is not None and not np.isfinite(keras.ops.convert_to_numpy(self.bias).astype(np.float64)).all():
            return not_proven("the bias is not finite")
        for part in (self.v, self.u):
            certificate = part.certificate()
            if not certificate.invertible:
                return not_proven(f"of {part.name!r}: {certificate.reason.removeprefix('Not proven: ').removesuffix('.')}")
        condition = float(np.abs(sigma).max() / np.abs(sigma).min())
        return proven(
            f"two bijections around singular values of condition {condition:.6g}", math.nan if self.map == "aux" else condition
        )

    def inverse_parts(self) -> list[Invertible]:
        return [self.u, self.v]

    def bijector(self, **kwargs: Any) -> Any:
        """A new TFP bijector over the weights of this layer: a view, never a copy. Needs `units` = d and no activation."""
        self._require_invertible("bijector")
        return super().bijector(**kwargs)

    def _obstacle(self) -> str | None:
        """Why the layer has no inverse, whatever its weights, if so."""
        d, units = self.v.input_spec.axes[-1], self.u.input_spec.axes[-1]
        if d != units:
            return f"a map from {d} to {units} dimensions has no inverse"
        if self.activation is not keras.activations.linear:
            return f"the activation {getattr(self.activation, '__name__', self.activation)!r} is not undone"
        return None

    def _require_invertible(self, name: str) -> None:
        require_built(self, name)
        if self._obstacle() is not None:
            raise NotImplementedError(
                f"`{name}` needs an invertible layer. Expected `units` equal to the size of the input and no activation. "
                f"Received: {self._obstacle()}"
            )

    def condense(self) -> keras.layers.Dense:
        """A plain `keras.layers.Dense` that computes the same y = activation(U Σ Vᵀ x + b): a copy as it is now, for inference.

        Not for `map="aux"`: auxiliary reflections are not linear, and no matrix computes what they compute.
        """
        if self.map == "aux":
            raise NotImplementedError(
                "Auxiliary reflections are not linear, so that no Dense layer computes the same. Expected map='householder', "
                "'cayley' or 'exp'. Received: map='aux'"
            )
        require_built(self, "condense")
        parts = (self.u.matrix, self.singular_values, self.v.matrix)  # the layer's V is the Vᵀ of the decomposition
        u, sigma, v = (keras.ops.convert_to_numpy(part).astype(np.float64) for part in parts)
        kernel = (u[:, : len(sigma)] * sigma) @ v[: len(sigma)]
        dense = keras.layers.Dense(
            len(u), activation=self.activation, use_bias=self.use_bias, dtype=self.dtype_policy, name=self.name
        )
        dense.build((None, len(v)))
        dense.kernel.assign(kernel.T)
        if self.bias is not None:
            dense.bias.assign(self.bias)
        return dense

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "units": self.units,
            "map": self.map,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "reflections": self.reflections,
            "singular_bounds": self.singular_bounds,
            "kernel_initializer": keras.initializers.serialize(self.u.kernel_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.u.kernel_regularizer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
        }


def _checked_bounds(bounds: Any) -> tuple[float, float] | None:
    if bounds is None:
        return None
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise ValueError(f"`singular_bounds` must be a pair. Expected (low, high). Received: {bounds!r}")
    low, high = (float(bound) for bound in bounds)
    if not (0 <= low <= _START[0] and _START[1] <= high < math.inf):
        raise ValueError(
            "`singular_bounds` must contain the start U(0.99, 1.01) of the singular values. Expected 0 ≤ low ≤ 0.99 and "
            f"1.01 ≤ high. Received: {bounds!r}"
        )
    return low, high
