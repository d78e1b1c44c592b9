"""A⁻¹ = (I − cW)⁻¹ for a batch of scalars c, from one factorisation of W.

Jacobian, log-determinant and inverse of the auxiliary reflection depend on the vector x through A = I − cW, that is through one
scalar. Each class below answers the same questions about A for every row of a batch, in a different basis.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import tensorflow as tf

from keras_auxref.ops.factors import EIGEN, EIGEN_WIDE, PER_SAMPLE, SYMMETRIC, Factors


class Secular(NamedTuple):
    """What one step on the secular equation ‖x(c)‖ = ‖y‖ needs, each of shape (n, 1); x = A⁻¹y, u = Wx, x′ = dx/dc."""

    psi: tf.Tensor  # (‖x‖² − ‖y‖²)/c = 2uᵀx − c‖u‖², without cancellation
    x_squared: tf.Tensor  # ‖x‖²
    slope: tf.Tensor  # xᵀx′
    u_squared: tf.Tensor  # ‖u‖²


class Resolvent(Protocol):
    """(I − cW)⁻¹, row by row. `c` has shape (n, 1), vectors have shape (n, d)."""

    symmetric: bool

    def log_abs_det(self, c: tf.Tensor) -> tf.Tensor:
        """log|det A|, shape (n, 1)."""

    def trace(self, c: tf.Tensor) -> tf.Tensor:
        """tr(A⁻¹W), shape (n, 1)."""

    def solve(self, c: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        """A⁻¹b."""

    def solve_transposed(self, c: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        """A⁻ᵀb."""

    def pull_back(self, c: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
        """Σ −g c A⁻ᵀ over the batch: the gradient of Σ g log|det A| with respect to W at fixed c, shape (d, d)."""

    def coordinates(self, y: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """y in the basis in which `secular` works."""

    def secular(self, c: tf.Tensor, coordinates: tuple[tf.Tensor, ...]) -> Secular:
        """The secular equation at c."""


def nudge(dtype: tf.DType) -> float:
    """Added to the diagonal of A, this keeps an exact zero from dividing; it vanishes in the rounding of everything else."""
    return 1e-100 if dtype == tf.float64 else 1e-12


def _one_minus(c: tf.Tensor, eigenvalue: tf.Tensor) -> tf.Tensor:
    """1 − cλ for every row and eigenvalue, as a product with (1, c).

    TensorFlow multiplies a column with a row much faster than it broadcasts one over the other, and its graph optimiser, which
    would merge the 1 of a sum with a later `nudge` and lose that, leaves products alone.
    """
    one_and_c = tf.concat([tf.ones_like(c), c], axis=-1)
    return tf.matmul(one_and_c, tf.stack([tf.ones_like(eigenvalue), -eigenvalue]))


class SymmetricResolvent:
    """W = PΛPᵀ with orthogonal P: O(d) per vector and step of the secular equation."""

    symmetric = True

    def __init__(self, factors: Factors, dtype: tf.DType) -> None:
        self.eigenvalue = tf.cast(factors.eigenvalue[0], dtype)
        self.basis = tf.cast(factors.right[0], dtype)
        self.powers = tf.stack([tf.ones_like(self.eigenvalue), self.eigenvalue, self.eigenvalue**2], axis=1)

    def _diagonal(self, c: tf.Tensor) -> tf.Tensor:
        return _one_minus(c, self.eigenvalue) + nudge(c.dtype)

    def log_abs_det(self, c: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.math.log(tf.abs(self._diagonal(c))), axis=-1, keepdims=True)

    def trace(self, c: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(self.eigenvalue / self._diagonal(c), axis=-1, keepdims=True)

    def solve(self, c: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        return tf.matmul(tf.matmul(b, self.basis, transpose_b=True) / self._diagonal(c), self.basis)

    def solve_transposed(self, c: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        return self.solve(c, b)

    def pull_back(self, c: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
        diagonal = tf.reduce_sum(-g * c / self._diagonal(c), axis=0)
        return tf.matmul(self.basis * diagonal[:, None], self.basis, transpose_a=True)

    def coordinates(self, y: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (tf.square(tf.matmul(y, self.basis, transpose_b=True)),)

    def secular(self, c: tf.Tensor, coordinates: tuple[tf.Tensor, ...]) -> Secular:
        inverse = 1 / self._diagonal(c)
        squares = coordinates[0] * tf.square(inverse)
        x_squared, ux, u_squared = tf.split(tf.matmul(squares, self.powers), 3, axis=-1)
        slope = tf.matmul(squares * inverse, self.powers[:, 1:2])
        return Secular(2 * ux - c * u_squared, x_squared, slope, u_squared)


class EigenResolvent:
    """W = PΛP⁻¹ in real arithmetic: pairs of real and imaginary parts, one of each conjugate pair of eigenvalues."""

    symmetric = False

    def __init__(self, factors: Factors, dtype: tf.DType) -> None:
        d = factors.w.shape[0]
        self.real, self.imaginary = tf.unstack(tf.cast(factors.eigenvalue, dtype))
        self.weight = tf.cast(factors.weight, dtype)
        # (2m, d): real parts above imaginary parts, so that one product with a real batch gives both.
        self.right = tf.reshape(tf.cast(factors.right, dtype), [-1, d])
        self.left = tf.reshape(tf.cast(factors.left, dtype), [-1, d])
        # Re(Σ weight p z) = Σ weight (Re p Re z − Im p Im z)
        signs = tf.concat([self.weight, -self.weight], axis=0)[:, None]
        self.from_right, self.from_left = signs * self.right, signs * self.left
        self.shift = self.real**2 + self.imaginary**2

    def _diagonal(self, c: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Re D, Im D and 1/|D|² of D = 1 − cΛ."""
        real = _one_minus(c, self.real)
        imaginary = tf.matmul(c, -self.imaginary[None])
        return real, imaginary, 1 / (tf.square(real) + tf.square(imaginary) + nudge(c.dtype) ** 2)

    def _reciprocal(self, c: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Re 1/D and Im 1/D."""
        real, imaginary, inverse = self._diagonal(c)
        return real * inverse, -imaginary * inverse

    def _divide(self, c: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
        """z / D for z of shape (n, 2m)."""
        a, b = tf.split(z, 2, axis=-1)
        return tf.concat(_product((a, b), self._reciprocal(c)), axis=-1)

    def log_abs_det(self, c: tf.Tensor) -> tf.Tensor:
        inverse = self._diagonal(c)[2]
        return -0.5 * tf.reduce_sum(self.weight * tf.math.log(inverse), axis=-1, keepdims=True)

    def trace(self, c: tf.Tensor) -> tf.Tensor:
        inverse = self._diagonal(c)[2]
        return tf.reduce_sum(self.weight * (self.real - c * self.shift) * inverse, axis=-1, keepdims=True)

    def solve(self, c: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        return tf.matmul(self._divide(c, tf.matmul(b, self.left, transpose_b=True)), self.from_right)

    def solve_transposed(self, c: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        return tf.matmul(self._divide(c, tf.matmul(b, self.right, transpose_b=True)), self.from_left)

    def pull_back(self, c: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
        real, imaginary, inverse = self._diagonal(c)
        gc = -g * c * inverse
        a = self.weight * tf.reduce_sum(gc * real, axis=0)
        b = -self.weight * tf.reduce_sum(gc * imaginary, axis=0)
        # Re(q δ pᵀ) with δ = a + ib, for every kept pair
        right_real, right_imaginary = tf.split(self.right, 2, axis=0)
        turned = tf.concat(
            [a[:, None] * right_real - b[:, None] * right_imaginary, -b[:, None] * right_real - a[:, None] * right_imaginary],
            axis=0,
        )
        return tf.matmul(self.left, turned, transpose_a=True)

    def coordinates(self, y: tf.Tensor) -> tuple[tf.Tensor, ...]:
        a, b = (tf.matmul(y, half, transpose_b=True) for half in tf.split(self.left, 2, axis=0))
        return (y, *_product((a, b), (self.real, self.imaginary)))  # y and Λ P⁻¹ y

    def secular(self, c: tf.Tensor, coordinates: tuple[tf.Tensor, ...]) -> Secular:
        reciprocal = self._reciprocal(c)
        u_coordinates = _product(coordinates[1:], reciprocal)
        derivative = _product(u_coordinates, reciprocal)
        back = tf.split(self.from_right, 2, axis=0)
        u, x_prime = (tf.matmul(a, back[0]) + tf.matmul(b, back[1]) for a, b in (u_coordinates, derivative))
        return secular_from_vectors(c, coordinates[0], u, x_prime)


def _product(x: Sequence[tf.Tensor], y: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """The complex product of two pairs of real and imaginary parts."""
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


class PerSampleResolvent:
    """One QR factorisation of A per vector: for a W without usable eigenvectors, under XLA, and for second derivatives.

    QR and not LU, because it has a gradient and an XLA kernel and does not raise where one A of the batch is singular.
    """

    symmetric = False

    def __init__(self, w: tf.Tensor) -> None:
        self.w = w

    def _qr(self, c: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.linalg.qr(tf.eye(self.w.shape[0], dtype=self.w.dtype) - c[..., None] * self.w)

    def log_abs_det(self, c: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.math.log(tf.abs(tf.linalg.diag_part(self._qr(c)[1]))), axis=-1, keepdims=True)

    def trace(self, c: tf.Tensor) -> tf.Tensor:
        q, r = self._qr(c)
        return tf.linalg.trace(tf.linalg.triangular_solve(r, tf.matmul(q, self.w, transpose_a=True), lower=False))[..., None]

    def solve(self, c: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        q, r = self._qr(c)
        return tf.linalg.triangular_solve(r, tf.matmul(q, b[..., None], transpose_a=True), lower=False)[..., 0]

    def solve_transposed(self, c: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        q, r = self._qr(c)
        return tf.matmul(q, tf.linalg.triangular_solve(r, b[..., None], lower=False, adjoint=True))[..., 0]

    def pull_back(self, c: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
        q, r = self._qr(c)
        inverse = tf.linalg.triangular_solve(r, tf.linalg.matrix_transpose(q), lower=False)
        return tf.reduce_sum((-g * c)[..., None] * tf.linalg.matrix_transpose(inverse), axis=0)

    def coordinates(self, y: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return y, tf.matmul(y, self.w, transpose_b=True)

    def secular(self, c: tf.Tensor, coordinates: tuple[tf.Tensor, ...]) -> Secular:
        y, wy = coordinates
        u = self.solve(c, wy)
        return secular_from_vectors(c, y, u, self.solve(c, u))


def secular_from_vectors(c: tf.Tensor, y: tf.Tensor, u: tf.Tensor, derivative: tf.Tensor) -> Secular:
    """The scalars of `Secular` from u = A⁻¹Wy and x′ = A⁻¹u, with x = y + cu."""
    uu, uy = row_dot(u, u), row_dot(u, y)
    x_squared = row_dot(y, y) + c * (2 * uy + c * uu)
    return Secular(2 * uy + c * uu, x_squared, row_dot(y, derivative) + c * row_dot(u, derivative), uu)


def row_dot(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """aᵀb for every row, shape (n, 1)."""
    d = a.shape[-1]
    if d is not None and d <= 16:  # a reduction over so short an axis costs more than a product with ones
        return tf.matmul(a * b, tf.ones([d, 1], a.dtype))
    return tf.reduce_sum(a * b, axis=-1, keepdims=True)


def resolvent_of(factors: Factors, route: int, dtype: tf.DType) -> tuple[Resolvent, tf.DType]:
    """The resolvent for one of the routes of `Factors`, and the dtype to batch in."""
    if route == SYMMETRIC:
        return SymmetricResolvent(factors, dtype), dtype
    if route == EIGEN:
        return EigenResolvent(factors, dtype), dtype
    if route == EIGEN_WIDE:
        return EigenResolvent(factors, tf.float64), tf.float64
    assert route == PER_SAMPLE
    return PerSampleResolvent(factors.w), tf.float64
