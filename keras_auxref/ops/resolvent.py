"""A⁻¹ = (I − cW)⁻¹ for a batch of scalars c, from one factorisation of W.

The Jacobian, log-determinant and inverse of the auxiliary reflection depend on the vector x through A = I − cW, that is, through
one scalar. `Paired` works in a basis of W, `Rows` without one.
"""

from typing import NamedTuple, Protocol

from keras import ops

from keras_auxref.ops.factors import Factors
from keras_auxref.ops.proof import inverse_by_qr
from keras_auxref.ops.rows import dtype_of, matmul, row_dot
from keras_auxref.typing import Tensor


class Secular(NamedTuple):
    """What one step on the secular equation ‖x(c)‖ = ‖y‖ needs, each of shape (n, 1); x = A⁻¹y, u = Wx, x′ = dx/dc."""

    psi: Tensor  # (‖x‖² − ‖y‖²)/c = 2uᵀx − c‖u‖², without cancellation
    x_squared: Tensor  # ‖x‖²
    slope: Tensor  # xᵀx′
    u_squared: Tensor  # ‖u‖²


class Resolvent(Protocol):
    """(I − cW)⁻¹, row by row. `c` has shape (n, 1), vectors have shape (n, d)."""

    def coordinates(self, y: Tensor) -> tuple[Tensor, ...]:
        """y in the basis in which `secular` works."""

    def secular(self, c: Tensor, coordinates: tuple[Tensor, ...]) -> Secular:
        """The secular equation at c."""

    def solve(self, c: Tensor, b: Tensor) -> Tensor:
        """A⁻¹b."""


def nudge(dtype: str) -> float:
    """Added to a divisor, this avoids division by an exact zero; for any other divisor it vanishes in rounding."""
    return 1e-100 if dtype == "float64" else 1e-12


class Paired:
    """W = BMB⁻¹ with real 2×2 blocks. For a block X = I − cM: X⁻¹ = (I − cM̂)/det X, M̂ the adjugate of that block of M."""

    def __init__(self, factors: Factors, dtype: str) -> None:
        a, b = ops.cast(factors.a, dtype), ops.cast(factors.b, dtype)
        self.right, self.left = ops.cast(factors.right, dtype), ops.cast(factors.left, dtype)
        determinant = a[0] * a[1] + ops.square(b)
        # Both columns of a block have its trace and determinant.
        self.trace, self.product = (ops.concatenate([t, t]) for t in (a[0] + a[1], determinant))
        self.polynomial = ops.stack([ops.ones_like(self.trace), -self.trace, self.product])
        self.diagonal = ops.concatenate([a[0], a[1]])
        self.crossed = ops.concatenate([b, -b])

    def determinant(self, c: Tensor) -> Tensor:
        """det of the block of every column, 1 − c tr M + c² det M, (n, 2h).

        As a product with (1, c, c²): TensorFlow multiplies a column by a row much faster than it broadcasts one over the other,
        and its graph optimiser would merge the 1 of a sum with a later `nudge` and lose it, but leaves products alone.
        """
        return matmul(_powers(c), self.polynomial)

    def size(self, c: Tensor) -> Tensor:
        """1 + |c tr M| + |c² det M|: what `determinant` would be if nothing cancelled."""
        return matmul(ops.abs(_powers(c)), ops.abs(self.polynomial))

    def times(self, z: Tensor) -> Tensor:
        """Mz."""
        return z * self.diagonal + swap(z) * self.crossed

    def hat(self, z: Tensor) -> Tensor:
        """M̂z."""
        return z * swap(self.diagonal) - swap(z) * self.crossed

    def hat_transposed(self, z: Tensor) -> Tensor:
        """M̂ᵀz."""
        return z * swap(self.diagonal) + swap(z) * self.crossed

    def of_u(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """The matrices that give the coordinates ũ = B⁻¹Wx of u = Wx from x, and M̂ũ = det(M) B⁻¹x."""
        return matmul(self.left, w), self.product[:, None] * self.left

    def of_v(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """The matrices that give the coordinates ṽ = BᵀWᵀx of v = Wᵀx from x, and M̂ᵀṽ = det(M) Bᵀx."""
        return matmul(self.right, ops.transpose(w)), self.product[:, None] * self.right

    def coordinates(self, y: Tensor) -> tuple[Tensor, ...]:
        """y, and Mỹ, det(M) ỹ, det(M) M̂ỹ of its coordinates ỹ = B⁻¹y: M̂M = det M."""
        own = matmul(y, ops.transpose(self.left))
        return y, row_dot(y, y), self.times(own), self.product * own, self.product * self.hat(own)

    def secular(self, c: Tensor, coordinates: tuple[Tensor, ...]) -> Secular:
        y, yy, first, second, third = coordinates
        inverse = 1 / (self.determinant(c) + nudge(dtype_of(c)))
        u = (first - c * second) * inverse
        derivative = (u - c * (second - c * third) * inverse) * inverse
        return secular_from_vectors(c, y, yy, matmul(u, self.right), matmul(derivative, self.right))

    def solve(self, c: Tensor, b: Tensor) -> Tensor:
        own = matmul(b, ops.transpose(self.left))
        inverse = 1 / (self.determinant(c) + nudge(dtype_of(c)))
        return matmul((own - c * self.hat(own)) * inverse, self.right)


def _powers(c: Tensor) -> Tensor:
    return ops.concatenate([ops.ones_like(c), c, c * c], axis=-1)


def swap(z: Tensor) -> Tensor:
    """The two halves of the last axis, exchanged: each column is paired with the other of its block."""
    first, second = ops.split(z, 2, axis=-1)
    return ops.concatenate([second, first], axis=-1)


class Rows:
    """One QR factorisation of A per row: for a W without a usable basis, and under XLA in TensorFlow.

    QR instead of LU, because it has a gradient and an XLA kernel and does not raise if one A of the batch is singular.
    """

    def __init__(self, factors: Factors, dtype: str) -> None:
        self.w = ops.cast(factors.w, dtype)

    def coordinates(self, y: Tensor) -> tuple[Tensor, ...]:
        return y, row_dot(y, y), matmul(y, ops.transpose(self.w))

    def inverse(self, c: Tensor) -> Tensor:
        """A⁻¹ for c of shape (..., 1)."""
        return inverse_by_qr(ops.eye(self.w.shape[0], dtype=self.w.dtype) - c[..., None] * self.w)

    def secular(self, c: Tensor, coordinates: tuple[Tensor, ...]) -> Secular:
        y, yy, wy = coordinates
        inverse = self.inverse(c)
        u = apply(inverse, wy)
        return secular_from_vectors(c, y, yy, u, apply(inverse, u))

    def solve(self, c: Tensor, b: Tensor) -> Tensor:
        return apply(self.inverse(c), b)


def apply(matrices: Tensor, rows: Tensor) -> Tensor:
    """A vector for every matrix."""
    return matmul(matrices, rows[..., None])[..., 0]


def secular_from_vectors(c: Tensor, y: Tensor, yy: Tensor, u: Tensor, derivative: Tensor) -> Secular:
    """The scalars of `Secular` from u = A⁻¹Wy and x′ = A⁻¹u, with x = y + cu."""
    uu = row_dot(u, u)
    psi = 2 * row_dot(u, y) + c * uu
    return Secular(psi, yy + c * psi, row_dot(y + c * u, derivative), uu)
