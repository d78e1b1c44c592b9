import re

import numpy as np
import pytest

from keras_auxref import kernels, ops
from keras_auxref.kernels import certify
from tests.support import certified, orthogonal


@pytest.mark.parametrize("d", [1, 2, 7, 40])
@pytest.mark.parametrize("sign", [1, -1])
def test_proves_what_the_theorem_proves(rng, d, sign):
    w = sign * 3 * certified(d, 1.9, 5.0, rng)
    proof = certify(w)
    assert proof.invertible
    assert proof.condition == pytest.approx(1.9 if d > 1 else 1.0, rel=1e-9)
    assert "Proven" in proof.reason


def test_the_bracket_holds_c_of_every_vector(rng):
    w = certified(5, 1.7, 2.0, rng)
    low, high = certify(w).bracket
    x = rng.normal(size=(20_000, 5))
    u = x @ w.T
    c = 2 * (u * x).sum(-1) / (u * u).sum(-1)
    assert low <= c.min() < low + 0.2 * (high - low)
    assert high - 0.2 * (high - low) < c.max() <= high


@pytest.mark.parametrize(
    ("w", "reason"),
    [
        (np.diag([1.0, 2.0]), "not below 2"),
        (np.diag([1.0, 2.5]), "κ.S. = 2.5"),
        (np.diag([1.0, -1.0]), "not definite"),
        (np.diag([1.0, 0.0]), "singular"),
        (np.zeros((2, 2)), "singular"),
        (np.diag([1.0, 1e-17]), "singular|not below"),
        (np.diag([1.0, np.nan]), "not finite"),
        (np.array([[0.0, 1.0], [-1.0, 0.0]]), "not definite"),
    ],
)
def test_declines_otherwise_and_says_why(w, reason):
    proof = certify(w)
    assert not proof.invertible
    assert proof.reason.startswith("Not proven")
    assert re.search(reason, proof.reason)


def test_never_guesses_next_to_the_bound():
    """Within rounding of 2 it says no, although κ < 2 in exact arithmetic; a little further away it says yes."""
    assert not certify(np.diag([1.0, np.nextafter(2.0, 0)])).invertible
    assert certify(np.diag([1.0, 2 - 1e-9])).invertible


def test_large_skew_parts_widen_the_error_bound(rng):
    """W has lost the digits that would prove anything about S."""
    assert certify(certified(6, 1.5, 1e3, rng)).invertible
    assert not certify(certified(6, 1.5, 1e15, rng)).invertible


def test_orthogonal_maps_without_eigenvalue_one_are_in_the_family(rng):
    for d in (2, 3, 8):
        good, bad = (np.eye(d) - orthogonal(d, rng, determinant=s * (-1) ** d) for s in (1, -1))
        assert certify(good).condition == pytest.approx(1, rel=1e-6)
        assert not certify(bad).invertible


def test_a_proven_matrix_has_one_preimage_and_an_unproven_one_may_have_three():
    y = np.array([0.1, 1.0])
    assert certify(np.diag([1.0, 1.9])).invertible
    assert len(ops.preimages(y, np.diag([1.0, 1.9]))) == 1
    assert not certify(np.diag([1.0, 3.0])).invertible
    assert len(ops.preimages(y, np.diag([1.0, 3.0]))) == 3


def test_every_kernel_answers(rng):
    w = certified(3, 1.5, 1.0, rng)
    for name in ("free", "spectral", "relaxed_cayley"):
        assert kernels.get(name).certificate(w) == certify(w)
    with pytest.raises(ValueError, match=r"square matrix.*Received: \(2, 3\)"):
        certify(np.ones((2, 3)))
