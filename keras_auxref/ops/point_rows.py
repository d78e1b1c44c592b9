"""The Jacobian at a point without a basis of W: one QR factorisation of N per row, finite also where A = I − cW is singular.

This is the paragraph "Poles" of "Jacobian and log-determinant" in docs/mathematics.md.
"""

import functools

from keras import ops

from keras_auxref.ops.accurate import accurate_product, accurate_reflection
from keras_auxref.ops.point import Quantities
from keras_auxref.ops.rows import dtype_of, epsilon, matmul, nonzero, row_dot
from keras_auxref.typing import Tensor


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
