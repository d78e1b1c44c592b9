"""Matrices with orthonormal columns: the first k columns of an orthogonal matrix, without the others."""

import numpy as np
from keras import ops

from keras_auxref.ops.checks import check_orthonormal
from keras_auxref.ops.householder_product import householder_product
from keras_auxref.typing import Tensor


def stiefel_matrix(v: Tensor, k: int) -> Tensor:
    """The first k columns of U = H(v₁)…H(v_r), of shape (m, k), for v of shape (m, r) with k < m.

    It costs O(m k r) and does not form the m×m matrix. With r = k, every matrix with orthonormal columns has this form.
    """
    return ops.transpose(householder_product(v, ops.eye(k, v.shape[0], dtype=v.dtype)))  # the rows are U e_i


def stiefel_vectors(q: np.ndarray) -> np.ndarray:
    """Householder vectors of k < m orthonormal columns: v of shape (m, k) with H(v₁)…H(v_k) [I; 0] = Q, in NumPy and float64.

    QR by reflections that map each column to +e_i. A column that is already e_i gets the reflection in the last axis, which
    does not change it: a zero vector would not either, but has no gradient and would never be trained.
    """
    check_orthonormal(q)
    r = q.astype(np.float64)
    m, k = r.shape
    vectors = np.zeros((m, k))
    for i in range(k):
        column = r[i:, i] / np.linalg.norm(r[i:, i])
        tail = float(column[1:] @ column[1:])
        v = column.copy()
        # column − e₁ without the cancellation in column[0] − 1.
        v[0] = -tail / (1 + column[0]) if column[0] > 0 else column[0] - 1
        if float(v @ v) <= 1e-24:
            v = np.eye(1, m - i, m - i - 1)[0]
        v /= np.linalg.norm(v)
        r[i:, i:] -= np.outer(2 * v, v @ r[i:, i:])
        vectors[i:, i] = v
    return vectors


def complete(q: np.ndarray) -> np.ndarray:
    """A rotation of shape (m, m) whose first k < m columns are those of Q, in NumPy and float64.

    It is as close to the identity as possible, so it has the eigenvalue −1 only if it must.
    """
    vectors = stiefel_vectors(q)
    m, k = q.shape
    u = np.eye(m)
    for v in vectors.T[::-1]:
        u -= np.outer(2 * v, v @ u)
    # The other columns may be rotated among themselves: make their lower part symmetric and nonnegative.
    left, _, right = np.linalg.svd(u[k:, k:])
    signs = np.ones(m - k)
    signs[-1] = (-1) ** k * np.sign(np.linalg.det(left) * np.linalg.det(right))  # k reflections have determinant (−1)ᵏ
    u[:, k:] = u[:, k:] @ (right.T * signs) @ left.T
    return u
