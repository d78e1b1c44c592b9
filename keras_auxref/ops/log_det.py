"""f(x) and log|det J| of the auxiliary reflection (paper, Lemma 4), from one factorisation of W per batch."""

import functools
from typing import Any, NamedTuple

from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops._checks import prepare
from keras_auxref.ops._rows import map_rows, matmul
from keras_auxref.ops.factors import Factors, dispatch, factors_of, routes_of
from keras_auxref.ops.jacobian import Point, at_points, jacobian
from keras_auxref.ops.reflect import Reflection, reflection, reflection_vjp
from keras_auxref.typing import Tensor


class Reflected(NamedTuple):
    """y = f(x), log|det J(x)| and c(x) = 2 uᵀx/‖u‖², u = W x, which is a constant to automatic differentiation."""

    y: Tensor
    log_det: Tensor
    coefficient: Tensor


def reflect_and_log_det(x: Tensor, w: Tensor, *, symmetric: bool | None = None, factors: Factors | None = None) -> Reflected:
    """f(x) = H(Wx) x and log|det J(x)| for every vector on the last axis of x: the primitive of flows.

        log|det J| = log|det(A + 2 u vᵀ/‖u‖²)|,      A = I − c W,      u = W x,   v = Wᵀx,   c = 2 uᵀx/‖u‖²  (Lemma 4).

    A depends on x through the scalar c alone, so W is factored once, in float64, and n vectors cost O(n d² + d³) and not
    O(n d³). The gradient for x and W is in closed form, one for both results: nothing is differentiated through an
    eigendecomposition, and repeated eigenvalues are ordinary inputs. So are poles, where A is singular and J is not. A W whose
    eigenvectors are too ill-conditioned for the dtype is served by one QR factorisation per vector. Second derivatives are
    right, and cost one QR factorisation per vector; PyTorch refuses them.

    Runs on TensorFlow, JAX (compiled or not) and PyTorch. Under TensorFlow's XLA, which has no eigendecomposition of a general
    matrix, pass `symmetric=True` if W is symmetric; any other W is served by one QR factorisation per vector.

    Args:
        x: Tensor of shape `(..., d)`.
        w: Tensor of shape `(d, d)`.
        symmetric: True promises W = Wᵀ; None looks at W.
        factors: The result of `factorize(w)`, where the same W serves many batches.

    Returns:
        A tuple `(y, log_det, coefficient)`: of the shape of `x`, `(...,)` and `(...,)`. Where J is singular log_det is −∞; where
        W x = 0 it is 0, y = x and the coefficient 0.
    """
    x, w, dtype = prepare(x, w, "x")
    outputs = map_rows(lambda rows: _run(rows, w, symmetric, factors, value=True), x)
    return Reflected(*(ops.cast(t, dtype) for t in outputs))


def log_det_jacobian(x: Tensor, w: Tensor, *, symmetric: bool | None = None, factors: Factors | None = None) -> Tensor:
    """log|det J(x)| of f(x) = H(Wx) x for every vector on the last axis of x. See `reflect_and_log_det`, which gives f too.

    Args:
        x: Tensor of shape `(..., d)`.
        w: Tensor of shape `(d, d)`.
        symmetric: True promises W = Wᵀ; None looks at W.
        factors: The result of `factorize(w)`, where the same W serves many batches.

    Returns:
        A tensor of shape `(...,)`: −∞ where J is singular, 0 where W x = 0 (there f(x) = x).
    """
    x, w, dtype = prepare(x, w, "x")
    return ops.cast(map_rows(lambda rows: _run(rows, w, symmetric, factors, value=False)[0], x), dtype)


def _run(x: Tensor, w: Tensor, symmetric: bool | None, factors: Factors | None, *, value: bool) -> tuple[Tensor, ...]:
    if factors is None:
        factors = factors_of(w, symmetric)
    static: dict[str, Any] = {"symmetric": symmetric, "route": factors.known_route, "value": value}
    outputs = backend.closed_form(
        functools.partial(_forward, **static),
        functools.partial(_backward, **static),
        functools.partial(_reference, value=value),
        (x, w),
        factors.tensors,
        plain=functools.partial(_plain, value=value),
    )
    return (*outputs[:-1], ops.stop_gradient(outputs[-1])) if value else (outputs,)


def _forward(x: Tensor, w: Tensor, factors: Factors, *, symmetric: Any, route: int | None, value: bool) -> Any:
    outputs, saved = backend.shared(_value, x, w, factors, rows=1, symmetric=symmetric, route=route)
    return (outputs if value else outputs[1]), saved


def _value(x: Tensor, w: Tensor, factors: Factors, *, symmetric: bool | None, route: int | None) -> Any:
    factors = factors.on(route)
    scale = ops.cast(factors.scale, w.dtype)
    forward = reflection(x, w / scale)

    def log_det(way: Any) -> Tensor:
        zero = ops.zeros_like(forward.scale)
        value = at_points(lambda point, _: (point.log_abs_det, ()), zero, forward, w / scale, factors, way)[0]
        return ops.cast(value, x.dtype)

    value = dispatch(factors, routes_of(w, symmetric), log_det)
    return (forward.y, value[..., 0], (forward.coefficient / scale)[..., 0]), forward


def _backward(
    cotangents: Any, forward: Reflection, x: Tensor, w: Tensor, factors: Factors, *, symmetric: Any, route: Any, value: bool
) -> Any:
    gy, g = cotangents[:2] if value else (None, cotangents)
    return backend.shared(_gradients, gy, g, forward, w, factors, symmetric=symmetric, route=route)


def _gradients(
    gy: Tensor | None, g: Tensor, forward: Reflection, w: Tensor, factors: Factors, *, symmetric: Any, route: int | None
) -> tuple[Tensor, Tensor]:
    """The gradients for x and W: of log|det J| in the units of x̂ = x/size and W/scale, of f(x) in its own."""
    factors = factors.on(route)
    scale = ops.cast(factors.scale, w.dtype)
    w = w / scale

    def through(way: Any) -> tuple[Tensor, ...]:
        (gx, gu, gv), gw = at_points(log_det_vjp, g[..., None], forward, w, factors, way)
        gw = gw + matmul(ops.transpose(ops.cast(forward.unit, gv.dtype)), gv)
        return tuple(ops.cast(t, w.dtype) for t in (gx, gu, gw))

    gx, gu, gw = dispatch(factors, routes_of(w, symmetric), through)
    if gy is None:
        gx = (gx + matmul(gu, w)) / forward.size
    else:
        from_y, gu_of_y = reflection_vjp(gy, forward, w)
        gx = from_y + (gx + matmul(gu, w)) / forward.size
        gu = gu + gu_of_y * forward.size
    return gx, (gw + matmul(ops.transpose(gu), forward.unit)) / scale


def log_det_vjp(point: Point, g: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """For a cotangent g, (n, 1), of log|det N|, N = I − cW + β u vᵀ: (gx, gu, gv) and what comes for W through c W alone.

    With p = N⁻¹u, t = N⁻ᵀv, q = vᵀp, τ = tr(N⁻¹W) and c = βuᵀx, β = 2/‖u‖²:

        gu = g β (t − τ x − (β q − τ c) u)        gv = g β p
        gx = W gv − g τ β u (+ Wᵀgu)              gW = − Σ g c N⁻ᵀ (+ Σ x gvᵀ + gu xᵀ)
    """
    forward, beta = point.forward, point.beta
    x, c = forward.unit, forward.coefficient
    p, t, wp, q, trace = point.quantities()
    # β u = factor · r · û, 0 on null rows.
    along = g * forward.factor * forward.scale
    gu = (g * beta) * (t - trace * x) - (along * (beta * q - trace * c)) * forward.direction
    gx = (g * beta) * wp - (along * trace) * forward.direction
    return (gx, gu, (g * beta) * p), point.pull_back(-g * c)


def _reference(cotangents: Any, x: Tensor, w: Tensor, _: Any, *, value: bool) -> Any:
    """The gradients by automatic differentiation."""
    plain = functools.partial(_plain, value=value)
    return backend.vjp(lambda x, w: plain(x, w)[:2] if value else plain(x, w))(cotangents[:2] if value else cotangents, x, w)


def _plain(x: Tensor, w: Tensor, *, value: bool) -> Any:
    """The same outputs in differentiable operations: Σ log|R_ii|, J = QR."""
    r = ops.qr(jacobian(x, w))[1]
    log_det = ops.sum(ops.log(ops.abs(ops.diagonal(r, axis1=-2, axis2=-1))), axis=-1)
    if not value:
        return log_det
    forward = reflection(x, w)
    return forward.y, log_det, forward.coefficient[..., 0]
