"""A dense layer that trains its singular value decomposition."""

import math
import warnings
from typing import Any, Unpack

import keras
import numpy as np

from keras_auxref import kernels
from keras_auxref.certificate import Bounds, Certificate, bounds_of, diagonal_bounds, not_proven, proven
from keras_auxref.invertible import Invertible
from keras_auxref.layers.aux_reflection import AuxReflection
from keras_auxref.layers.checks import last_axis, require_built
from keras_auxref.layers.dense_like import DenseLike
from keras_auxref.layers.orthogonal_dense import OrthogonalDense
from keras_auxref.lipschitz import activation_bounds
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Activation, Config, DType, Initializer, LayerArguments, Regularizer, Shape, Tensor

_START = (0.99, 1.01)


@keras.saving.register_keras_serializable(PACKAGE)
class SVDDense(DenseLike):
    """A dense layer in the form of its singular value decomposition: y = activation(U Σ Vᵀ x + b).

        y = activation(f_U(σ ⊙ f_V(x)) + b)

    where f_U and f_V are two auxiliary reflections, or two orthogonal matrices from one of the maps of `OrthogonalDense`. For
    `units` ≠ d the first min(d, units) coordinates of f_V(x) are kept and zeros are appended: Σ is rectangular.

    U and V are square: d² + units² weights, where `Dense` has d·units. For 2,048 features `SVDDense(10)` has 4.2 million
    weights and `Dense(10)` 20,490. With map="householder", `rank=r` makes both thin, with r orthonormal columns each, from r
    reflections: r·(d + units) weights, and as much work per vector. A rank of min(d, units) reaches every matrix, a smaller one
    those of rank r. Auxiliary reflections have no thin form: f(x) = H(Wx)x needs all of W.

    Without bounds σ is the weight s itself, started in U(0.99, 1.01). With `singular_bounds=(low, high)`

        σ = low + (high − low) / (1 + exp(−s))

    stays within them throughout training, and s starts such that σ is again in U(0.99, 1.01). With an orthogonal map these
    are bounds on the whole layer before its activation,

        low ‖x − x′‖ ≤ ‖y − y′‖ ≤ high ‖x − x′‖      (the left one where d ≤ units).

    Auxiliary reflections change distances themselves, by a factor that their kernel bounds. With bounds the default kernel is
    `"relaxed_cayley"`: high becomes L² high and low becomes low/L′², with the L and L′ from `certificate()` of the parts `u`
    and `v`; `kernels.RelaxedCayley(lipschitz=1.1)` keeps L at most 1.1. A free W changes distances
    without any bound: singular values of the Jacobian from 0.002 to 8 were seen with σ in (0.5, 2).

    If `units` is d and there is no activation, the layer is as invertible as its parts: x = f_V⁻¹(f_U⁻¹(y − b)/σ), with
    `inverse`, `log_det_jacobian`, `certificate` and `bijector`. With an orthogonal map it condenses into a `Dense` layer.

    Args:
        units: Positive integer, the size of the last axis of the output; by default that of the input.
        map: `"aux"`, `"householder"`, `"cayley"` or `"exp"`.
        activation: Keras activation.
        use_bias: Whether to add b.
        reflections: The number of Householder reflections in each of U and V; by default all. Only for `"householder"`.
        singular_bounds: None or (low, high) with 0 ≤ low ≤ 0.99 and 1.01 ≤ high.
        kernel: How weights become the W of each auxiliary reflection: see `AuxReflection`. Only for `"aux"`. By default `"free"`
            without `singular_bounds`, and `"relaxed_cayley"` with them.
        kernel_initializer: For both U and V: see `AuxReflection` and `OrthogonalDense`. With a fixed seed both
            start equal. The default is the paper's: weights U(−1/√d, 1/√d), different for U and V.
        kernel_regularizer: Keras regularizer for the weights of U and V.
        bias_initializer: Keras initializer for b.
        bias_regularizer: Keras regularizer for b.
        rank: None for square U and V, or the number r of singular values, 1 ≤ r ≤ min(d, units), for thin ones. Only for
            `"householder"`.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: Tensor of shape `(batch, ..., d)`.

    Output: A tensor of shape `(batch, ..., units)`.

    Example:
    >>> import numpy as np
    >>> from keras_auxref import SVDDense
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
        activation: Activation | None = None,
        use_bias: bool = False,
        reflections: int | None = None,
        singular_bounds: tuple[float, float] | None = None,
        kernel_initializer: Initializer | None = None,
        kernel_regularizer: Regularizer | None = None,
        bias_initializer: Initializer = "zeros",
        bias_regularizer: Regularizer | None = None,
        kernel: kernels.KernelLike | None = None,
        rank: int | None = None,
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        super().__init__(units, activation, use_bias, bias_initializer, bias_regularizer, **kwargs)
        if map not in ("aux", "householder", "cayley", "exp"):
            raise ValueError(
                f"Unknown map. Expected one of ['aux', 'cayley', 'exp', 'householder']. Received: {map!r}",
            )
        if map == "aux" and reflections is not None:
            raise ValueError(
                '`reflections` counts Householder reflections. Expected map="householder". Received: map="aux", '
                f"reflections={reflections}"
            )
        _check_rank(rank, map, self.units)
        self.map, self.reflections, self.rank = map, reflections, rank
        self.singular_bounds = _checked_bounds(singular_bounds)
        self.parametrization = self._checked_kernel(kernel)
        self.u = self._orthogonal("u", self.units if rank else None, kernel_initializer, kernel_regularizer)
        self.v = self._orthogonal("v", rank, kernel_initializer, kernel_regularizer)

    def _checked_kernel(self, kernel: kernels.KernelLike | None) -> kernels.Kernel | None:
        if self.map != "aux":
            if kernel is not None:
                raise ValueError(
                    f'`kernel` is for auxiliary reflections. Expected map="aux". Received: map={self.map!r}, kernel={kernel!r}'
                )
            return None
        bounded = self.singular_bounds is not None
        chosen = kernels.get(("relaxed_cayley" if bounded else "free") if kernel is None else kernel)
        if bounded and not chosen.promises:
            warnings.warn(
                "`singular_bounds` bounds σ and not the layer: auxiliary reflections of this kernel bend distances without a "
                'bound. Take kernel="relaxed_cayley" or map="householder" for a layer that is bounded itself.',
                stacklevel=3,
            )
        return chosen

    def _orthogonal(
        self, name: str, units: int | None, initializer: Initializer | None, regularizer: Regularizer | None
    ) -> AuxReflection | OrthogonalDense:
        arguments = {
            "kernel_initializer": initializer,
            "kernel_regularizer": regularizer,
            "dtype": self.dtype_policy,
            "name": name,
        }
        if self.parametrization is not None:
            return AuxReflection(self.parametrization, **arguments)
        return OrthogonalDense(self.map, self.reflections, units=units, **arguments)

    def build(self, input_shape: Shape) -> None:
        d = last_axis(self, input_shape)
        units = self.units or d
        if self.rank is not None:
            if self.rank > min(d, units):
                raise ValueError(
                    f"No more singular values than dimensions. Expected rank ≤ {min(d, units)}. Received: {self.rank}"
                )
            self.u.units = units
        self.v.build(input_shape)
        self.u.build((*input_shape[:-1], self.rank or units))
        self.singular_weight = self.add_weight(
            name="singular", shape=(self.rank or min(d, units),), initializer=self._initial_singular_weight, autocast=False
        )
        self._build_bias(d)

    def _initial_singular_weight(self, shape: Shape, dtype: DType | None = None) -> Tensor:
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
        kept, width = sigma.shape[0], self.u.input_spec.axes[-1]
        x = x[..., :kept] * sigma
        if width > kept:
            x = keras.ops.pad(x, [[0, 0]] * (len(x.shape) - 1) + [[0, width - kept]])
        return self.activation(self._with_bias(self.u(x)))

    @property
    def singular_values(self) -> Tensor:
        """σ as a tensor of shape (min(d, units),), or (rank,), computed from the trainable weight."""
        require_built(self, "singular_values")
        s = keras.ops.convert_to_tensor(self.singular_weight)
        if self.singular_bounds is None:
            return s
        low, high = self.singular_bounds
        # Rounding may exceed a bound by one unit in the last place.
        return keras.ops.clip(low + (high - low) * keras.ops.sigmoid(s), low, high)

    def inverse(self, y: Tensor) -> Tensor:
        """x = f_V⁻¹(f_U⁻¹(y − b)/σ). Needs `units` = d and no activation."""
        self._require_invertible("inverse")
        y = self._without_bias(self._tensor(y, "inverse"))
        return self.v.inverse(self.u.inverse(y) / keras.ops.cast(self.singular_values, y.dtype))

    def forward_and_log_det(self, x: Tensor, training: bool | None = None) -> tuple[Tensor, Tensor]:
        """(y, log|det ∂y/∂x|). Needs `units` = d and no activation."""
        self._require_invertible("forward_and_log_det")
        x, first = self.v.forward_and_log_det(self._tensor(x, "forward_and_log_det"), training=training)
        sigma = keras.ops.cast(self.singular_values, x.dtype)
        y, second = self.u.forward_and_log_det(x * sigma, training=training)
        return self._with_bias(y), first + second + keras.ops.sum(keras.ops.log(keras.ops.abs(sigma)))

    def certificate(self) -> Certificate:
        """Proven if U and V are proven and no singular value is zero; never proven if `units` ≠ d or with an activation."""
        require_built(self, "certificate")
        sigma = keras.ops.convert_to_numpy(keras.ops.cast(self.singular_values, self.compute_dtype)).astype(np.float64)
        if not np.isfinite(sigma).all():
            return not_proven("a singular value is not finite")
        if self.bias is not None and not np.isfinite(keras.ops.convert_to_numpy(self.bias).astype(np.float64)).all():
            return not_proven("the bias is not finite")
        certificates = [part.certificate() for part in (self.v, self.u)]
        scale, (first, last) = diagonal_bounds(sigma), (bounds_of(certificate) for certificate in certificates)
        bounds = first.then(scale).then(last).then(activation_bounds(self.activation))
        if self._obstacle() is not None:
            wider = self.u.input_spec.axes[-1] >= self.v.input_spec.axes[-1]
            return not_proven(str(self._obstacle()), bounds if wider else Bounds(bounds.lipschitz))
        if not (sigma != 0).all():
            return not_proven("a singular value is zero", bounds)
        for part, certificate in zip((self.v, self.u), certificates, strict=True):
            if not certificate.invertible:
                reason = certificate.reason.removeprefix("Not proven: ").removesuffix(".")
                return not_proven(f"of {part.name!r}: {reason}", bounds)
        condition = float(np.abs(sigma).max() / np.abs(sigma).min())
        reason = f"two bijections around singular values of condition {condition:.6g}"
        return proven(reason, math.nan if self.map == "aux" else condition, bounds)

    def inverse_parts(self) -> list[Invertible]:
        return [self.u, self.v]

    def _obstacle(self) -> str | None:
        """Why the layer has no inverse, whatever its weights; None if it may have one."""
        d = self.input_spec.axes[-1]
        if self.units in (None, d) and self.rank not in (None, d):
            return f"a matrix of rank {self.rank} in {d} dimensions has no inverse"
        return super()._obstacle()

    def condense(self) -> keras.layers.Dense:
        """A plain `keras.layers.Dense` that computes the same y = activation(U Σ Vᵀ x + b): a copy with the current values.

        Not for `map="aux"`: auxiliary reflections are not linear, so no matrix can replace them.
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
        return self._condensed(kernel)

    def get_config(self) -> Config:
        return {
            **super().get_config(),
            "map": self.map,
            "reflections": self.reflections,
            "singular_bounds": self.singular_bounds,
            "kernel": None if self.parametrization is None else keras.saving.serialize_keras_object(self.parametrization),
            "kernel_initializer": keras.initializers.serialize(self.u.kernel_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.u.kernel_regularizer),
            "rank": self.rank,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "SVDDense":
        # Files from before there was a choice of kernel have a free W.
        earlier = {"kernel": "free"} if config.get("map") == "aux" and "kernel" not in config else {}
        return cls(**{**config, **earlier})


def _checked_bounds(bounds: tuple[float, float] | None) -> tuple[float, float] | None:
    if bounds is None:
        return None
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise ValueError(f"`singular_bounds` must be a pair. Expected (low, high). Received: {bounds!r}")
    if not all(isinstance(bound, int | float | np.number) for bound in bounds):
        raise ValueError(f"`singular_bounds` must be two numbers. Expected (low, high). Received: {bounds!r}")
    low, high = (float(bound) for bound in bounds)
    if not (0 <= low <= _START[0] and _START[1] <= high < math.inf):
        raise ValueError(
            "`singular_bounds` must contain the start U(0.99, 1.01) of the singular values. Expected 0 ≤ low ≤ 0.99 and "
            f"1.01 ≤ high. Received: {bounds!r}"
        )
    return low, high


def _check_rank(rank: int | None, map: str, units: int | None) -> None:
    if rank is None:
        return
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1 or rank > (units or rank):
        raise ValueError(f"`rank` counts singular values. Expected an integer 1 ≤ rank ≤ min(d, units). Received: {rank!r}")
    if map != "householder":
        raise ValueError(
            'Only Householder reflections make thin matrices: auxiliary reflections, "cayley" and "exp" need a whole square one. '
            f'Expected map="householder" with `rank`. Received: map={map!r}, rank={rank}'
        )
