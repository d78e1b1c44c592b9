"""The Jacobian of the auxiliary reflection at a point (paper, Theorem 3), without forming it.

    J = H(u) N,      N = A + 2 u vᵀ/‖u‖²,      A = I − c W,      u = W x,   v = Wᵀx,   c = 2 uᵀx/‖u‖².

|det J| = |det N|, and everything else that flows need is written in terms of N⁻¹. There are three ways to compute it:
`DiagonalPoint` and `PairedPoint` (`point_basis.py`) in a basis of W, and `RowPoint` (`point_rows.py`) without one.
`at_points.py` chooses for every row of a batch.
"""

from typing import NamedTuple, Protocol

from keras import ops

from keras_auxref.ops.reflect import Reflection
from keras_auxref.ops.rows import row_dot
from keras_auxref.typing import Tensor


class Point(Protocol):
    """N = I − cW + β u vᵀ, β = 2/‖u‖², for every row of a batch, for W and x with entries of order 1.

    On null rows β = 0 and c = 0, so that N = I and they need no special treatment.
    """

    forward: Reflection
    w: Tensor
    beta: Tensor
    log_abs_det: Tensor

    def quantities(self) -> "Quantities":
        """The terms of the gradient of log|det N|."""

    def solve(self, z: Tensor) -> Tensor:
        """N⁻¹z."""

    def solve_transposed(self, z: Tensor) -> Tensor:
        """N⁻ᵀz."""

    def pull_back(self, weight: Tensor) -> Tensor:
        """Σ weight · N⁻ᵀ over the batch, (d, d)."""


class Quantities(NamedTuple):
    """p = N⁻¹u, t = N⁻ᵀv, W p, q = vᵀN⁻¹u and tr(N⁻¹W)."""

    p: Tensor
    t: Tensor
    wp: Tensor
    q: Tensor
    trace: Tensor


def jacobian_solve(point: Point, r: Tensor) -> Tensor:
    """J⁻¹r = N⁻¹ H(u) r."""
    return point.solve(_reflected(point, r))


def jacobian_solve_transposed(point: Point, g: Tensor) -> Tensor:
    """J⁻ᵀg = H(u) N⁻ᵀg."""
    return _reflected(point, point.solve_transposed(g))


def _reflected(point: Point, r: Tensor) -> Tensor:
    """H(u) r, and r on null rows."""
    forward = point.forward
    live = ops.cast(forward.scale != 0, r.dtype)
    return r - forward.direction * (live * forward.factor * row_dot(forward.direction, r))
