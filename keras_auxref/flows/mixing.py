"""The map between channels at every pixel: the 1×1 convolution of Glow and what replaces it."""

import warnings
from collections.abc import Callable
from typing import TypeAlias

import keras

from keras_auxref import kernels
from keras_auxref.flows.chain import Chain, check_template
from keras_auxref.flows.copies import clone
from keras_auxref.flows.parts import InvertibleDense, Permutation, QRDense, ReflectedDense
from keras_auxref.initializers import FixedPointFree, OrthogonalMatrix, ReflectionOf
from keras_auxref.layers import AuxReflection, FactoredReflection, OrthogonalDense
from keras_auxref.typing import Config, DType

Part: TypeAlias = str | keras.layers.Layer
"""A part of every step of a flow: a name, or a layer as template."""


def _aux_spectral(q: OrthogonalMatrix, dtype: DType, kernel: kernels.Kernel | None = None) -> Chain:
    # Such a W cannot start at an orthogonal map: the paper puts a fixed one before it, and starts at V = I.
    kernel = kernel or kernels.Spectral(0.5)
    fixed = InvertibleDense(kernel_initializer=q, trainable=False, name="mixing_fixed", dtype=dtype)
    return Chain([fixed, AuxReflection(kernel, kernel_initializer="identity", name="mixing", dtype=dtype)], dtype=dtype)


TEMPLATES: dict[str, Callable[[OrthogonalMatrix, DType], keras.layers.Layer]] = {
    "aux_factored": lambda q, dtype: FactoredReflection(kernel_initializer=q, dtype=dtype),
    "aux_factored_right": lambda q, dtype: FactoredReflection(sides="right", kernel_initializer=q, dtype=dtype),
    "aux": lambda q, dtype: AuxReflection(kernel_initializer=ReflectionOf(q), track_branch=True, strict=False, dtype=dtype),
    "aux_spectral": _aux_spectral,
    "aux_relaxed_cayley": lambda q, dtype: AuxReflection("relaxed_cayley", kernel_initializer=q, dtype=dtype),
    "householder": lambda q, dtype: OrthogonalDense("householder", kernel_initializer=ReflectionOf(q), dtype=dtype),
    "conv": lambda q, dtype: InvertibleDense(kernel_initializer=q, dtype=dtype),
    "aux_conv": lambda q, dtype: ReflectedDense(kernel_initializer=q, dtype=dtype),
    "qr": lambda q, dtype: QRDense(kernel_initializer=q, dtype=dtype),
    "aux_factored_qr": lambda q, dtype: QRDense("factored", kernel_initializer=q, dtype=dtype),
    "fixed": lambda q, dtype: InvertibleDense(kernel_initializer=q, trainable=False, dtype=dtype),
    "permutation": lambda q, dtype: Permutation(dtype=dtype),
}
MIXINGS = tuple(TEMPLATES)


def check_mixing(mixing: Part | kernels.Kernel | Config) -> Part:
    """A name of `MIXINGS`, or a template: an invertible layer that has not been built."""
    if isinstance(mixing, dict):
        mixing = keras.saving.deserialize_keras_object(mixing)
    if isinstance(mixing, kernels.Spectral | kernels.RelaxedCayley):
        layer = f"AuxReflection(kernel=kernels.{type(mixing).__name__}(…))"
        warnings.warn(f"A kernel as mixing is deprecated: give a layer, `{layer}`.", DeprecationWarning, stacklevel=4)
        return mixing
    if isinstance(mixing, str) and mixing in TEMPLATES:
        return mixing
    if isinstance(mixing, str) or not isinstance(mixing, keras.layers.Layer):
        raise ValueError(
            f"Unknown mixing of channels. Expected one of {list(MIXINGS)}, or an invertible Keras layer. Received: {mixing!r}"
        )
    return check_template(mixing, "mixing")


def mixing_template(
    mixing: Part | kernels.Kernel, seed: int, dtype: DType, start: type[OrthogonalMatrix] = FixedPointFree
) -> keras.layers.Layer:
    """The layer of one mixing, not built; by a name one that starts as the orthogonal map Q of the seed, the same for all.

        aux_factored         U g(Vᵀx), U and V orthogonal, g the reflection of diag(λ), κ < 2, started at UVᵀ = Q, λ = 1:
                             provably invertible
        aux_factored_right   g(Vᵀx), the same with U = I: half of the cost
        aux                  f(x) = H(Wx) x, W free, started at I − Q: no guarantee
        aux_spectral         f(Qx), Q fixed, W = I + ½ VVᵀ/σmax(VVᵀ) started at V = I, that is at −Q: the paper's provably
                             invertible one
        aux_relaxed_cayley   f(x), W = (S + K)⁻¹ with κ(S) < 2, started at I − Q: provably invertible
        householder          H(v₁)…H(v_c) x for c channels, started at Q
        conv                 W x, started at Q: the invertible 1×1 convolution of Kingma & Dhariwal
        aux_conv             B g(Vᵀx), B any matrix, V and g as in `aux_factored`, started at BVᵀ = Q: a reflection before the
                             convolution; g is provably invertible, B only as far as its condition number shows
        qr                   Q R x, Q of c reflections and R triangular with a positive diagonal, started at R = I
        aux_factored_qr      R f(x), f the map `aux_factored` and R as in `qr`, started at R = I: provably invertible
        fixed                Q x, not trained
        permutation          the channels in reverse, as between the couplings of NICE and RealNVP: no start, not trained

    A layer instead of a name is taken as it is.
    """
    q = start(seed)
    if isinstance(mixing, str):
        return TEMPLATES[mixing](q, dtype)
    if isinstance(mixing, kernels.Spectral):
        return _aux_spectral(q, dtype, mixing)
    if isinstance(mixing, kernels.RelaxedCayley):
        return AuxReflection(mixing, kernel_initializer=q, dtype=dtype)
    return as_template(mixing, dtype)


def as_template(layer: keras.layers.Layer, dtype: DType) -> keras.layers.Layer:
    """A copy of a layer given as a template, which must compute in the precision of the flow."""
    wanted = keras.dtype_policies.get(dtype)
    if layer.dtype_policy != wanted:
        raise ValueError(
            f"A flow computes in one precision. Expected a layer with dtype={wanted.name!r}. Received: '{layer.name}' with "
            f"dtype={layer.dtype_policy.name!r}"
        )
    return clone(layer)
