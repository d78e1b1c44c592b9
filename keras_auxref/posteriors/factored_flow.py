"""Amortised auxiliary reflections as a Keras layer."""

import math
from typing import Unpack

import keras

from keras_auxref.layers.factored_reflection import checked_margin
from keras_auxref.ops import backend
from keras_auxref.ops.factored_flow import factored_flow_and_log_det, factored_flow_inverse
from keras_auxref.package import PACKAGE
from keras_auxref.posteriors.householder_flow import HouseholderFlow
from keras_auxref.typing import Config, LayerArguments, Shape, Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class FactoredFlow(HouseholderFlow):
    """T auxiliary reflections of z, in directions that depend on z itself and on an encoder.

        z_t = g(H(v_t) z_{t−1}),      g(a) = (cλ_t − 1) ∘ a,      c = 2 Σ λᵢaᵢ² / Σ λᵢ²aᵢ²
        v₁ = A₁h + a₁,   v_t = A_t v_{t−1} + a_t,      λ_t = 2^(½ (1 − margin) tanh(B_t h + β_t))

    h is the context. With W = H(v) diag(λ) H(v) a step is −H(v) H(Wz) z, while that of a Householder flow is H(v) z: here
    the direction depends on z, as in the paper. The flow starts as a Householder flow, at λ = 1. By construction max λ / min λ <
    2, so every step is a bijection that preserves norms, for every output of the encoder. log|det ∂z′/∂z| is not 0, and the
    posterior is no longer Gaussian.

    Args:
        steps: The number T of reflections; 0 is the identity.
        margin: Number in (0, 1): the distance kept from κ = 2, see `FactoredReflection`.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: z of shape `(batch, d)`, or `(samples, batch, d)` for several samples each.
        context: h of shape `(batch, features)`.

    Output: z_T, of the shape of z.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.posteriors import FactoredFlow
    >>> flow, z, h = FactoredFlow(steps=3), np.ones((2, 4), "float32"), np.ones((2, 16), "float32")
    >>> moved = flow(z, h)
    >>> np.allclose(flow.inverse(moved, h), z, atol=1e-5)
    True

    Reference: Mathiasen & Hvilshøj, "One Reflection Suffice", 2020, section "Similar Ideas".
    """

    def __init__(self, steps: int = 4, margin: float = 0.1, **kwargs: Unpack[LayerArguments]) -> None:
        super().__init__(steps, **kwargs)
        self.margin = checked_margin(margin)

    def build_parameters(self, d: int, context_shape: Shape) -> None:
        super().build_parameters(d, context_shape)
        self.size = d
        self.exponents = self.linear(self.steps * d, "exponents", context_shape, kernel_initializer="zeros")

    def parameters(self, context: Tensor) -> dict[str, Tensor]:
        rho = keras.ops.reshape(self.exponents(context), (-1, self.steps, self.size))
        if keras.backend.standardize_dtype(rho.dtype) != "float64":
            rho = keras.ops.cast(rho, "float32")  # the proof needs float32 at least
        reach = 0.5 * (1 - self.margin) * math.log(2)
        return {**super().parameters(context), "eigenvalues": keras.ops.exp(reach * backend.tanh(rho))}

    def transform(self, z: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return factored_flow_and_log_det(z, **parameters)

    def invert(self, z: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        return factored_flow_inverse(z, **parameters, condition=2 ** (1 - self.margin))

    def get_config(self) -> Config:
        return {**super().get_config(), "margin": self.margin}
