"""Matrices with orthonormal columns, by reflections and completed to rotations."""

import numpy as np
import pytest

from keras_auxref.ops.stiefel import complete, stiefel_matrix, stiefel_vectors


def columns(m: int, k: int, seed: int = 0) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(m, k)))[0]


def starts() -> list[np.ndarray]:
    """Random columns, the identity and permutations of it, signs, and a column next to e₁."""
    near = np.linalg.qr(np.eye(7, 3) + 1e-9 * np.random.default_rng(1).normal(size=(7, 3)))[0]
    near *= np.sign(np.diag(near))
    return [columns(7, 3), columns(7, 6), columns(2, 1), np.eye(7, 3), -np.eye(7, 3), np.eye(7)[:, [6, 0, 1]], near]


@pytest.mark.parametrize("q", starts(), ids=lambda q: str(q.shape))
def test_vectors_give_the_matrix_back(q: np.ndarray) -> None:
    v = stiefel_vectors(q)
    assert v.shape == q.shape
    np.testing.assert_allclose(np.linalg.norm(v, axis=0), 1)  # none is zero, which would never train
    product = np.eye(len(q))
    for column in v.T:
        product = product @ (np.eye(len(q)) - 2 * np.outer(column, column))
    np.testing.assert_allclose(product[:, : q.shape[1]], q, atol=1e-13)
    np.testing.assert_allclose(stiefel_matrix(v, q.shape[1]), q, atol=1e-13)


@pytest.mark.parametrize("q", starts(), ids=lambda q: str(q.shape))
def test_a_rotation_has_these_columns(q: np.ndarray) -> None:
    u = complete(q)
    np.testing.assert_allclose(u.T @ u, np.eye(len(q)), atol=1e-13)
    np.testing.assert_allclose(np.linalg.det(u), 1)
    np.testing.assert_allclose(u[:, : q.shape[1]], q, atol=1e-13)


def test_the_identity_is_completed_to_the_identity() -> None:
    np.testing.assert_allclose(complete(np.eye(7, 4)), np.eye(7), atol=1e-13)


def test_other_matrices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Expected a matrix Q with orthonormal rows or columns"):
        stiefel_vectors(np.ones((4, 2)))
