"""The Jacobian of the auxiliary reflection (paper, Theorem 3 and Lemma 4), at a point and without forming it.

    J = H(u) N,      N = A + 2 u vᵀ/‖u‖²,      A = I − c W,      u = W x,   v = Wᵀx,   c = 2 uᵀx/‖u‖².

Everything here is written in terms of N⁻¹. `DiagonalPoint` and `PairedPoint` compute it in a basis of W, from A⁻¹ as in Lemma 4,
which is infinite where A is singular, although J need not be. `RowPoint` factors N itself, one matrix per row: it is for the few
rows for which the others lose too many digits.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import keras
from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.accurate import accurate_product
from keras_auxref.ops.checks import as_tensor, check_vectors_and_matrix
from keras_auxref.ops.factors import ROWS, Factors, Route, dispatch
from keras_auxref.ops.householder import reflect_along
from keras_auxref.ops.reflect import Reflection, reflection
from keras_auxref.ops.resolvent import Paired
from keras_auxref.ops.rows import dtype_of, epsilon, largest, matmul, nonzero, row_dot, size_of
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


Function = Callable[["Point", Tensor], tuple[Any, Any]]
"""(point, g) → (a nest of rows, a nest of totals that are linear in g)."""


def at_points(
    function: Function,
    g: Tensor,
    forward: Reflection,
    w: Tensor,
    factors: Factors,
    possible: tuple[int, ...],
    nothing: tuple[Any, Any],
) -> tuple[Any, Any]:
    """function(point, g) at every row, in the dtype of w: in the basis of W, and row by row where that loses too many digits.

    Args:
        function: What to compute at every point.
        g: (n, …), in which the totals are linear.
        forward: f(x) for a W with entries of order 1, with x̂ = x divided by a power of two: hard rows depend on the last digit
            of x.
        w: That W, in the dtype of `forward`.
        factors: The factors of W.
        possible: The routes that W may take.
        nothing: Zeros with the structure of the result.
    """
    live = ops.not_equal(forward.scale, 0)  # judged in the precision of the input
    x, dtype = forward.unit, dtype_of(w)

    def alone(g: Tensor, x: Tensor, live: Tensor) -> Any:
        exact = backend.wide_dtype()
        return _cast(function(RowPoint(ops.cast(x, exact), live, ops.cast(w, exact)), ops.cast(g, exact)), dtype)

    def together(way: Route) -> Any:
        if way.basis == "rows":
            return *nothing, ops.ones_like(live)
        point = in_basis(forward, w, factors, way)
        return *_cast(function(point, (1 - ops.cast(point.hard, point.w.dtype)) * ops.cast(g, point.w.dtype)), dtype), point.hard

    if possible == (ROWS,):
        return alone(g, x, live)
    rows, total, hard = dispatch(factors.route, possible, together)
    return (rows, total) if w.shape[0] == 1 else backend.only_rows(hard, alone, rows, g, x, live, total=total)


def in_basis(forward: Reflection, w: Tensor, factors: Factors, way: Route) -> "DiagonalPoint | PairedPoint":
    """The points of a batch in the basis of W, in float64 if the route is wide."""
    dtype = backend.wide_dtype() if way.wide else dtype_of(w)
    most = MOST[dtype_of(w)]
    if dtype != dtype_of(w):
        mask = ops.cast(forward.scale != 0, dtype)
        w = ops.cast(w, dtype)
        forward = reflection(ops.cast(forward.unit, dtype), w, size=ops.ones_like(mask))
        forward = forward._replace(scale=mask * forward.scale, relative=mask * forward.relative)
    return (DiagonalPoint if way.basis == "symmetric" else PairedPoint)(forward, w, factors, most)


def _cast(nest: Any, dtype: str) -> Any:
    return keras.tree.map_structure(lambda t: ops.cast(t, dtype), nest)


MOST = {"float32": 1e3, "float64": 1e4}
"""For each dtype of the input, how much rounding may be amplified before a row is computed without a basis."""


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


class RowPoint:
    """N by one QR factorisation per row: for rows where nothing else is accurate, and for a W without a usable basis.

    f is homogeneous, so N x = x. With the Householder matrix Q that takes x to the first axis,

        N = Q [[1, r], [0, N′]] Q,      det N = det N′,

    which keeps N′ well conditioned where W x is small and c and the rest of N are large. The remaining accuracy is known:
    the entries of N have an error of about ε (1 + ‖W‖‖x‖/‖u‖ + β‖u‖‖v‖), which N′⁻¹ magnifies. Where log|det N| is not accurate
    to three digits, all results are NaN.
    """

    def __init__(self, x: Tensor, live: Tensor, w: Tensor) -> None:
        self.forward, self.w = accurate_reflection(x, live, w), w
        forward, d, dtype = self.forward, w.shape[0], dtype_of(w)
        self.beta = forward.factor * ops.square(forward.scale)
        self.v = accurate_product(x, ops.transpose(w))
        along = (forward.factor * forward.scale) * self.v
        n = ops.eye(d, dtype=w.dtype) - forward.coefficient[..., None] * w + forward.direction[..., :, None] * along[..., None, :]
        first = ops.one_hot(ops.zeros((1,), dtype="int32"), d, dtype=w.dtype)
        length = nonzero(ops.sqrt(row_dot(x, x)))
        mirror = x / length + ops.where(x[:, :1] >= 0, first, -first)
        self.mirror = mirror / ops.sqrt(row_dot(mirror, mirror))
        turned = self._turned(n)
        q, r = ops.qr(turned[:, 1:, 1:])
        self.rest, self.row = ops.solve_triangular(r, ops.swapaxes(q, -1, -2)), turned[:, :1, 1:]
        value = ops.sum(ops.log(ops.abs(ops.diagonal(r, axis1=-2, axis2=-1))), axis=-1)[:, None]
        size = ops.sqrt(ops.sum(ops.square(w)))
        entries = 1 + forward.factor * ops.sqrt(row_dot(forward.direction, forward.direction)) * (
            forward.scale * (length * size + ops.sqrt(row_dot(self.v, self.v)))
        )
        error = 2 * epsilon(dtype) * entries * ops.sqrt(ops.sum(ops.square(self.rest), axis=(-2, -1)))[:, None]
        limit = 1e-3 if dtype == "float64" else 0.1  # without float64, three digits would be asking too much
        nothing = ops.full_like(value, float("nan"))
        self.known = error <= limit * (1 + ops.abs(value))  # false for NaN
        self.log_abs_det = ops.where(ops.logical_or(self.known, ops.isinf(value)), value, nothing)

    def _turned(self, n: Tensor) -> Tensor:
        """Q N Q."""
        row, column = self.mirror[:, None, :], self.mirror[:, :, None]
        n = n - 2 * column * matmul(row, n)
        return n - 2 * matmul(n, column) * row

    @functools.cached_property
    def inverse(self) -> Tensor:
        """N⁻¹ = Q [[1, −r N′⁻¹], [0, N′⁻¹]] Q."""
        above = ops.concatenate([ops.ones_like(self.row[:, :, :1]), -matmul(self.row, self.rest)], axis=-1)
        below = ops.concatenate([ops.zeros_like(self.rest[:, :, :1]), self.rest], axis=-1)
        inverse = self._turned(ops.concatenate([above, below], axis=1))
        return ops.where(self.known[..., None], inverse, ops.full_like(inverse, float("nan")))

    def quantities(self) -> Quantities:
        inverse = self.inverse
        u = self.forward.direction / nonzero(self.forward.scale)  # 0 on null rows
        p = matmul(inverse, u[..., None])[..., 0]
        t = matmul(self.v[..., None, :], inverse)[..., 0, :]
        trace = ops.sum(inverse * ops.transpose(self.w), axis=(-2, -1))[..., None]
        return Quantities(p, t, matmul(p, ops.transpose(self.w)), row_dot(self.v, p), trace)

    def solve(self, z: Tensor) -> Tensor:
        return matmul(self.inverse, z[..., None])[..., 0]

    def solve_transposed(self, z: Tensor) -> Tensor:
        return matmul(z[..., None, :], self.inverse)[..., 0, :]

    def pull_back(self, weight: Tensor) -> Tensor:
        return ops.sum(weight[..., None] * ops.swapaxes(self.inverse, -1, -2), axis=0)


def accurate_reflection(x: Tensor, live: Tensor, w: Tensor) -> Reflection:
    """f(x) for rows x and W with entries of order 1, with u = W x to the last digit; x itself where not `live`."""
    u = accurate_product(x, w)
    magnitude = largest(u)
    result = reflect_along(u, x, magnitude, ops.logical_or(~live, magnitude == 0))
    ones = ops.ones_like(magnitude)
    return Reflection(result.y, ones, x, result.direction, result.scale, result.factor, result.coefficient)


class DiagonalPoint:
    """N from W = BΛBᵀ, elementwise in the coordinates ũ = Bᵀu (Lemma 4). With δ = 1 − cλ,

        κ = 1 + β Σ ũ²/δ       det N = κ Π δ       N⁻¹u = N⁻ᵀv = B (ũ/δ)/κ.

    Rows where this loses too many digits, because a δ, κ or u is small, are `hard`: their results are finite but meaningless.
    """

    def __init__(self, forward: Reflection, w: Tensor, factors: Factors, most: float) -> None:
        self.forward, self.w = forward, w
        d, dtype = w.shape[0], dtype_of(w)
        self.eigenvalue = ops.cast(ops.reshape(factors.a, (-1,))[:d], dtype)
        self.basis = ops.cast(factors.right[:d], dtype)
        self.beta, c = forward.factor * ops.square(forward.scale), forward.coefficient
        self.u = matmul(forward.unit, matmul(ops.transpose(w), ops.transpose(self.basis)))
        shift = c * self.eigenvalue
        delta = 1 - shift
        inverse = 1 / delta
        terms = self.beta * ops.square(self.u) * inverse
        kappa = 1 + ops.sum(terms, axis=-1, keepdims=True)
        spread = largest((1 + ops.abs(shift)) * inverse)
        self.hard = _is_hard(forward, spread, 1 + ops.sum(ops.abs(terms), axis=-1, keepdims=True), kappa, most)
        self.log_abs_det = ops.sum(ops.log(ops.abs(delta)), axis=-1, keepdims=True) + ops.log(ops.abs(kappa))
        self.inverse, self.kappa = _harmless(self.hard, inverse), _harmless(self.hard, kappa)

    def quantities(self) -> Quantities:
        own = self.u * self.inverse / self.kappa
        scaled = own * self.eigenvalue
        trace = matmul(self.inverse, self.eigenvalue[:, None]) - self.beta * row_dot(self.u * self.inverse, scaled)
        p = matmul(own, self.basis)
        return Quantities(p, p, matmul(scaled, self.basis), row_dot(self.u, own), trace)

    def solve(self, z: Tensor) -> Tensor:
        own = matmul(z, ops.transpose(self.basis)) * self.inverse
        away = self.u * self.inverse * (self.beta * row_dot(self.u, own) / self.kappa)
        return matmul(own - away, self.basis)

    def solve_transposed(self, z: Tensor) -> Tensor:
        return self.solve(z)  # N is symmetric, as W is

    def pull_back(self, weight: Tensor) -> Tensor:
        scaled = self.u * self.inverse
        inner = -matmul(ops.transpose(weight * self.beta / self.kappa * scaled), scaled)
        inner = inner + ops.diag(matmul(ops.transpose(weight), self.inverse)[0])
        return matmul(ops.transpose(self.basis), matmul(inner, self.basis))


class PairedPoint:
    """N from W = BMB⁻¹, M of blocks M_j, elementwise in the coordinates ũ = B⁻¹u, ṽ = Bᵀv (Lemma 4).

    With the determinants δ_j of the blocks X_j = I − cM_j of A, their adjugates adj X_j = I − cM̂_j and τ_j = ṽ_jᵀ adj(X_j) ũ_j,

        κ = 1 + β Σ τ_j/δ_j       det N = κ Π δ_j       N⁻¹u = B (adj(X) ũ/δ)/κ       N⁻ᵀv = B⁻ᵀ (adj(X)ᵀ ṽ/δ)/κ.

    `hard` rows are those of `DiagonalPoint`.
    """

    def __init__(self, forward: Reflection, w: Tensor, factors: Factors, most: float) -> None:
        self.forward, self.w = forward, w
        self.basis = basis = Paired(factors, dtype_of(w))
        self.beta, self.c = forward.factor * ops.square(forward.scale), forward.coefficient
        self.u, hat_u = (self._coordinates(matrix) for matrix in basis.of_u(w))
        self.v = self._coordinates(basis.of_v(w)[0])
        self.adjugate_u = self.u - self.c * hat_u
        delta = basis.determinant(self.c)
        inverse = 1 / delta
        terms = self.beta * (self.v * self.adjugate_u) * inverse
        kappa = 1 + ops.sum(terms, axis=-1, keepdims=True)
        spread = largest(basis.size(self.c) * inverse)
        self.hard = _is_hard(forward, spread, 1 + ops.sum(ops.abs(terms), axis=-1, keepdims=True), kappa, most)
        logs = ops.sum(ops.log(ops.abs(delta)), axis=-1, keepdims=True) / 2
        self.log_abs_det = logs + ops.log(ops.abs(kappa))
        self.inverse, self.kappa = _harmless(self.hard, inverse), _harmless(self.hard, kappa)

    def _coordinates(self, matrix: Tensor) -> Tensor:
        return matmul(self.forward.unit, ops.transpose(matrix))

    @functools.cached_property
    def adjugate_v(self) -> Tensor:
        """adj(X)ᵀṽ."""
        return self.v - self.c * self._coordinates(self.basis.of_v(self.w)[1])

    def quantities(self) -> Quantities:
        basis, scaled = self.basis, self.inverse / self.kappa
        p = scaled * self.adjugate_u
        # Of a block: tr(adj(X) M) = tr M − 2c det M, and ṽᵀ adj(X) M adj(X) ũ = ṽᵀ adj(X) (M − c det M) ũ.
        trace = row_dot(basis.trace - 2 * (self.c * basis.product), self.inverse) / 2
        trace = trace - self.beta * row_dot(self.adjugate_v * basis.times(p), self.inverse)
        t = matmul(scaled * self.adjugate_v, basis.left)
        return Quantities(matmul(p, basis.right), t, matmul(p, basis.of_v(self.w)[0]), row_dot(self.v, p), trace)

    def solve(self, z: Tensor) -> Tensor:
        own = matmul(z, ops.transpose(self.basis.left))
        own = self._solve(own - self.c * self.basis.hat(own), self.v, self.adjugate_u)
        return matmul(own, self.basis.right)

    def solve_transposed(self, z: Tensor) -> Tensor:
        own = matmul(z, ops.transpose(self.basis.right))
        own = self._solve(own - self.c * self.basis.hat_transposed(own), self.u, self.adjugate_v)
        return matmul(own, self.basis.left)

    def _solve(self, adjugate_z: Tensor, v: Tensor, adjugate_u: Tensor) -> Tensor:
        """(X + β u vᵀ)⁻¹z in coordinates; with u and v exchanged and adjugates transposed, for the transpose."""
        along = self.beta * row_dot(v * adjugate_z, self.inverse) / self.kappa
        return (adjugate_z - adjugate_u * along) * self.inverse

    def pull_back(self, weight: Tensor) -> Tensor:
        basis, row = self.basis, ops.transpose(weight)
        outer = weight * self.beta / self.kappa
        inner = -matmul(ops.transpose(outer * self.inverse * self.adjugate_v), self.inverse * self.adjugate_u)
        identity = ops.eye(self.u.shape[-1], dtype=self.u.dtype)
        inner = inner - matmul(row * ops.transpose(self.c), self.inverse)[0][:, None] * basis.hat(identity)
        inner = inner + matmul(row, self.inverse)[0][:, None] * identity
        return matmul(ops.transpose(basis.left), matmul(inner, basis.right))


def _is_hard(forward: Reflection, spread: Tensor, terms: Tensor, kappa: Tensor, most: float) -> Tensor:
    """Where rounding is amplified more than `most` times: by the blocks of A⁻¹, by κ and by the cancellation in u = W x.

    Rows with a NaN, as at a pole, are hard too, unless x itself has a NaN.
    """
    # c = 2uᵀx/‖u‖², where the rounding of u is relative to ‖W‖‖x‖.
    cancelled = ops.square(ops.maximum(forward.scale, ops.ones_like(kappa)))
    amplified = spread * terms / ops.abs(kappa) * cancelled
    finite = ops.isfinite(forward.scale * forward.relative)
    # Not the negated comparison: TensorFlow turns that into `>`, which differs for NaN.
    return ops.where(amplified <= most, ops.zeros_like(finite), finite)


def _harmless(hard: Tensor, t: Tensor) -> Tensor:
    """t, but 1 on hard rows, so that nothing infinite enters a total."""
    return ops.where(hard, ops.ones_like(t), t)
