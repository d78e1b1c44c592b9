"""The Householder flow: T reflections of a vector, in directions that an encoder provides."""

from keras import ops

from keras_auxref.ops.amortised import prepare
from keras_auxref.ops.householder import householder
from keras_auxref.typing import Tensor


def householder_flow(z: Tensor, v: Tensor) -> Tensor:
    """T Householder reflections one after another, with directions for every vector of z.

        z′ = H(v_T) … H(v₁) z,      H(v) z = z − 2 v (vᵀz) / ‖v‖²,      and H(0) z = z

    The map is orthogonal: log|det ∂z′/∂z| = 0, and its inverse is the same with the directions in reverse order,
    `householder_flow(z, flip(v, axis=-2))`. It turns a Gaussian with a diagonal covariance into one with a full covariance.

    Args:
        z: Tensor of shape `(..., d)`.
        v: Tensor of shape `(..., T, d)`, T ≥ 0, whose axes before the last two broadcast against those of `z` before its last.

    Returns:
        A tensor of shape `(..., d)` and of the dtype of `z`. ‖z′‖ = ‖z‖.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import householder_flow
    >>> swap_then_flip = np.array([[1.0, -1.0], [1.0, 0.0]])
    >>> print(householder_flow(np.array([3.0, 4.0]), swap_then_flip).numpy())
    [-4.  3.]

    Reference: Tomczak & Welling, "Improving Variational Auto-Encoders using Householder Flow", 2016.
    """
    z, parameters, dtype = prepare(z, {"v": ("T", "d")}, v=v)
    for t in range(parameters["v"].shape[-2]):
        z = householder(parameters["v"][..., t, :], z)
    return ops.cast(z, dtype)
