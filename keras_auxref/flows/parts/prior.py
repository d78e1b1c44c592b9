"""A learned Gaussian prior, written as the last layer of a flow: its output z is standard normal, its input is not."""

from typing import Unpack

import keras

from keras_auxref.flows.parts.affine_coupling import AffineCoupling
from keras_auxref.invertible import Invertible
from keras_auxref.layers.checks import last_axis
from keras_auxref.ops.coupling import scaled, scaled_inverse
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, DType, LayerArguments, Shape, Tensor

BOUND = 2.0
"""On |log σ| of a learned prior."""


@keras.saving.register_keras_serializable(PACKAGE)
class GaussianPrior(Invertible, keras.layers.Layer):
    """z = (x + t)·s for every entry of an event of rank 3: x then has the density N(−t, diag(1/s²)) where z ~ N(0, I).

        (t, r) = P + context · K        log s = 2 tanh(r/2)        log|det ∂z/∂x| = Σ log s

    P has two numbers for every entry; K, where there is a context, two for every channel, the same at all pixels. All start at
    zero, so the layer starts as the identity.

    Args:
        context: The number of entries of a context, or None.
        **kwargs: Arguments of `keras.layers.Layer`.
    """

    event_ndims = 3
    cheap_log_det = True

    def __init__(self, context: int | None = None, **kwargs: Unpack[LayerArguments]) -> None:
        super().__init__(**kwargs)
        self.context = context

    def build(self, input_shape: Shape) -> None:
        pixels, channels = input_shape[1:-1], last_axis(self, input_shape)
        self.parameters = self.add_weight(name="parameters", shape=(*pixels, 2 * channels), initializer="zeros")
        if self.context:
            self.kernel = self.add_weight(name="kernel", shape=(self.context, 2 * channels), initializer="zeros")

    def forward_and_log_det(
        self, x: Tensor, training: bool | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        z, log_scale = scaled(x, self._said(context), BOUND)
        return z, keras.ops.sum(keras.ops.zeros_like(x) + log_scale, axis=(1, 2, 3))

    def inverse(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        """x = z/s − t."""
        return scaled_inverse(self._tensor(y, "inverse"), self._said(context), BOUND)[0]

    def _said(self, context: Tensor | None) -> Tensor:
        parameters = keras.ops.cast(self.parameters, self.compute_dtype)
        if not self.context:
            return parameters
        said = keras.ops.matmul(context, keras.ops.cast(self.kernel, self.compute_dtype))
        return parameters + said[:, None, None, :]

    def get_config(self) -> Config:
        return {**super().get_config(), "context": self.context}


def split_prior(channels: int, context: int | None, dtype: DType) -> AffineCoupling:
    """The prior of the half of the channels that leaves, given the half that stays: a 3×3 convolution that starts at zero.

    With mean μ and deviation σ by that convolution, z = (x_b − μ)/σ is an affine coupling with t = −μ and s = 1/σ.
    """
    network = keras.layers.Conv2D(channels, 3, padding="same", kernel_initializer="zeros", dtype=dtype, name="network")
    return AffineCoupling(network, bound=BOUND, context=context, dtype=dtype)
