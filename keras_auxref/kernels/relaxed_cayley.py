"""The sharp invertible family: W = (S + K)⁻¹ with κ(S) < 2 and any skew K."""

from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from keras_auxref.certificate import condition_for
from keras_auxref.initializers import orthogonal_matrix, orthogonal_start
from keras_auxref.kernels.base import Kernel, require_alone, require_room, shift_by_rounding, wide
from keras_auxref.kernels.norms import shrink_to, slack
from keras_auxref.ops.rows import dtype_of
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class RelaxedCayley(Kernel):
    """W = (S + K)⁻¹, S = ½(I + B̃) symmetric with ‖B̃‖₂ ≤ β = (1 − margin)/3 < 1/3, K skew.

    Then κ(S) ≤ (1 + β)/(1 − β) < 2 and f is a bijection for every K. B̃ = B · min(1, β/‖B‖₂) for the symmetric part B of one
    weight matrix, K the skew part of another with ‖K‖₂ ≤ `max_skew`. With B = 0, W = I − U and f(x) = U x for the orthogonal
    U = I − (½I + K)⁻¹, the Cayley transform of K: the family contains every orthogonal map without eigenvalue 1, and with
    `margin=1` exactly these.

    `kernel_initializer` means the orthogonal start Q, by default random. An orthogonal matrix without eigenvalue 1 has
    determinant (−1)ᵈ: if det Q differs, the sign of the first column of Q is flipped. Eigenvalues of Q within
    1/`max_skew` radians of 1 are moved to that distance.

    Args:
        margin: Number in (0, 1]: the distance kept from the bound, which has to cover rounding. By default 0.05.
        max_skew: Bound on ‖K‖₂. With the default, 50, the certificate holds in float32; float64 allows more. With `lipschitz` the
            default is 20: rounding of W moves S by about ε √d ‖K‖₂².
        lipschitz: Number L in (1, 3), instead of `margin`: f increases no distance by more than the factor L. This sets
            β = (L − 1)/(L + 3), minus room for rounding. The certificate then has `lipschitz` ≤ L for all weights. An L
            near 1 needs float64 or a smaller `max_skew`. W is computed in float64 and rounded.

    Example:
    >>> import numpy as np
    >>> from keras_auxref import AuxReflection
    >>> from keras_auxref.kernels import RelaxedCayley
    >>> layer, x = AuxReflection(kernel=RelaxedCayley(margin=0.1)), np.ones((2, 4), "float32")
    >>> np.allclose(layer.inverse(layer(x)), x, atol=1e-4), layer.certificate().invertible
    (True, True)
    """

    promises = True
    weight_names = ("symmetric", "skew")

    def __init__(self, margin: float | None = None, max_skew: float | None = None, lipschitz: float | None = None) -> None:
        self.lipschitz = lipschitz
        if max_skew is None:
            max_skew = 50.0 if lipschitz is None else 20.0
        if lipschitz is not None:
            require_alone("margin", margin, lipschitz)
            condition = condition_for(lipschitz)
            margin = 1 - 3 * (condition - 1) / (condition + 1)
        margin = 0.05 if margin is None else margin
        if not 0 < margin <= 1:
            raise ValueError(f"`margin` must lie in (0, 1]. Expected 0 < margin <= 1. Received: {margin}")
        if not max_skew > 0:
            raise ValueError(f"`max_skew` must be positive. Received: {max_skew}")
        self.margin, self.max_skew = float(margin), float(max_skew)

    def default_initializer(self) -> keras.initializers.Initializer:
        return keras.initializers.Orthogonal()

    def initial_weights(self, d: int, initializer: Callable[..., Tensor], dtype: str) -> dict[str, Tensor]:
        self._beta(d, dtype)
        start = orthogonal_start(initializer)
        q = orthogonal_matrix(initializer if start is None else start, d, dtype)
        if np.linalg.slogdet(q)[0] != (-1) ** d:
            q[:, 0] = -q[:, 0]
        k = _skew_of(q, 0.99 * self.max_skew / slack(d) ** 0.5)  # so that the bound on ‖K‖₂ does not change the rest
        return {
            "symmetric": ops.zeros((d, d), dtype=dtype),
            "skew": ops.convert_to_tensor(k, dtype=dtype),
        }

    def _beta(self, d: int, dtype: str) -> float:
        """β, with room for the rounding of W and of its certificate where a Lipschitz constant is promised."""
        beta = (1 - self.margin) / 3
        if self.lipschitz is None:
            return beta
        # ‖W‖ ≤ 1/λmin(S), ‖W⁻¹‖ ≤ λmax(S) + ‖K‖; and S = ½(I + B̃) moves by half of what B̃ does.
        room = 2 * shift_by_rounding(d, dtype, 2 / (1 - beta), (1 + beta) / 2 + self.max_skew)
        require_room(beta > room, self.lipschitz, 1 + 4 * room / (1 - room) if room < 1 else 3, dtype)
        return beta - room

    def __call__(self, weights: dict[str, Tensor]) -> Tensor:
        b, g = weights["symmetric"], weights["skew"]
        dtype, beta = dtype_of(b), self._beta(b.shape[0], dtype_of(b))
        if self.lipschitz is not None:
            b, g = wide(b), wide(g)
        identity = ops.eye(b.shape[0], dtype=b.dtype)
        # Halving first: the sum of two entries near the largest float would overflow.
        s = 0.5 * (identity + shrink_to(0.5 * b + 0.5 * ops.transpose(b), beta))
        k = shrink_to(0.5 * g - 0.5 * ops.transpose(g), self.max_skew)
        m = s + k
        # `inv` may raise on NaN in the middle of training: give it the identity, and bring the NaN back afterwards.
        finite = ops.all(ops.isfinite(m))
        return ops.cast(ops.where(finite, ops.inv(ops.where(finite, m, identity)), float("nan")), dtype)

    def get_config(self) -> Config:
        margin = self.margin if self.lipschitz is None else None
        return {"margin": margin, "max_skew": self.max_skew, "lipschitz": self.lipschitz}


def _skew_of(q: np.ndarray, bound: float) -> np.ndarray:
    """The skew K with I − (½I + K)⁻¹ = Q, its singular values capped at `bound`.

    K has the eigenvectors of Q and the eigenvalues ½i cot(θ/2) for its angles θ, so the cap moves the planes with |θ| < 1/bound
    and nothing else. The eigenspace of 1, which has even dimension by the determinant of Q, is paired up into such planes.
    """
    # Q is normal: a generic combination of its Hermitian parts has the same eigenvectors, and `eigh` keeps them orthonormal
    # even where eigenvalues coincide.
    _, vectors = np.linalg.eigh((q + q.T) / 2 + 0.618033988749895 * (q - q.T) / 2j)
    angles = np.angle(np.einsum("ji,jk,ki->i", vectors.conj(), q, vectors))
    fixed = np.abs(angles) < 1e-6
    moving = vectors[:, ~fixed]
    k = np.real((moving * (1j * np.clip(0.5 / np.tan(angles[~fixed] / 2), -bound, bound))) @ moving.conj().T)
    if fixed.any():
        _, basis = np.linalg.eigh(np.real(vectors[:, fixed] @ vectors[:, fixed].conj().T))
        a, b = basis[:, -fixed.sum() :: 2], basis[:, -fixed.sum() + 1 :: 2]
        k += bound * (a @ b.T - b @ a.T)
    return (k - k.T) / 2
