"""The Householder flow as a Keras layer."""

from typing import Any

import keras

from keras_auxref.ops.householder_flow import householder_flow
from keras_auxref.package import PACKAGE
from keras_auxref.posteriors.amortised import AmortisedFlow
from keras_auxref.typing import Shape, Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class HouseholderFlow(AmortisedFlow):
    """T Householder reflections of z in directions that come from an encoder: log|det ∂z′/∂z| = 0.

        z′ = H(v_T) … H(v₁) z,      v₁ = A₁h + a₁,      v_t = A_t v_{t−1} + a_t

    h is the context. It turns a posterior N(μ, diag σ²) into a Gaussian with a full covariance.

    Args:
        steps: The number T of reflections; 0 is the identity.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: z of shape `(batch, d)`, or `(samples, batch, d)` for several samples each.
        context: h of shape `(batch, features)`.

    Output: z′, of the shape of z.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.posteriors import HouseholderFlow
    >>> flow, z, h = HouseholderFlow(steps=3), np.ones((2, 4), "float32"), np.ones((2, 16), "float32")
    >>> moved = flow(z, h)
    >>> np.allclose(flow.inverse(moved, h), z, atol=1e-5)
    True

    Reference: Tomczak & Welling, "Improving Variational Auto-Encoders using Householder Flow", 2016.
    """

    def build_parameters(self, d: int, context_shape: Shape) -> None:
        shapes = [context_shape, *[(context_shape[0], d)] * (self.steps - 1)]
        self.directions = [self.linear(d, f"direction_{t + 1}", shape) for t, shape in enumerate(shapes)]

    def parameters(self, context: Tensor) -> dict[str, Tensor]:
        found: list[Any] = []
        for layer in self.directions:
            found.append(layer(found[-1] if found else context))
        return {"v": keras.ops.stack(found, axis=-2)}

    def transform(self, z: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return householder_flow(z, parameters["v"]), keras.ops.zeros_like(z[..., 0])

    def invert(self, z: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        return householder_flow(z, keras.ops.flip(parameters["v"], axis=-2))
