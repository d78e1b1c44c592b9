"""Variational dequantisation: the noise within every value of a pixel, drawn from a distribution that is learned."""

from typing import Any, Unpack

import keras

from keras_auxref.flows.parts import Permutation, Squeeze
from keras_auxref.flows.parts.coupling import default_network
from keras_auxref.layers.checks import last_axis, require_precision
from keras_auxref.ops.checks import whole_number
from keras_auxref.ops.coupling import checked_bound, couple, coupling_log_det, scaled
from keras_auxref.ops.rows import epsilon
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, LayerArguments, Shape, Tensor

DEQUANTISATIONS = ("uniform", "variational")


def check_dequantisation(dequantisation: str) -> str:
    """A name of `DEQUANTISATIONS`."""
    if isinstance(dequantisation, str) and dequantisation in DEQUANTISATIONS:
        return dequantisation
    raise ValueError(f"Unknown dequantisation. Expected one of {list(DEQUANTISATIONS)}. Received: {dequantisation!r}")


@keras.saving.register_keras_serializable(PACKAGE)
class VariationalDequantisation(keras.layers.Layer):
    """Noise u ~ q(u|k) in (0, 1) for every entry of an image k, from uniform noise v: a small conditional flow.

        u = σ(T(σ⁻¹(v); k))      log q(u|k) = −log|det ∂u/∂v|

    T squeezes 2×2 pixels into channels and applies affine couplings, with the channels reversed after each. Their networks see
    the image and one half of the noise. T starts as the identity: u = v is uniform and log q = 0. The flow of Ho et al.
    starts from normal noise; that of σ⁻¹(v) is logistic instead, so that uniform dequantisation belongs to the family.

    For a density p of continuous images, P(k) = ∫ p over the interval of k, and Jensen's inequality gives the bound

        −log P(k) ≤ E_q [log q(u|k) − log p(k + u)]

    in units in which a value has width 1. Both terms have gradients for the weights of q, also through u.

    Args:
        hidden: Channels of the hidden layers of the networks.
        steps: The number of couplings; each moves one half of the channels.
        bound: The bound on |log s| of each coupling.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, …

    Call arguments:
        images: Tensor of shape `(batch, height, width, channels)`, values in [0, 1]; height and width even.
        noise: Tensor of that shape, uniform in [0, 1).

    Output: u, of that shape, and log q(u|k), of shape `(batch,)`.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.flows import VariationalDequantisation
    >>> layer, v = VariationalDequantisation(hidden=4), np.full((2, 4, 4, 3), 0.25, "float32")
    >>> u, log_q = layer(np.zeros((2, 4, 4, 3), "float32"), v)
    >>> bool(np.allclose(u, v, atol=1e-6)), bool(log_q[0] == 0)
    (True, True)

    Reference: Ho, Chen, Srinivas, Duan & Abbeel, "Flow++: Improving Flow-Based Generative Models with Variational
    Dequantization and Architecture Design", ICML 2019.
    """

    def __init__(self, hidden: int = 64, steps: int = 2, bound: float = 2.0, **kwargs: Unpack[LayerArguments]) -> None:
        super().__init__(**kwargs)
        require_precision(self)
        self.hidden, self.steps = whole_number("hidden", hidden), whole_number("steps", steps)
        self.bound = checked_bound(bound)
        self.squeeze = Squeeze(name="squeeze", dtype=self.dtype_policy)
        self.reverse = Permutation(name="reverse", dtype=self.dtype_policy)
        self.networks: list[Any] = []

    def build(self, images_shape: Shape, noise_shape: Shape | None = None) -> None:
        self.squeeze.build(images_shape)
        shape = tuple(self.squeeze.compute_output_shape(images_shape))
        self.reverse.build(shape)
        d, name = last_axis(self, shape), type(self).__name__
        seen, said = (*shape[:-1], d // 2 + d), 2 * (d - d // 2)
        self.networks = [default_network(seen, said, self.hidden, self.dtype_policy, name) for _ in range(self.steps)]

    def call(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        # The draws are multiples of ε: half of one more, and neither 0 nor 1 is among them.
        v = noise + epsilon(self.compute_dtype) / 2
        start = keras.ops.log(v) - keras.ops.log1p(-v)
        seen, x = self.squeeze(2 * images - 1), self.squeeze(start)
        log_det: Any = 0.0
        for network in self.networks:
            x, log_scale = couple(x, _beside(seen, network), self._move)
            x, log_det = self.reverse(x), log_det + coupling_log_det(log_scale, 3)
        if self.steps % 2:
            x = self.reverse(x)
        end = self.squeeze.inverse(x)
        change = coupling_log_det(_log_slope(end) - _log_slope(start), 3)  # of σ behind T, and of σ⁻¹ before it
        return keras.ops.sigmoid(end), -(log_det + change)

    def _move(self, b: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return scaled(b, parameters, self.bound)

    def compute_output_shape(self, images_shape: Shape, noise_shape: Shape | None = None) -> tuple[Shape, Shape]:
        return images_shape, (images_shape[0],)

    def get_config(self) -> Config:
        return {**super().get_config(), "hidden": self.hidden, "steps": self.steps, "bound": self.bound}


def _beside(seen: Tensor, network: keras.layers.Layer) -> keras.layers.Layer:
    """The network as a function of one half of the noise, with the image beside it."""
    return lambda a: network(keras.ops.concatenate([a, seen], axis=-1))


def _log_slope(x: Tensor) -> Tensor:
    """log σ′(x) = log σ(x) + log σ(−x)."""
    return keras.ops.log_sigmoid(x) + keras.ops.log_sigmoid(-x)
