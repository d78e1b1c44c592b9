"""f(x) and log|det J| of the auxiliary reflection (paper, Lemma 4), from one factorisation of W per batch."""

from typing import Any, NamedTuple

from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.at_points import at_points
from keras_auxref.ops.checks import prepare
from keras_auxref.ops.factors import Factors, factors_of, routes_of
from keras_auxref.ops.jacobian import jacobian
from keras_auxref.ops.point import Point
from keras_auxref.ops.reflect import Reflection, reflection, reflection_vjp
from keras_auxref.ops.rows import map_rows, matmul, power_of_two, size_of
from keras_auxref.typing import Tensor


class Reflected(NamedTuple):
    """y = f(x), log|det J(x)| and c(x) = 2 uᵀx/‖u‖², u = W x, which is a constant to automatic differentiation.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import reflect_and_log_det
    >>> y, log_det, coefficient = reflect_and_log_det(np.array([3.0, 4.0]), np.eye(2))
    >>> print(y.numpy(), float(coefficient))
    [-3. -4.] 2.0
    """

    y: Tensor
    log_det: Tensor
    coefficient: Tensor


def reflect_and_log_det(x: Tensor, w: Tensor, *, symmetric: bool | None = None, factors: Factors | None = None) -> Reflected:
    """f(x) = H(Wx) x and log|det J(x)| for every vector on the last axis of x: the primitive of flows.

        log|det J| = log|det(A + 2 u vᵀ/‖u‖²)|,      A = I − c W,      u = W x,   v = Wᵀx,   c = 2 uᵀx/‖u‖²  (Lemma 4).

    A depends on x only through the scalar c, so W is factored once, in float64, and n vectors cost O(n d² + d³) instead of
    O(n d³). The gradient for x and W is in closed form, one for both results: nothing is differentiated through an
    eigendecomposition, so repeated eigenvalues do no harm. Nor do poles, where A is singular and J is not. If the
    eigenvectors of W are too ill-conditioned for the dtype, there is one QR factorisation per vector. Second derivatives are
    right, and cost one QR factorisation per vector; PyTorch refuses them.

    Runs on TensorFlow, JAX (compiled or not) and PyTorch. Under TensorFlow's XLA, which has no eigendecomposition of a general
    matrix, pass `symmetric=True` if W is symmetric; any other W takes one QR factorisation per vector.

    Args:
        x: Tensor of shape `(..., d)`.
        w: Tensor of shape `(d, d)`.
        symmetric: True promises W = Wᵀ; None looks at W.
        factors: The result of `factorize(w)`, where the same W serves many batches.

    Returns:
        A tuple `(y, log_det, coefficient)`: of the shape of `x`, `(...,)` and `(...,)`. log_det is −∞ where J is singular;
        it and its gradients are NaN where rounding leaves less than three digits. Where W x = 0, log_det is 0, y = x and the
        coefficient is 0.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import reflect_and_log_det
    >>> y, log_det, coefficient = reflect_and_log_det(np.ones((5, 2)), np.diag([1.0, 1.5]))
    >>> y.shape, log_det.shape
    (TensorShape([5, 2]), TensorShape([5]))
    """
    x, w, dtype = prepare(x, w, "x")
    if factors is None:
        factors = factors_of(w, symmetric)
    possible = routes_of(factors, w, symmetric)

    def run(rows: Tensor) -> Any:
        def forward(x: Tensor, w: Tensor, factors: Factors) -> Any:
            return backend.shared(_value, x, w, factors, rows=1, possible=possible)

        def backward(cotangents: Any, saved: Reflection, x: Tensor, w: Tensor, factors: Factors) -> Any:
            return backend.shared(_gradients, *cotangents[:2], saved, w, factors, possible=possible)

        return backend.closed_form(forward, backward, _reference, (rows, w), factors, plain=_plain)

    y, log_det, coefficient = (ops.cast(t, dtype) for t in map_rows(run, x))
    return Reflected(y, log_det, ops.stop_gradient(coefficient))


def log_det_jacobian(x: Tensor, w: Tensor, *, symmetric: bool | None = None, factors: Factors | None = None) -> Tensor:
    """log|det J(x)| of f(x) = H(Wx) x for every vector on the last axis of x. See `reflect_and_log_det`, which also returns f(x).

    Args:
        x: Tensor of shape `(..., d)`.
        w: Tensor of shape `(d, d)`.
        symmetric: True promises W = Wᵀ; None looks at W.
        factors: The result of `factorize(w)`, where the same W serves many batches.

    Returns:
        A tensor of shape `(...,)`: −∞ where J is singular, NaN where rounding leaves less than three digits, 0 where W x = 0
        (there f(x) = x).

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import jacobian, log_det_jacobian
    >>> x, w = np.array([3.0, 4.0]), np.diag([1.0, 1.5])
    >>> np.allclose(log_det_jacobian(x, w), np.log(np.abs(np.linalg.det(jacobian(x, w)))))
    True
    """
    return reflect_and_log_det(x, w, symmetric=symmetric, factors=factors).log_det


def _value(x: Tensor, w: Tensor, factors: Factors, *, possible: tuple[int, ...]) -> Any:
    """(y, log|det J|, c) and what the gradient needs."""
    scale = ops.cast(factors.scale, w.dtype)
    forward = reflection(x, w / scale, size=power_of_two(size_of(x)))
    g = forward.scale  # unused: there are no totals here
    value = at_points(_log_abs_det, g, forward, w / scale, factors, possible, (ops.zeros_like(g), ()))[0]
    return (forward.y, value[..., 0], (forward.coefficient / scale)[..., 0]), forward


def _log_abs_det(point: Point, _: Tensor) -> tuple[Tensor, tuple[()]]:
    return point.log_abs_det, ()


def _gradients(
    gy: Tensor, g: Tensor, forward: Reflection, w: Tensor, factors: Factors, *, possible: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """The gradients for x and W: of log|det J| in the units of x̂ = x/size and W/scale, of f(x) in its own."""
    scale = ops.cast(factors.scale, w.dtype)
    w = w / scale
    zero = ops.zeros_like(forward.unit)
    nothing = (zero, zero, zero), ops.zeros_like(w)
    (gx, gu, gv), gw = at_points(log_det_vjp, g[..., None], forward, w, factors, possible, nothing)
    gw = gw + matmul(ops.transpose(forward.unit), gv)
    from_y, gu_of_y = reflection_vjp(gy, forward, w)
    gx = from_y + (gx + matmul(gu, w)) / forward.size
    gu = gu + gu_of_y * forward.size
    return gx, (gw + matmul(ops.transpose(gu), forward.unit)) / scale


def log_det_vjp(point: Point, g: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """For a cotangent g, (n, 1), of log|det N|, N = I − cW + β u vᵀ: (gx, gu, gv) and the part of gW that comes from c W alone.

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


def _reference(cotangents: Any, x: Tensor, w: Tensor, _: Any) -> Any:
    """The gradients by automatic differentiation."""
    return backend.vjp(lambda x, w: _plain(x, w)[:2])(cotangents[:2], x, w)


def _plain(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same outputs in differentiable operations: Σ log|R_ii|, J = QR."""
    forward, r = reflection(x, w), ops.qr(jacobian(x, w))[1]
    log_det = ops.sum(ops.log(ops.abs(ops.diagonal(r, axis1=-2, axis2=-1))), axis=-1)
    return forward.y, log_det, forward.coefficient[..., 0]
