"""The Jacobian of the auxiliary reflection (paper, Theorem 3 and Lemma 4), at a point and without forming it.

    J = H(u) N,      N = A + 2 u vᵀ/‖u‖²,      A = I − c W,      u = W x,   v = Wᵀx,   c = 2 uᵀx/‖u‖².

Lemma 4 writes det J with A⁻¹, which is infinite where A is singular, and J need not be. Here everything is written with N⁻¹:
whatever is asked of J stays finite where J does. `BasisPoint` has N⁻¹ from a basis of W, with the pole of A taken out by hand;
`RowPoint` factors N itself, one matrix per row.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops._checks import as_tensor, check_vectors_and_matrix
from keras_auxref.ops._rows import dtype_of, matmul, row_dot, size_of
from keras_auxref.ops.factors import Factors, Route
from keras_auxref.ops.reflect import Reflection, reflection
from keras_auxref.ops.resolvent import Paired, dtype_for, nudge, resolvent_of, swap
from keras_auxref.typing import Tensor

POLE = 1 / 32
"""A row is at a pole of A where the determinant of a block of I − cM is smaller than this."""


def jacobian(x: Tensor, w: Tensor) -> Tensor:
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
    """Questions about N = I − cW + β u vᵀ, β = 2/‖u‖², for every row of a batch, for W and x of about 1.

    On null rows β = 0 and c = 0, so that N = I and nothing else has to know of them.
    """

    forward: Reflection
    w: Tensor
    beta: Tensor
    log_abs_det: Tensor

    def quantities(self) -> "Quantities":
        """What the gradient of log|det N| is made of."""

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


def at_points(
    function: Callable[["Point", Tensor], Any],
    g: Tensor,
    forward: Reflection,
    w: Tensor,
    factors: Factors,
    route: Route,
    *,
    wide: bool = False,
    careful: bool = True,
) -> Any:
    """function(point, g) → (a nest of rows, a nest of totals that are linear in g), at every row of a batch.

    In the dtype of `forward`, or in float64 where the route or the caller asks for that. Rows at a pole of A are few, and go
    through the function a second time, alone and with care; without `careful` they stay with what g = 0 gives.
    """
    dtype = dtype_for(route, dtype_of(w), wide=wide)
    if dtype != dtype_of(w):
        forward, w, g = _cast(forward, w, dtype), ops.cast(w, dtype), ops.cast(g, dtype)
    if route.basis == "rows":
        return function(RowPoint(forward, w), g)
    basis = resolvent_of(factors, route, dtype)
    point = BasisPoint(forward, w, basis)
    live = 1 - ops.cast(point.poles, dtype)
    rows, total = function(point, live * g)
    if not careful:
        return rows, total

    def carefully(g: Tensor, forward: Reflection) -> Any:
        return function(BasisPoint(forward, w, basis, careful=True), g)

    return backend.only_rows(point.poles, carefully, rows, g, forward, total=total)


def _cast(forward: Reflection, w: Tensor, dtype: str) -> Reflection:
    """The reflection again in another dtype. Which rows are null is judged in the precision of the input."""
    live = ops.cast(forward.scale != 0, dtype)
    forward = reflection(ops.cast(forward.unit, dtype), ops.cast(w, dtype))
    return forward._replace(scale=live * forward.scale, relative=live * forward.relative)


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
    """N by one QR factorisation per row."""

    def __init__(self, forward: Reflection, w: Tensor) -> None:
        self.forward, self.w = forward, w
        self.beta = forward.factor * ops.square(forward.scale)
        self.v = matmul(forward.unit, w)
        outer = forward.direction[..., :, None] * ((forward.factor * forward.scale) * self.v)[..., None, :]
        identity = ops.eye(w.shape[0], dtype=w.dtype)
        self.qr = ops.qr(identity - forward.coefficient[..., None] * w + outer)
        diagonal = ops.diagonal(self.qr[1], axis1=-2, axis2=-1)
        self.log_abs_det = ops.sum(ops.log(ops.abs(diagonal)), axis=-1, keepdims=True)

    @functools.cached_property
    def inverse(self) -> Tensor:
        """N⁻¹."""
        return ops.solve_triangular(self.qr[1], ops.swapaxes(self.qr[0], -1, -2))

    def quantities(self) -> Quantities:
        inverse, u = self.inverse, matmul(self.forward.unit, ops.transpose(self.w))
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


class BasisPoint:
    """N from W = BMB⁻¹, M of blocks M_j, elementwise in the coordinates ũ = B⁻¹u, ṽ = Bᵀv (Lemma 4).

    With the determinants δ_j of the blocks X_j = I − cM_j of A, their adjugates adj X_j = I − cM̂_j and τ_j = ṽ_jᵀ adj(X_j) ũ_j,

        κ = 1 + β Σ τ_j/δ_j       det N = κ Π δ_j       N⁻¹u = B (adj(X) ũ/δ)/κ       N⁻ᵀv = B⁻ᵀ (adj(X)ᵀ ṽ/δ)/κ.

    With `careful`, the block with the smallest δ_k, the pivot, is kept out of all divisions, so that a pole of A does no harm:

        κ′ = 1 + β Σ_{j≠k} τ_j/δ_j       ρ = δ_k κ′ + β τ_k        det N = ρ Π_{j≠k} δ_j       κ = ρ/δ_k.

    For the block of the pivot in N⁻¹ the terms that are infinite at δ_k = 0 cancel by
    (ṽᵀYũ) Y − Yũ ṽᵀY = det(Y) adj(ũṽᵀ), which holds for every 2×2 matrix Y; for blocks of one both sides are 0. Without care
    there is no pivot, and δ_k is 1 in the same formulas.
    """

    def __init__(self, forward: Reflection, w: Tensor, basis: Any, *, careful: bool = False) -> None:
        self.forward, self.w, self.basis, self.careful = forward, w, basis, careful
        self.paired = isinstance(basis, Paired)
        self.beta, self.c = forward.factor * ops.square(forward.scale), forward.coefficient
        self.u, self.hat_u = (self._coordinates(matrix) for matrix in basis.of_u(w))
        self.v = self._coordinates(basis.of_v(w)[0]) if self.paired else self.u
        self.adjugate_u = self.u - self.c * self.hat_u if self.paired else self.u
        determinant = basis.determinant(self.c)
        if careful:
            self._choose_pivot(determinant)
        else:
            self.poles = ops.min(ops.abs(determinant), axis=-1, keepdims=True) < POLE
            pole = ops.cast(self.poles, w.dtype)
            determinant = determinant * (1 - pole) + pole  # whatever, but finite
            self.inverse, self.smallest = 1 / determinant, 1
        tau = self.v * self.adjugate_u
        self.kappa = 1 + self.beta * row_dot(tau, self.inverse)
        self.rho = self.smallest * self.kappa
        magnitude = ops.abs(determinant)
        if careful:
            self.rho = self.rho + self.beta * row_dot(tau, self.pivot)
            magnitude = (1 - self.pivot) * magnitude + self.pivot + nudge(dtype_of(w))
        logs = ops.sum(ops.log(magnitude), axis=-1, keepdims=True) / basis.columns
        self.log_abs_det = logs + ops.log(ops.abs(self.rho))

    def _coordinates(self, matrix: Tensor | None) -> Tensor:
        return None if matrix is None else matmul(self.forward.unit, ops.transpose(matrix))

    def _choose_pivot(self, determinant: Tensor) -> None:
        basis, dtype = self.basis, determinant.dtype
        blocks = determinant.shape[-1] // basis.columns
        smallest = ops.argmin(ops.abs(determinant[:, :blocks]), axis=-1)
        pivot = ops.one_hot(smallest, blocks, dtype=dtype)
        self.smallest = ops.sum(pivot * determinant[:, :blocks], axis=-1, keepdims=True)
        self.pivot = ops.tile(pivot, (1, basis.columns))
        self.inverse = (1 - self.pivot) / (determinant + self.pivot + nudge(dtype_of(self.w)))

    @functools.cached_property
    def adjugate_v(self) -> Tensor:
        """adj(X)ᵀṽ."""
        return self.v - self.c * self._coordinates(self.basis.of_v(self.w)[1]) if self.paired else self.v

    @functools.cached_property
    def ratio(self) -> Tensor:
        """δ_k/δ_j, 1 for the pivot."""
        return self.pivot + self.smallest * self.inverse if self.careful else self.inverse

    def quantities(self) -> Quantities:
        basis, scaled = self.basis, self.ratio / self.rho
        p = scaled * self.adjugate_u
        # Of a block: tr(adj(X) M) = tr M − 2c det M, and ṽᵀ adj(X) M adj(X) ũ = ṽᵀ adj(X) (M − c det M) ũ.
        if self.paired:
            through = self.adjugate_v * basis.times(p)
            inner = basis.trace - 2 * (self.c * basis.product)
            trace = row_dot(inner, self.inverse) / 2
        else:
            through, inner, trace = self.v * p * basis.trace, basis.trace, matmul(self.inverse, basis.trace[:, None])
        trace = trace - self.beta * row_dot(through, self.inverse)
        if self.careful:
            own = ops.sum(inner * self.pivot, axis=-1, keepdims=True) / basis.columns
            at_pivot = self.kappa * own
            if self.paired:
                at_pivot = at_pivot + self.beta * row_dot(self.pivot, self.v * self.hat_u)
            trace = trace + at_pivot / self.rho
        t = matmul(scaled * self.adjugate_v, basis.left)
        return Quantities(matmul(p, basis.right), t, matmul(p, basis.of_v(self.w)[0]), row_dot(self.v, p), trace)

    def solve(self, z: Tensor) -> Tensor:
        own = matmul(z, ops.transpose(self.basis.left))
        adjugate = own - self.c * self.basis.hat(own) if self.paired else own
        return matmul(self._solve(own, adjugate, self.u, self.v, self.adjugate_u), self.basis.right)

    def solve_transposed(self, z: Tensor) -> Tensor:
        own = matmul(z, ops.transpose(self.basis.right))
        adjugate = own - self.c * self.basis.hat_transposed(own) if self.paired else own
        return matmul(self._solve(own, adjugate, self.v, self.u, self.adjugate_v), self.basis.left)

    def _solve(self, z: Tensor, adjugate_z: Tensor, u: Tensor, v: Tensor, adjugate_u: Tensor) -> Tensor:
        """(X + β u vᵀ)⁻¹z in coordinates; with u and v exchanged and adjugates transposed, for the transpose."""
        sigma = v * adjugate_z
        rest = row_dot(sigma, self.inverse)
        if not self.careful:
            return (adjugate_z - adjugate_u * (self.beta * rest / self.rho)) * self.inverse
        theta = self.smallest * rest + row_dot(sigma, self.pivot)
        away = (adjugate_z - adjugate_u * (self.beta * theta / self.rho)) * self.inverse
        at_pivot = self.kappa * adjugate_z - (self.beta * rest) * adjugate_u
        if self.paired:  # β adj(u vᵀ) z
            crossed = swap(u) * z
            at_pivot = at_pivot + self.beta * swap(v) * (crossed - swap(crossed))
        return away + self.pivot * at_pivot / self.rho

    def pull_back(self, weight: Tensor) -> Tensor:
        basis, row = self.basis, ops.transpose(weight)
        outer = weight * self.beta / self.rho
        diagonal = self.inverse + self.pivot * (self.kappa / self.rho) if self.careful else self.inverse
        inner = -matmul(ops.transpose(outer * self.ratio * self.adjugate_v), self.inverse * self.adjugate_u)
        identity = ops.eye(self.u.shape[-1], dtype=self.u.dtype)
        on_diagonal = matmul(row, diagonal)[0]
        if self.paired:
            inner = inner - matmul(row * ops.transpose(self.c), diagonal)[0][:, None] * basis.hat(identity)
        if self.careful:
            rest = outer * self.inverse * self.adjugate_v
            inner = inner - matmul(ops.transpose(rest), self.pivot * self.adjugate_u)
        if self.careful and self.paired:
            kept = outer * self.pivot
            on_diagonal = on_diagonal + ops.sum(kept * swap(self.u * self.v), axis=0)
            inner = inner - ops.sum(kept * self.v * swap(self.u), axis=0)[:, None] * swap(identity)
        inner = inner + on_diagonal[:, None] * identity
        return matmul(ops.transpose(basis.left), matmul(inner, basis.right))
