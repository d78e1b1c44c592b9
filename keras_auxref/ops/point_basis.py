"""The Jacobian at a point in a basis of W (paper, Lemma 4): elementwise for every row, after one factorisation for all.

N⁻¹ and det N follow from A⁻¹ = (I − cW)⁻¹, by the Sherman–Morrison formula and the matrix determinant lemma. A⁻¹ is infinite
where A is singular, although J need not be: rows near such a pole are marked as `hard`, and `point_rows.py` computes them.
"""

import functools

from keras import ops

from keras_auxref.ops.factors import Factors
from keras_auxref.ops.point import Quantities
from keras_auxref.ops.reflect import Reflection
from keras_auxref.ops.resolvent import Paired
from keras_auxref.ops.rows import dtype_of, largest, matmul, row_dot
from keras_auxref.typing import Tensor

MOST = {"float32": 1e3, "float64": 1e4}
"""For each dtype of the input, how much rounding may be amplified before a row is computed without a basis."""


class DiagonalPoint:
    """N from W = BΛBᵀ, elementwise in the coordinates ũ = Bᵀu (Lemma 4). With δ = 1 − cλ,

        κ = 1 + β Σ ũ²/δ       det N = κ Π δ       N⁻¹u = N⁻ᵀv = B (ũ/δ)/κ.

    Rows where this loses too many digits, because a δ, κ or u is small, are `hard`: their results are finite but meaningless.
    """

    def __init__(self, forward: Reflection, w: Tensor, factors: Factors, most: float) -> None:
        self.forward, self.w = forward, w
        self.eigenvalue, self.basis = factors.eigen(dtype_of(w))
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
