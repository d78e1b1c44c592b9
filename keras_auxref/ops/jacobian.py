"""The Jacobian of the auxiliary reflection (paper, Theorem 3)."""

from typing import Any

from keras import ops

from keras_auxref.ops._checks import as_tensor, check_vectors_and_matrix
from keras_auxref.ops.householder import largest
from keras_auxref.ops.reflect import vanishes


def jacobian(x: Any, w: Any) -> Any:
    """The d×d Jacobian of f(x) = H(Wx) x at every vector on the last axis of x.

        J = H(u) A − 2 u vᵀ / ‖u‖²,      u = W x,   v = Wᵀx,   c = 2 uᵀx / ‖u‖²,   A = I − c W.

    In general J is not orthogonal, although f preserves norms. Where W x = 0, J = I. Runs on every Keras backend.

    Args:
        x: Tensor of shape `(..., d)`.
        w: Tensor of shape `(d, d)`.

    Returns:
        A tensor of shape `(..., d, d)`; entry `[..., i, j]` is ∂f_i/∂x_j.
    """
    x, w = as_tensor(x, "x"), as_tensor(w, "w")
    check_vectors_and_matrix(x, w, "x")
    # J ignores the lengths of x and of W: scale both to 1, so that nothing over- or underflows.
    size, weight = (ops.stop_gradient(largest(t, axis)) for t, axis in ((x, -1), (w, None)))
    x, w = x / ops.where(size > 0, size, 1), w / ops.where(weight > 0, weight, 1)
    u, v = ops.matmul(x, ops.transpose(w)), ops.matmul(x, w)
    magnitude = largest(ops.stop_gradient(u))
    dead = vanishes(u, ops.stop_gradient(x), ops.stop_gradient(w), magnitude)
    one = ops.ones_like(magnitude)
    scale = ops.where(dead, 0 * one, 1 / ops.where(dead, one, magnitude))
    # With û = u r the products u vᵀ/‖u‖² become û (r v)ᵀ/‖û‖²; r = 0 on dead rows leaves J = I.
    direction, v = u * scale, v * scale
    factor = 2 / ops.where(dead, one, ops.sum(ops.square(direction), axis=-1, keepdims=True))
    c = ops.sum(direction * x, axis=-1, keepdims=True) * factor * scale
    a = ops.eye(w.shape[0], dtype=w.dtype) - c[..., None] * w
    row = ops.matmul(ops.expand_dims(direction, -2), a)[..., 0, :] + v
    return a - (factor * direction)[..., :, None] * row[..., None, :]
