"""The inverse of the auxiliary reflection: one scalar equation per vector."""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_auxref.ops._checks import prepare
from keras_auxref.ops._gradients import with_reference_gradient
from keras_auxref.ops._rows import map_rows
from keras_auxref.ops._shared import shared
from keras_auxref.ops.factors import EIGEN, EIGEN_WIDE, PER_SAMPLE, SYMMETRIC, Factors, factors_of
from keras_auxref.ops.jacobian import jacobian
from keras_auxref.ops.reflect import annihilated, central_coefficient, reflection
from keras_auxref.ops.resolvent import Resolvent, resolvent_of, row_dot
from keras_auxref.ops.secular import bracket_of, solve_secular


class Inverse(NamedTuple):
    """x with f(x) = y, and how it was found: per vector the steps on the secular equation and ‖f(x) − y‖/‖y‖."""

    x: tf.Tensor
    steps: tf.Tensor
    residual: tf.Tensor
    certified: tf.Tensor


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
    found = shared(_solve, rows, w / tf.cast(factors.scale, w.dtype), factors, _as_scalar(near), max_steps=max_steps)
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
        found = shared(_solve, y, w, factors, near, max_steps=max_steps)

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


class _Point(NamedTuple):
    """The quantities of Theorem 3 at x, with p = A⁻¹u and κ = 1 + 2vᵀp/n2.

    On dead rows u and v are rounding noise, and n2 = 1, c = 0 make them count for nothing: A = I, J = I.
    """

    u: tf.Tensor
    v: tf.Tensor
    n2: tf.Tensor
    c: tf.Tensor
    p: tf.Tensor
    kappa: tf.Tensor


def _at(x: tf.Tensor, w: tf.Tensor, dead: tf.Tensor, resolvent: Resolvent) -> _Point:
    u = tf.matmul(x, w, transpose_b=True)
    v = u if resolvent.symmetric else tf.matmul(x, w)
    n2, c = _coefficient(x, u, dead)
    p = resolvent.solve(c, u)
    return _Point(u, v, n2, c, p, 1 + 2 * row_dot(v, p) / n2)


def _coefficient(x: tf.Tensor, u: tf.Tensor, dead: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    n2 = tf.where(~dead, row_dot(u, u), 1)
    return n2, tf.where(~dead, 2 * row_dot(u, x) / n2, 0)


def _jacobian_solve(point: _Point, resolvent: Resolvent, r: tf.Tensor) -> tf.Tensor:
    """J⁻¹r = [A⁻¹ − (2/n2) A⁻¹u vᵀA⁻¹/κ] H(u) r (Sherman–Morrison)."""
    z = resolvent.solve(point.c, r - point.u * (2 * row_dot(point.u, r) / point.n2))
    return z - point.p * (2 * row_dot(point.v, z) / (point.n2 * point.kappa))


def _jacobian_solve_transposed(point: _Point, resolvent: Resolvent, g: tf.Tensor) -> tf.Tensor:
    """J⁻ᵀg."""
    z = resolvent.solve_transposed(point.c, g - point.v * (2 * row_dot(point.p, g) / (point.n2 * point.kappa)))
    return z - point.u * (2 * row_dot(point.u, z) / point.n2)


def _vjp(g: tf.Tensor, x: tf.Tensor, w: tf.Tensor, factors: Factors, certified: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """J⁻ᵀg and −(∂f/∂W)ᵀJ⁻ᵀg at x = f⁻¹(y)."""
    dtype = x.dtype
    dead = annihilated(x, w)

    def gradients(resolvent: Resolvent, wide: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
        xs, ws, gs = (tf.cast(t, wide) for t in (x, w, g))
        point = _at(xs, ws, dead, resolvent)
        t = _jacobian_solve_transposed(point, resolvent, gs)
        k = tf.where(~dead, 2 * row_dot(t, point.u) / point.n2, 0)
        gu = point.c * t + k * (xs - point.c * point.u)
        return tf.cast(t, dtype), tf.cast(tf.matmul(gu, xs, transpose_a=True), dtype)

    return _switch(factors, certified, dtype, gradients)


def _switch(factors: Factors, certified: tf.Tensor, dtype: tf.DType, function: Callable[[Resolvent, tf.DType], Any]) -> Any:
    """Calls `function` with the resolvent for W: in the dtype of the input if W is certified, in float64 if not."""
    wide = tf.float64
    routes = [(SYMMETRIC, dtype), (SYMMETRIC, wide), (EIGEN, dtype), (EIGEN_WIDE, wide), (PER_SAMPLE, wide)]
    branches = [lambda route=route, kind=kind: function(*resolvent_of(factors, route, kind)) for route, kind in routes]
    if isinstance(factors.route, int):  # known while tracing
        if factors.route == PER_SAMPLE:
            return branches[4]()
        return branches[0]() if dtype == wide else tf.cond(certified, branches[0], branches[1])
    trusted = tf.cast(certified, tf.int32)
    index = tf.where(factors.route == SYMMETRIC, 1 - trusted, tf.where(factors.route == EIGEN, 3 - trusted, factors.route + 1))
    return tf.switch_case(index, branches)


def _error(x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, dead: tf.Tensor) -> tf.Tensor:
    """‖f(x) − y‖²."""
    u = tf.matmul(x, w, transpose_b=True)
    error = x - _coefficient(x, u, dead)[1] * u - y
    return row_dot(error, error)


def _solve(y: tf.Tensor, w: tf.Tensor, factors: Factors, near: tf.Tensor | None, max_steps: int) -> Inverse:
    """The inverse for rows with max|y| = 1 and for max|W| about 1, without gradients."""
    dtype = y.dtype
    if isinstance(factors.route, int):
        bracket = bracket_of(factors, symmetric=factors.route == SYMMETRIC)
    else:
        bracket = tf.cond(factors.route == SYMMETRIC, lambda: bracket_of(factors, True), lambda: bracket_of(factors, False))
    dead = annihilated(y, w)
    # c belongs to W, and factors.w is W / scale.
    start = central_coefficient(factors.w) if near is None else near * factors.scale

    def find(resolvent: Resolvent, wide: tf.DType) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        ys, ws = tf.cast(y, wide), tf.cast(w, wide)
        norm = tf.sqrt(row_dot(ys, ys))
        wy = tf.matmul(ys, ws, transpose_b=True)
        # Rows without a root to look for: y itself where W y = 0, NaN where y is NaN.
        nan = tf.constant(float("nan"), wide)
        at_zero = tf.where(dead, nan, 2 * row_dot(ys, wy))
        c, steps = solve_secular(ys, norm, resolvent, bracket, start, at_zero, max_steps, nearest=near is not None)
        c = tf.where(~dead, c, 0)
        x = ys + c * resolvent.solve(c, wy)
        # One step of refinement takes the rounding of the eigenbasis out; where it does not help, it is not taken.
        point = _at(x, ws, dead, resolvent)
        error = x - point.c * point.u - ys
        step = _jacobian_solve(point, resolvent, error)
        refined_error, error = _error(x - step, ys, ws, dead), row_dot(error, error)
        better = refined_error < error
        residual = tf.where(~dead, tf.sqrt(tf.where(better, refined_error, error)) / norm, 0)
        found = residual <= (1e-9 if wide == tf.float64 else 1e-4)
        x = x - tf.math.multiply_no_nan(step, tf.cast(better, wide)) + tf.where(found, tf.zeros_like(nan), nan)
        return tf.cast(x, dtype), steps[..., 0], tf.cast(residual, dtype)[..., 0]

    x, steps, residual = _switch(factors, bracket.certified, dtype, find)
    return Inverse(x, steps, residual, bracket.certified)
