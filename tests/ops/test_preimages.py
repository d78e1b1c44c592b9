"""The theorem: κ(S) < 2 means exactly one preimage, for every skew part; 2 is sharp."""

import numpy as np
import pytest

from keras_auxref import ops
from tests.support import certified, orthogonal, reflect, residual, skew


@pytest.mark.parametrize("d", [1, 2, 3, 5, 8])
def test_inside_the_bound_there_is_exactly_one(d):
    rng = np.random.default_rng(d)
    for _ in range(8):
        w = certified(d, rng.uniform(1, 1.999), rng.choice([0.0, 0.3, 3.0, 30.0]), rng) * rng.choice([-1, 1e-3, 1, 1e3])
        ys = rng.normal(size=(4, d))
        for y, inverse in zip(ys, ops.inverse(ys, w), strict=True):
            x = ops.preimages(y, w)
            assert x.shape == (1, d)
            np.testing.assert_allclose(x[0], inverse, atol=1e-7 * np.linalg.norm(y))


@pytest.mark.parametrize("condition", [2.01, 2.2, 3.0])
def test_just_outside_the_bound_there_is_a_second_one(condition):
    """On the plane of the two extreme eigenvectors θ goes to 2 atan(κ tan θ) − θ + π, no longer monotone.

    Its derivative at θ = π/2 is 2/κ − 1 < 0: next to that angle three vectors share one image.
    """
    w = np.diag([1.0, condition])
    theta = np.pi / 2 + 1e-2 * np.sqrt(condition - 2)
    y = reflect(np.array([[np.cos(theta), np.sin(theta)]]), w)[0]
    x = ops.preimages(y, w)
    assert len(x) == 3
    assert residual(x, np.tile(y, (3, 1)), w).max() < 1e-8


@pytest.mark.parametrize("seed", range(6))
def test_finds_every_preimage_that_a_search_finds(seed):
    """d = 2: f is a map of the circle, and sign changes of the angle on a fine grid count its preimages."""
    rng = np.random.default_rng(seed)
    w = np.diag([1.0, 6.0]) @ rng.normal(size=(2, 2))
    target = rng.uniform(-np.pi, np.pi)
    theta = np.linspace(-np.pi, np.pi, 200_001)
    f = reflect(np.stack([np.cos(theta), np.sin(theta)], axis=1), w)
    distance = (np.arctan2(f[:, 1], f[:, 0]) - target + np.pi) % (2 * np.pi) - np.pi
    crossings = (np.sign(distance[1:]) != np.sign(distance[:-1])) & (np.abs(distance[1:] - distance[:-1]) < 1)
    x = ops.preimages(np.array([np.cos(target), np.sin(target)]), w)
    assert len(x) == crossings.sum()


def test_includes_the_vector_that_f_came_from(rng):
    for _ in range(20):
        w, x = rng.normal(size=(6, 6)), rng.normal(size=6)
        found = ops.preimages(reflect(x[None], w)[0], w)
        assert len(found) % 2 == 1
        assert np.linalg.norm(found - x, axis=1).min() < 1e-6
        assert residual(found, np.tile(reflect(x[None], w)[0], (len(found), 1)), w).max() < 1e-8


def test_hard_case_where_a_is_singular_at_a_root():
    """W = diag(1, 3), y = e₂: c = 1 makes A = diag(0, −2), and (±√3/2, −1/2) both go to e₂."""
    x = ops.preimages(np.array([0.0, 1.0]), np.diag([1.0, 3.0]))
    expected = {(0.0, -1.0), (0.866025, -0.5), (-0.866025, -0.5)}
    assert {tuple(float(v) + 0.0 for v in np.round(row, 6)) for row in x} == expected


def test_orthogonal_maps_and_zero(rng):
    u, y = orthogonal(5, rng), rng.normal(size=5)
    np.testing.assert_allclose(ops.preimages(y, np.eye(5) - u), [u.T @ y], atol=1e-9)
    np.testing.assert_array_equal(ops.preimages(np.zeros(3), rng.normal(size=(3, 3))), np.zeros((1, 3)))
    np.testing.assert_array_equal(ops.preimages(y, np.zeros((5, 5))), [y])
    np.testing.assert_allclose(ops.preimages(y, skew(5, 1.0, rng) + np.eye(5)).shape, (1, 5))


def test_takes_one_vector():
    with pytest.raises(ValueError, match=r"one vector.*Expected shape \(3,\).*Received: \(2, 3\)"):
        ops.preimages(np.ones((2, 3)), np.eye(3))
