"""The Jacobian of the auxiliary reflection as a matrix (paper, Theorem 3).

Almost nothing needs it as a matrix: the log-determinant and the inverse use `point.py`, which solves with it and never forms it.
"""

from keras import ops

from keras_auxref.ops.checks import as_tensor, check_vectors_and_matrix
from keras_auxref.ops.reflect import Reflection, reflection
from keras_auxref.ops.rows import matmul, size_of
from keras_auxref.typing import Tensor


def jacobian(x: Tensor, w: Tensor) -> Tensor:
    """The d×d Jacobian of f(x) = H(Wx) x at every vector on the last axis of x.

        J = H(u) A − 2 u vᵀ / ‖u‖²,      u = W x,   v = Wᵀx,   c = 2 uᵀx / ‖u‖²,   A = I − c W.

    In general J is not orthogonal, although f preserves norms. Where W x = 0, J = I. Runs on every Keras backend.

    Args:
        x: Tensor of shape `(..., d)`.
        w: Tensor of shape `(d, d)`.

    Returns:
        A tensor of shape `(..., d, d)`; entry `[..., i, j]` is ∂f_i/∂x_j.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import jacobian, reflect
    >>> x, w = np.array([3.0, 4.0]), np.diag([1.0, 1.5])
    >>> np.allclose(jacobian(x, w) @ x[:, None], reflect(x, w)[:, None])  # f is homogeneous: J x = f(x)
    True
    """
    x, w = as_tensor(x, "x"), as_tensor(w, "w")
    check_vectors_and_matrix(x, w, "x")
    # J does not depend on the scale of x and W: scale both to 1, so that nothing over- or underflows.
    w = w / size_of(w, axis=None)
    forward = reflection(x / size_of(x), w)
    direction = ops.cast(forward.direction, w.dtype)
    a = ops.eye(w.shape[0], dtype=w.dtype) - ops.cast(forward.coefficient, w.dtype)[..., None] * w
    # H(u)(A + u vᵀ) = A − û (2 ûᵀA/‖û‖² + v)ᵀ, where H(u)u = −u
    row = matmul(direction[..., None, :], a)[..., 0, :] * ops.cast(forward.factor, w.dtype) + _companion(forward, w)
    return a - direction[..., :, None] * row[..., None, :]


def _companion(forward: Reflection, w: Tensor) -> Tensor:
    """The v̂ with û v̂ᵀ = 2 u vᵀ/‖u‖², (n, d): 0 on null rows."""
    dtype = w.dtype
    return ops.cast(forward.factor * forward.scale, dtype) * matmul(forward.unit, w)
