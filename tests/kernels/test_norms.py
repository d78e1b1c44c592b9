import numpy as np
import pytest
import tensorflow as tf

from keras_auxref.kernels import norms
from tests.support import differences, gradients, orthogonal, relative, skew


def _gram(d, rng, kind):
    if kind == "random":
        v = rng.normal(size=(d, d))
        return v @ v.T
    if kind == "rank one":
        v = rng.normal(size=d)
        return np.outer(v, v)
    return np.eye(d)  # "flat": the worst case for the bound by powers, and a repeated largest eigenvalue


@pytest.mark.parametrize("kind", ["random", "rank one", "flat"])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_is_never_below_and_close_above(rng, dtype, monkeypatch, kind, exact, scale):
    d = 40
    monkeypatch.setattr(norms, "EXACT_UP_TO", d if exact else 0)
    gram = (scale * _gram(d, rng, kind)).astype(dtype)
    true = np.linalg.eigvalsh(gram.astype("float64"))[-1]
    ratio = float(norms.top_eigenvalue(tf.constant(gram))) / true
    assert 1 <= ratio < (1 + 1e-5 if exact else norms.slack(d) * 1.001)


def test_the_bound_by_powers_is_within_eleven_percent_at_784(rng):
    v = (rng.normal(size=(784, 784)) / 28).astype("float32")
    ratio = float(norms.spectral_norm(tf.constant(v))) / np.linalg.norm(v.astype("float64"), 2)
    assert 1 <= ratio < 1.11


@pytest.mark.parametrize("exact", [True, False])
def test_gradient_matches_finite_differences(rng, monkeypatch, exact):
    monkeypatch.setattr(norms, "EXACT_UP_TO", 4 if exact else 0)
    a = rng.normal(size=(4, 4))
    (computed,) = gradients(norms.spectral_norm, [a], 1.0)[1:]
    (expected,) = differences(norms.spectral_norm, [a], np.ones(()))
    assert relative(computed, expected) < 1e-6


def test_shrink_is_the_identity_inside_and_bounded_outside(rng):
    a = skew(5, 1.0, rng)
    value, gradient = gradients(lambda a: norms.shrink_to(a, 2.0), [a], np.ones((5, 5)))
    np.testing.assert_array_equal(value, a)
    np.testing.assert_allclose(gradient, 1, atol=1e-12)
    for factor in (2.0, 3.0, 1e8, 1e30):
        assert np.linalg.norm(norms.shrink_to(tf.constant(factor * a), 2.0).numpy(), 2) <= 2.0
    value, gradient = gradients(lambda a: norms.shrink_to(a, 2.0), [np.zeros((5, 5))], np.ones((5, 5)))
    np.testing.assert_array_equal(gradient, 1)


def test_gradient_at_a_repeated_largest_eigenvalue_is_finite(rng):
    (gradient,) = gradients(norms.spectral_norm, [orthogonal(6, rng)], 1.0)[1:]
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).max() <= 1.01


@pytest.mark.parametrize("size", [0.1, 0.999, 1.001, 3.0, 1e30])
@pytest.mark.parametrize("kind", ["dense", "one entry", "one column"])
def test_shrink_beyond_the_exact_norm(rng, monkeypatch, kind, size):
    """Cheap bounds may spare the norm, and never the promise; below them everything stays as it is."""
    monkeypatch.setattr(norms, "EXACT_UP_TO", 0)
    a = np.zeros((20, 20))
    a[: {"one entry": 1}.get(kind, 20), : {"dense": 20}.get(kind, 1)] = 1
    a = a * rng.normal(size=a.shape)
    a = size * a / np.linalg.norm(a, 2)
    value, gradient = gradients(lambda a: norms.shrink_to(a, 1.0), [a], np.ones(a.shape))
    assert np.linalg.norm(value, 2) <= 1
    assert np.linalg.norm(value, 2) >= min(size, 1 / norms.slack(20)) / 1.01
    if size == 0.1:
        np.testing.assert_array_equal(value, a)
        np.testing.assert_array_equal(gradient, 1)
    np.testing.assert_array_equal(np.isnan(norms.shrink_to(tf.constant(a * np.nan), 1.0)), True)


def test_the_cheap_bound_is_one(rng):
    for _ in range(50):
        a = rng.normal(size=(7, 7)) * 10.0 ** rng.uniform(-3, 3, size=(7, 7))
        assert float(norms._cheap_bound(tf.constant(a))) >= np.linalg.norm(a, 2)
    assert np.isnan(norms._cheap_bound(tf.constant(np.full((2, 2), np.nan))))
