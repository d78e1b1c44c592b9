"""The auxiliary reflection f(x) = H(Wx) x (paper, section 1)."""

import functools
import math
from typing import Any

import keras
from keras import ops

from keras_auxref.ops._checks import HALF, as_tensor, check_vectors_and_matrix, is_symbolic
from keras_auxref.ops._rows import epsilon, map_rows
from keras_auxref.ops.householder import Reflection, largest, reflect_along


def reflect(x: Any, w: Any) -> Any:
    """The auxiliary reflection of every vector on the last axis of x.

        f(x) = H(Wx) x = x − c u,      u = W x,      c = 2 uᵀx / ‖u‖².

    f preserves norms, f(αx) = α f(x), and W = I − U gives f(x) = U x for every orthogonal U (Theorem 1 of the paper). Where
    W x = 0 the value that keeps Theorem 1 true is f(x) = x, with the identity as gradient for x and zero for W; "zero" is
    numerical, max|u| ≤ 4 ε √d max|W| max|x|. Runs on every Keras backend; on TensorFlow the gradient is in closed form, one
    matrix product forward and two backward, as for a Dense layer, and second derivatives are exact.

    Args:
        x: Tensor of shape `(..., d)`.
        w: Tensor of shape `(d, d)`, the paper's W: a row batch computes `x @ Wᵀ`.

    Returns:
        A tensor of the shape and dtype of `x`. For half-precision dtypes the reductions are in float32.

    Example:
    >>> import numpy as np
    >>> swap = np.array([[0.0, 1.0], [1.0, 0.0]])
    >>> print(reflect(np.array([3.0, 4.0]), np.eye(2) - swap).numpy())
    [4. 3.]
    """
    x, w = as_tensor(x, "x"), as_tensor(w, "w")
    check_vectors_and_matrix(x, w, "x")
    if keras.backend.backend() == "tensorflow" and not is_symbolic(x, w):
        return map_rows(lambda rows: _closed_form()(rows, w), x)
    return reflection(x, w).y


def vanishes(u: Any, x: Any, w: Any, magnitude: Any) -> Any:
    """Where W x is zero up to rounding.

    A NaN must not pass for a vector that W annihilates. It compares false; and the maximum of nothing but NaN, for which
    TensorFlow may give −∞, is told by its sign.
    """
    dtype = keras.backend.standardize_dtype(w.dtype)
    if dtype in HALF:  # such a product is accumulated in float32 and rounded once: its error does not grow with d
        tolerance = max(4 * epsilon("float32") * math.sqrt(w.shape[0]), epsilon(dtype))
    else:
        tolerance = 4 * epsilon(dtype) * math.sqrt(w.shape[0])
    bound = tolerance * largest(w, axis=None)
    return ops.logical_and(magnitude >= 0, magnitude <= ops.cast(bound, u.dtype) * largest(x))


def annihilated(x: Any, w: Any) -> Any:
    """Where W x = 0, for rows x: shape (n, 1)."""
    x, w = ops.stop_gradient(x), ops.stop_gradient(w)
    u = ops.matmul(x, ops.transpose(w))
    return vanishes(u, x, w, largest(u))


def reflection(x: Any, w: Any) -> Reflection:
    """f(x) and what its gradient needs, differentiable by any backend."""
    dtype = keras.backend.standardize_dtype(x.dtype)
    u = ops.matmul(x, ops.transpose(w))
    if dtype in HALF:
        u, x = ops.cast(u, "float32"), ops.cast(x, "float32")
    magnitude = largest(ops.stop_gradient(u))
    dead = vanishes(u, ops.stop_gradient(x), ops.stop_gradient(w), magnitude)
    result = reflect_along(u, x, magnitude, dead)
    return result._replace(y=ops.cast(result.y, dtype))


def coefficient(x: Any, w: Any) -> Any:
    """c(x) = 2 uᵀx/‖u‖², u = W x, on the last axis of x: f(x) = (I − cW) x. 0 where W x = 0. Shape `(...,)`."""
    result = reflection(x, w)
    return ops.cast((result.coefficient * result.scale)[..., 0], x.dtype)


def central_coefficient(w: Any) -> Any:
    """2 tr W/‖W‖²_F, around which c(x) lies: the ratio of its means over all directions of x, and c itself for W = I − U."""
    size = largest(w, axis=None)
    w = w / ops.where(size > 0, size, 1)
    squared = ops.sum(ops.square(w))
    return 2 * ops.trace(w) / ops.where(squared > 0, squared * size, 1)


@functools.cache
def _closed_form() -> Any:
    """f on rows, with the vector-Jacobian product in closed form, for TensorFlow.

    For a cotangent g of y, in terms of û = u r (r = 1/max|u|), ĉ and the factor 2/‖û‖²:

        k  = factor · gᵀû        e  = k û − g
        gu = r (ĉ e − k x)       gx = Wᵀgu − e       gW = Σ gu xᵀ
    """
    import tensorflow as tf

    from keras_auxref.ops._gradients import with_reference_gradient

    def reference(g: tf.Tensor, x: tf.Tensor, w: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = reflection(x, w).y
        return tape.gradient(y, [x, w], g, unconnected_gradients=tf.UnconnectedGradients.ZERO)

    @tf.custom_gradient
    def closed_form(x: tf.Tensor, w: tf.Tensor) -> Any:
        forward = reflection(x, w)

        def fast(g: tf.Tensor, x: tf.Tensor, w: tf.Tensor) -> Any:
            wide = forward.direction.dtype
            g_wide, x_wide = tf.cast(g, wide), tf.cast(x, wide)
            k = tf.reduce_sum(g_wide * forward.direction, axis=-1, keepdims=True) * forward.factor
            e = k * forward.direction - g_wide
            gu = tf.cast((forward.scale * forward.coefficient) * e - (forward.scale * k) * x_wide, x.dtype)
            return tf.matmul(gu, w) - tf.cast(e, x.dtype), tf.matmul(gu, x, transpose_a=True)

        return forward.y, lambda g: with_reference_gradient(fast, reference)(g, x, w)

    return closed_form
