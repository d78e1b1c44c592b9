"""The map between channels at every pixel: the 1×1 convolution of Glow and what replaces it."""

from collections.abc import Callable
from typing import Any

import keras

from keras_auxref import kernels
from keras_auxref.initializers import FixedPointFree, ReflectionOf
from keras_auxref.layers import AuxReflection, FactoredReflection, InvertibleDense, OrthogonalDense, Permutation, QRDense

Builder = Callable[[FixedPointFree, dict[str, Any]], list[keras.layers.Layer]]


def _aux_factored(start: FixedPointFree, common: dict[str, Any]) -> list[keras.layers.Layer]:
    return [FactoredReflection(kernel_initializer=start, **common)]


def _aux_factored_right(start: FixedPointFree, common: dict[str, Any]) -> list[keras.layers.Layer]:
    return [FactoredReflection(sides="right", kernel_initializer=start, **common)]


def _aux(start: FixedPointFree, common: dict[str, Any]) -> list[keras.layers.Layer]:
    return [AuxReflection(kernel_initializer=ReflectionOf(start), track_branch=True, **common)]


def _aux_spectral(
    start: FixedPointFree, common: dict[str, Any], kernel: kernels.Kernel | None = None
) -> list[keras.layers.Layer]:
    # Such a W cannot start at an orthogonal map: the paper puts a fixed one before it, and starts at V = I.
    name, rest = common["name"], {key: value for key, value in common.items() if key != "name"}
    return [
        InvertibleDense(kernel_initializer=start, trainable=False, name=f"{name}_fixed", **rest),
        AuxReflection(kernel=kernel or kernels.Spectral(0.5), kernel_initializer="identity", **common),
    ]


def _aux_relaxed_cayley(
    start: FixedPointFree, common: dict[str, Any], kernel: kernels.Kernel | None = None
) -> list[keras.layers.Layer]:
    return [AuxReflection(kernel=kernel or "relaxed_cayley", kernel_initializer=start, **common)]


def _householder(start: FixedPointFree, common: dict[str, Any]) -> list[keras.layers.Layer]:
    return [OrthogonalDense("householder", kernel_initializer=ReflectionOf(start), **common)]


def _conv(start: FixedPointFree, common: dict[str, Any]) -> list[keras.layers.Layer]:
    return [InvertibleDense(kernel_initializer=start, **common)]


def _qr(start: FixedPointFree, common: dict[str, Any]) -> list[keras.layers.Layer]:
    return [QRDense(kernel_initializer=start, **common)]


def _aux_factored_qr(start: FixedPointFree, common: dict[str, Any]) -> list[keras.layers.Layer]:
    return [QRDense("factored", kernel_initializer=start, **common)]


def _fixed(start: FixedPointFree, common: dict[str, Any]) -> list[keras.layers.Layer]:
    return [InvertibleDense(kernel_initializer=start, trainable=False, **common)]


def _permutation(start: FixedPointFree, common: dict[str, Any]) -> list[keras.layers.Layer]:
    return [Permutation(**common)]


_BUILDERS: dict[str, Builder] = {
    "aux_factored": _aux_factored,
    "aux_factored_right": _aux_factored_right,
    "aux": _aux,
    "aux_spectral": _aux_spectral,
    "aux_relaxed_cayley": _aux_relaxed_cayley,
    "householder": _householder,
    "conv": _conv,
    "qr": _qr,
    "aux_factored_qr": _aux_factored_qr,
    "fixed": _fixed,
    "permutation": _permutation,
}
MIXINGS = tuple(_BUILDERS)


def check_mixing(mixing: Any) -> Any:
    """A name of `MIXINGS`, or a kernel of the provably invertible families."""
    if isinstance(mixing, dict):
        mixing = kernels.get(mixing)
    if isinstance(mixing, kernels.Spectral | kernels.RelaxedCayley) or (isinstance(mixing, str) and mixing in _BUILDERS):
        return mixing
    raise ValueError(
        f"Unknown mixing of channels. Expected one of {list(MIXINGS)}, a `kernels.Spectral` or a `kernels.RelaxedCayley`. "
        f"Received: {mixing!r}"
    )


def build_mixing(mixing: Any, seed: int, name: str, dtype: Any) -> list[keras.layers.Layer]:
    """The layers of one mixing, starting as the orthogonal map of the seed, the same for all (`aux_spectral`: as its negative).

        aux_factored         U g(Vᵀx), U and V orthogonal, g the reflection of diag(λ), κ < 2, started at UVᵀ = Q, λ = 1:
                             provably invertible
        aux_factored_right   g(Vᵀx), the same with U = I: half of the cost
        aux                  f(x) = H(Wx) x, W free, started at I − Q: no guarantee
        aux_spectral         f(Qx), Q fixed, W = I + ½ VVᵀ/σmax(VVᵀ) started at V = I: the paper's provably invertible one
        aux_relaxed_cayley   f(x), W = (S + K)⁻¹ with κ(S) < 2, started at I − Q: provably invertible
        householder          H(v₁)…H(v_c) x for c channels, started at Q
        conv                 W x, started at Q: the invertible 1×1 convolution of Kingma & Dhariwal
        qr                   Q R x, Q of c reflections and R triangular with a positive diagonal, started at R = I
        aux_factored_qr      R f(x), f the map `aux_factored` and R as in `qr`, started at R = I: provably invertible
        fixed                Q x, not trained
        permutation          the channels in reverse, as between the couplings of NICE and RealNVP: no start, not trained

    A `kernels.Spectral` or `kernels.RelaxedCayley` instance in the place of a name takes that kernel, with its settings.
    """
    start, common = FixedPointFree(seed), {"name": name, "dtype": dtype}
    if isinstance(mixing, kernels.Spectral):
        return _aux_spectral(start, common, mixing)
    if isinstance(mixing, kernels.RelaxedCayley):
        return _aux_relaxed_cayley(start, common, mixing)
    return _BUILDERS[mixing](start, common)


def supports_xla(mixing: Any) -> bool:
    """False where XLA lacks the eigendecomposition that makes the log-determinant cheap."""
    return not (isinstance(mixing, kernels.RelaxedCayley) or mixing in ("aux", "aux_relaxed_cayley"))
