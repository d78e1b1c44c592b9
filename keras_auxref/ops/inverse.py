"""The inverse of the auxiliary reflection: one scalar equation per vector."""

from typing import Any

import tensorflow as tf

from keras_auxref.ops._checks import prepare
from keras_auxref.ops._gradients import with_reference_gradient
from keras_auxref.ops._rows import map_rows
from keras_auxref.ops._shared import shared
from keras_auxref.ops.factors import Factors, factors_of
from keras_auxref.ops.jacobian import jacobian
from keras_auxref.ops.reflect import annihilated, reflection
from keras_auxref.ops.resolvent import Resolvent, row_dot
from keras_auxref.ops.search import Inverse, at, jacobian_solve_transposed, solve, switch


def inverse(
    y: Any,
    w: Any,
    *,
    symmetric: bool | None = None,
    factors: Factors | None = None,
    near: Any = None,
    max_steps: int = 100,
) -> tf.Tensor:
    """Solves f(x) = H(Wx) x = y for every vector on the last axis of y.

    y = (I − cW) x is linear in x once the scalar c is known, and f preserves norms, so c is a root of the secular equation

        ‖(I − cW)⁻¹ y‖ = ‖y‖,      x = (I − cW)⁻¹ y,

    one unknown and not d. W is factored once; the root is found by safeguarded Newton steps, typically 3 to 5. When W⁻¹ = S + K,
    S symmetric positive (or negative) definite with condition below 2 and K skew, the preimage is unique and is found from
    anywhere. For any other invertible W a preimage always exists and is searched for in float64, but **it may not be the only
    one**: see `preimages`. Every x is checked against the real f(x) − y; a vector for which none was found becomes NaN, never a
    wrong number. Gradients for y and W come from the implicit function theorem. Second derivatives are right, and cost one d×d
    solve per vector. Needs TensorFlow; under XLA pass `symmetric=True` if W is, any other W costs a QR per vector and step.

    Args:
        y: Tensor of shape `(..., d)`.
        w: Tensor of shape `(d, d)`.
        symmetric: True promises W = Wᵀ; None looks at W.
        factors: The result of `factorize(w)`, where the same W serves many batches.
        near: A number, the c(x) = 2 uᵀx/‖u‖², u = Wx, about which to look for x where there may be several: for data whose c
            cluster, as they do around 1 for a W that started at I − U, their mean. Makes no difference for a W with certificate.
        max_steps: Bound on the number of steps.

    Returns:
        A tensor of the shape and dtype of `y`; y itself where W y = 0.
    """
    y, w, dtype = prepare(y, w, "y", "inverse")
    if factors is None:
        factors = factors_of(w, symmetric)
    near = _as_scalar(near)
    return tf.cast(map_rows(lambda rows: _differentiable(rows, w, factors, near, max_steps), y), dtype)


def _as_scalar(near: Any) -> tf.Tensor | None:
    return None if near is None else tf.stop_gradient(tf.cast(near, tf.float64))


def inverse_with_info(
    y: Any,
    w: Any,
    *,
    symmetric: bool | None = None,
    factors: Factors | None = None,
    near: Any = None,
    max_steps: int = 100,
) -> Inverse:
    """`inverse` with the number of steps, the relative residual and whether uniqueness is proven. Not differentiable."""
    y, w, dtype = prepare(y, w, "y", "inverse")
    y, w = tf.stop_gradient(y), tf.stop_gradient(w)
    if factors is None:
        factors = factors_of(w, symmetric)
    size = _size(y)
    leading = tf.shape(y)[:-1]
    rows = tf.reshape(y / size, [-1, w.shape[0]])
    found = shared(solve, rows, w / tf.cast(factors.scale, w.dtype), factors, _as_scalar(near), max_steps=max_steps)
    return Inverse(
        x=tf.cast(tf.reshape(found.x, tf.shape(y)) * size, dtype),
        steps=tf.reshape(found.steps, leading),
        residual=tf.reshape(found.residual, leading),
        certified=found.certified,
    )


def _size(y: tf.Tensor) -> tf.Tensor:
    """max|y| on the last axis, 1 where y = 0. A constant to automatic differentiation."""
    size = tf.reduce_max(tf.abs(tf.stop_gradient(y)), axis=-1, keepdims=True)
    return tf.where(size > 0, size, 1)


def _differentiable(y: tf.Tensor, w: tf.Tensor, factors: Factors, near: tf.Tensor | None, max_steps: int) -> tf.Tensor:
    """x with the gradient of the implicit function theorem: for a cotangent g, gy = J⁻ᵀg and gW = −(∂f/∂W)ᵀ J⁻ᵀg."""

    @tf.custom_gradient
    def value(y: tf.Tensor, w: tf.Tensor) -> Any:
        found = shared(solve, y, w, factors, near, max_steps=max_steps)

        def fast(g: tf.Tensor, y: tf.Tensor, w: tf.Tensor) -> Any:
            return shared(_vjp, g, found.x, w, factors, found.certified)

        return found.x, lambda g: with_reference_gradient(fast, reference)(g, y, w)

    def reference(g: tf.Tensor, y: tf.Tensor, w: tf.Tensor) -> Any:
        x = value(y, w)
        t = tf.linalg.solve(jacobian(x, w), g[..., None], adjoint=True)[..., 0]
        with tf.GradientTape() as tape:
            tape.watch(w)
            image = reflection(x, w).y
        return t, -tape.gradient(image, w, t)

    # f is homogeneous in x and ignores the length of W, so that treating both lengths as constants is exact.
    size = _size(y)
    return size * value(y / size, w / tf.cast(factors.scale, w.dtype))


def _vjp(g: tf.Tensor, x: tf.Tensor, w: tf.Tensor, factors: Factors, certified: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """J⁻ᵀg and −(∂f/∂W)ᵀJ⁻ᵀg at x = f⁻¹(y)."""
    dtype = x.dtype
    dead = annihilated(x, w)

    def gradients(resolvent: Resolvent, wide: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
        xs, ws, gs = (tf.cast(t, wide) for t in (x, w, g))
        point = at(xs, ws, dead, resolvent)
        t = jacobian_solve_transposed(point, resolvent, gs)
        k = tf.where(~dead, 2 * row_dot(t, point.u) / point.n2, 0)
        gu = point.c * t + k * (xs - point.c * point.u)
        return tf.cast(t, dtype), tf.cast(tf.matmul(gu, xs, transpose_a=True), dtype)

    return switch(factors, certified, dtype, gradients)
