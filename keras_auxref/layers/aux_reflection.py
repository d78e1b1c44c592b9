"""The auxiliary reflection as a Keras layer."""

import warnings
from collections.abc import Callable
from typing import Any, Unpack

import keras

from keras_auxref import initializers, kernels, ops
from keras_auxref.certificate import Certificate
from keras_auxref.invertible import Invertible
from keras_auxref.layers.checks import as_input, at_least_float32, has_value, last_axis, require_built, require_floating
from keras_auxref.layers.frozen import Freezable
from keras_auxref.ops.backend import outside_graphs
from keras_auxref.ops.checks import HALF, as_tensor
from keras_auxref.ops.reflect import central_coefficient, coefficient
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, Constraint, Initializer, LayerArguments, Regularizer, Shape, Tensor

BRANCH_MOMENTUM = 0.9


@keras.saving.register_keras_serializable(PACKAGE)
class AuxReflection(Freezable, Invertible, keras.layers.Layer):
    """The auxiliary reflection of the last axis of its input: f(x) = H(n(x)) x.

        f(x) = H(Wx) x = x − c u,      u = W x,      c = 2 uᵀx / ‖u‖²

    One reflection, chosen by the input, represents every orthogonal map (W = I − U) and costs about as much as a Dense layer. The
    output has the same norm as the input; the map is nonlinear, and its Jacobian is in general not orthogonal.

    Args:
        kernel: How weights become W: `"free"` (no guarantee), `"spectral"` (the paper's symmetric W, provably invertible),
            `"relaxed_cayley"` (provably invertible, starts at orthogonal maps without eigenvalue 1), or a `kernels.Kernel`.
        network: Any Keras layer or model n with n(x).shape == x.shape, instead of W: f(x) = H(n(x)) x. Then there is no W, and
            `kernel`, `inverse`, `log_det_jacobian`, `certificate` and `bijector` are not available.
        kernel_initializer: An orthogonal start Q, for `"free"` and `"relaxed_cayley"`: an `initializers.OrthogonalMatrix`,
            `initializers.ReflectionOf(Q)`, `"cayley"`, `"henaff"`, `"fixed_point_free"`, Keras' `"orthogonal"` or an array; the
            layer starts as x ↦ Q x. Any other initializer makes W for `"free"` and V for `"spectral"`. Each kernel has its own
            default.
        kernel_regularizer: Keras regularizer for the trainable weights of the kernel.
        kernel_constraint: Keras constraint for the trainable weights of the kernel. None is needed for a guarantee.
        track_branch: Keep a moving average of c(x) over the training data in the non-trainable weight `branch`. Without a
            certificate there may be several preimages; `inverse` then looks for the one whose c is nearest to that average: the
            branch on which the data lie. Before training the average is 2 tr W/‖W‖²_F, exact for W = I − U.
        strict: What to do when the inverse, a log-determinant or a bijector is used although no certificate proves that f is
            one-to-one, which is the usual case for a free W. None warns once, True raises a `ValueError`, False is silent. In a
            graph this happens when the graph is traced.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: Tensor of shape `(batch, ..., d)`.

    Output: A tensor of the same shape.

    Example:
    >>> import numpy as np
    >>> from keras_auxref import AuxReflection
    >>> layer = AuxReflection()
    >>> x = np.ones((2, 8), "float32")
    >>> np.allclose(np.linalg.norm(layer(x), axis=-1), np.linalg.norm(x, axis=-1))
    True

    Reference: Mathiasen & Hvilshøj, "One Reflection Suffice", 2020.
    """

    elementary = False

    def __init__(
        self,
        kernel: kernels.KernelLike = "free",
        network: keras.layers.Layer | None = None,
        kernel_initializer: Initializer | None = None,
        kernel_regularizer: Regularizer | None = None,
        kernel_constraint: Constraint | None = None,
        track_branch: bool = False,
        strict: bool | None = None,
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        super().__init__(**kwargs)
        require_floating(self, self.compute_dtype)
        self.parametrization = kernels.get(kernel)
        self.track_branch = bool(track_branch)
        if strict not in (None, True, False):
            raise ValueError(
                f"`strict` says what to do without a certificate. Expected None, True or False. Received: {strict!r}"
            )
        self.strict = strict
        self._has_warned = False
        self.branch: Any = None
        if network is not None and not isinstance(network, keras.layers.Layer):
            raise ValueError(f"`network` must be a Keras layer or model. Expected a `keras.layers.Layer`. Received: {network!r}")
        self.network: Any = network
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.supports_masking = True
        self._weights_of_kernel: dict[str, keras.Variable] = {}

    @property
    def supports_xla(self) -> bool:  # type: ignore[override]
        """False where XLA lacks the eigendecomposition that makes the log-determinant cheap: for a W that is not symmetric."""
        return self.parametrization.symmetric

    def build(self, input_shape: Shape) -> None:
        d = last_axis(self, input_shape)
        if self.network is not None:
            self._build_network(input_shape)
        else:
            initializer = self.kernel_initializer or self.parametrization.default_initializer()
            with outside_graphs():  # a model may be built while its training step is traced
                values = self.parametrization.initial_weights(d, initializer, self.variable_dtype)
                branch = central_coefficient(self._matrix(values))
            for name, value in values.items():
                # Without autocast W is computed in the precision of the weights, also in mixed precision.
                self._weights_of_kernel[name] = self.add_weight(
                    name=name,
                    shape=tuple(value.shape),
                    initializer=lambda shape, dtype=None, value=value: keras.ops.cast(value, dtype),
                    regularizer=self.kernel_regularizer,
                    constraint=self.kernel_constraint,
                    autocast=False,
                )
            if self.track_branch:
                self.branch = self.add_weight(
                    name="branch",
                    shape=(),
                    initializer=lambda shape, dtype=None: keras.ops.cast(branch, dtype),
                    trainable=False,
                    autocast=False,
                    aggregation="mean",
                )
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: d})

    def _build_network(self, input_shape: Shape) -> None:
        if not self.network.built:
            self.network.build(input_shape)
        probe = keras.KerasTensor(input_shape, dtype=self.compute_dtype)
        shape = tuple(self.network(probe).shape)
        if shape != tuple(input_shape):
            raise ValueError(f"`network` must keep the shape of its input. Expected {tuple(input_shape)}. Received: {shape}")

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        inputs = as_input(self, inputs)
        if self.network is not None:
            return ops.householder(self.network(inputs), inputs)
        x, w = self._operands(inputs)
        if training and self._follows:
            self._follow_branch(coefficient(keras.ops.stop_gradient(x), keras.ops.stop_gradient(w)))
        return keras.ops.cast(ops.reflect(x, w), inputs.dtype)

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x and W in the precision in which the map is computed."""
        w = self.kernel
        dtype = w.dtype if self.parametrization.promises and self.compute_dtype in HALF else x.dtype
        return keras.ops.cast(x, dtype), keras.ops.cast(w, dtype)

    @property
    def _follows(self) -> bool:
        """Whether training updates the branch. Not if the layer is frozen, as in BatchNormalization."""
        return self.branch is not None and self.trainable

    def _follow_branch(self, c: Tensor) -> None:
        if not self._follows:
            return
        branch = keras.ops.convert_to_tensor(self.branch)
        moved = branch + (1 - BRANCH_MOMENTUM) * (keras.ops.cast(keras.ops.mean(c), branch.dtype) - branch)
        self.branch.assign(keras.ops.where(keras.ops.isfinite(moved), moved, branch))

    @property
    def kernel(self) -> Tensor:
        """W as the layer uses it, a tensor of shape (d, d) computed from the trainable weights.

        In half and in mixed precision W is computed in float32, and used without rounding where the kernel guarantees a
        bijection: rounding would break the guarantee. A `"free"` W is rounded, and `certificate` is about the rounded W.
        """
        self._require_kernel("kernel")
        return self.once("kernel", self._compute_kernel)

    def _compute_kernel(self) -> Tensor:
        return self._matrix({name: as_tensor(variable, name) for name, variable in self._weights_of_kernel.items()})

    def _matrix(self, weights: dict[str, Tensor]) -> Tensor:
        w = self.parametrization({name: at_least_float32(weight) for name, weight in weights.items()})
        if self.compute_dtype not in HALF:
            return keras.ops.cast(w, self.compute_dtype)
        return w if self.parametrization.promises else keras.ops.cast(keras.ops.cast(w, self.compute_dtype), "float32")

    def _factoring(self) -> dict[str, Any]:
        """The arguments with which `ops.inverse` and `ops.log_det_jacobian` factor W, or receive its factors."""
        symmetric = True if self.parametrization.symmetric else None
        if not self.is_frozen:
            return {"symmetric": symmetric}
        return {"symmetric": symmetric, "factors": self.once("factors", lambda: ops.factorize(self.kernel, symmetric))}

    def inverse(self, y: Tensor) -> Tensor:
        """x with f(x) = y. See `ops.inverse` for what is guaranteed; `certificate()` tells whether x is unique."""
        self.require_certificate("inverse")
        return self._with_kernel(ops.inverse, y, "inverse", near=self._near(), **self._factoring())

    def _near(self) -> Tensor | None:
        return None if self.branch is None else keras.ops.convert_to_tensor(self.branch)

    def log_det_jacobian(self, x: Tensor) -> Tensor:
        """log|det ∂f/∂x| for every vector on the last axis of x, shape `(batch, ...)`."""
        self.require_certificate("log_det_jacobian")
        return self._with_kernel(ops.log_det_jacobian, x, "log_det_jacobian", **self._factoring())

    def forward_and_log_det(self, x: Tensor, training: bool | None = None) -> tuple[Tensor, Tensor]:
        """f(x) and log|det ∂f/∂x|, from one computation of W."""
        self.require_certificate("forward_and_log_det")
        x, w = self._operands(keras.ops.convert_to_tensor(x, dtype=self.compute_dtype))
        y, log_det, c = ops.reflect_and_log_det(x, w, **self._factoring())
        if training:
            self._follow_branch(c)
        return keras.ops.cast(y, self.compute_dtype), keras.ops.cast(log_det, self.compute_dtype)

    def coefficient(self, x: Tensor) -> Tensor:
        """c(x) = 2 uᵀx/‖u‖², u = W x, for every vector on the last axis: which branch of the inverse x lies on."""
        return self._with_kernel(coefficient, x, "coefficient")

    def certificate(self) -> Certificate:
        """What is proven about the invertibility of this layer with its current weights."""
        self._require_kernel("certificate")
        return self.parametrization.certificate(self.kernel)

    def proof(self) -> Tensor:
        """Whether f is proven to be a bijection, as a scalar boolean tensor, also inside a graph."""
        self._require_kernel("proof")
        w = self.kernel
        symmetric = True if self.parametrization.symmetric else None
        return ops.is_certified(w, symmetric)

    def bijector(self, **kwargs: object) -> Any:
        """A new TFP bijector over the weights of this layer: a view, never a copy."""
        self.require_certificate("bijector")
        return super().bijector(**kwargs)

    @property
    def in_doubt(self) -> bool:
        return self.network is not None or not self.parametrization.promises

    def require_certificate(self, name: str) -> None:
        """Warns, or raises with `strict`, if f is not proven to be one-to-one."""
        self._require_kernel(name)
        if self.parametrization.promises or self.strict is False or self._has_warned:
            return
        if not all(has_value(variable.value) for variable in self._weights_of_kernel.values()):
            return
        with outside_graphs():
            certificate = self.parametrization.certificate(self._compute_kernel())
        if certificate.invertible:
            return
        message = (
            f"Nothing proves that layer '{self.name}' is one-to-one, and `{name}` is used. {certificate.reason} With such a W "
            "`inverse(layer(x))` is a vector with the image of x and seldom x itself, and a density made with the "
            "log-determinant does not integrate to 1. `certificate()` tells; `FactoredReflection` and the kernels "
            '"relaxed_cayley" and "spectral" are proven for all weights.'
        )
        if self.strict:
            raise ValueError(f"{message} Expected a certificate, because of strict=True. Received: none")
        self._has_warned = True
        warnings.warn(f"{message} strict=False silences this, strict=True refuses.", stacklevel=3)

    def _with_kernel(self, function: Callable[..., Tensor], x: Tensor, name: str, **kwargs: object) -> Tensor:
        self._require_kernel(name)
        x, w = self._operands(keras.ops.convert_to_tensor(x, dtype=self.compute_dtype))
        return keras.ops.cast(function(x, w, **kwargs), self.compute_dtype)

    def _require_kernel(self, name: str) -> None:
        if self.network is not None:
            raise NotImplementedError(
                f"`{name}` needs a linear n(x) = Wx: for a general `network` neither the inverse nor the log-determinant of "
                "f(x) = H(n(x)) x has a known closed form, and there is no matrix W."
            )
        require_built(self, name)

    def get_config(self) -> Config:
        return {
            **super().get_config(),
            "kernel": keras.saving.serialize_keras_object(self.parametrization),
            "network": keras.saving.serialize_keras_object(self.network),
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "kernel_constraint": keras.constraints.serialize(self.kernel_constraint),
            "track_branch": self.track_branch,
            "strict": self.strict,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "AuxReflection":
        config = dict(config)
        if config.get("network") is not None:
            config["network"] = keras.saving.deserialize_keras_object(config["network"])
        return cls(**config)
