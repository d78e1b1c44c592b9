"""Rational-quadratic splines against the formula in NumPy, their inverse against bisection, and both on what networks may say."""

import numpy as np
import pytest
import tensorflow as tf

from keras_auxref.ops import backend
from keras_auxref.ops.spline import Spline, spline, spline_inverse, spline_of
from tests.support import assert_agree

BINS, BOUND, SLOPES = 8, 4.0, 2.0


def reference(x, knots, values, slopes):
    """One number through one spline, as Durkan et al. write it: y and dy/dx."""
    if abs(x) >= knots[-1]:
        return x, 1.0
    k = np.searchsorted(knots, x, side="right") - 1
    w, h, d0, d1 = knots[k + 1] - knots[k], values[k + 1] - values[k], slopes[k], slopes[k + 1]
    s, xi = h / w, (x - knots[k]) / w
    below = s + (d1 + d0 - 2 * s) * xi * (1 - xi)
    y = values[k] + h * (s * xi**2 + d0 * xi * (1 - xi)) / below
    return y, s**2 * (d1 * xi**2 + 2 * s * xi * (1 - xi) + d0 * (1 - xi) ** 2) / below**2


def random_spline(rng, n, size, dtype="float64", bins=BINS, bound=BOUND, slope_bound=SLOPES):
    return spline_of(tf.constant(size * rng.normal(size=(n, 3 * bins - 1)), dtype), bins, bound, slope_bound)


@pytest.mark.parametrize("bins", [2, 8])
def test_is_the_formula(rng, bins):
    through = random_spline(rng, 200, 2.0, bins=bins)
    x = rng.uniform(-5, 5, 200)
    y, log_slope = spline(tf.constant(x), through, BOUND)
    expected = np.array([reference(x[i], *(part[i].numpy() for part in through)) for i in range(200)])
    np.testing.assert_allclose(y, expected[:, 0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.exp(log_slope), expected[:, 1], rtol=1e-11)
    assert np.abs(y - x).max() > 0.5


def test_parameters_become_knots_and_slopes(rng):
    """Widths, secants and slopes, as the docstring has them."""
    raw = rng.normal(size=11)
    x, y, slopes = (part.numpy() for part in spline_of(tf.constant(raw), 4, 3.0, 1.5))

    def bounded(p, b):
        return b * np.tanh(p / b)

    shares = np.exp(bounded(raw[:4], 3.5)) / np.exp(bounded(raw[:4], 3.5)).sum()
    heights = shares * np.exp(bounded(raw[4:8], 0.75))
    np.testing.assert_allclose(np.diff(x), 6 * shares, rtol=1e-12)
    np.testing.assert_allclose(np.diff(y), 6 * heights / heights.sum(), rtol=1e-12)
    secant = np.diff(y) / np.diff(x)
    means = 2 / (1 / secant[1:] + 1 / secant[:-1])
    np.testing.assert_allclose(slopes, [1, *(means * np.exp(bounded(raw[8:], 1.0))), 1], rtol=1e-12)
    assert (x[0], x[-1], y[0], y[-1]) == (-3, 3, -3, 3)


def test_zeros_are_the_identity(dtype):
    through = spline_of(tf.zeros((41, 3 * BINS - 1), dtype), BINS, BOUND, SLOPES)
    x = tf.constant(np.linspace(-5, 5, 41), dtype)
    for function in (spline, spline_inverse):
        y, log_slope = function(x, through, BOUND)
        assert_agree(y, x)
        np.testing.assert_allclose(log_slope, np.zeros(41), atol=1e-5 if dtype == "float32" else 1e-13)


@pytest.mark.parametrize("size", [1e-3, 1.0, 10.0, 1e4, np.inf])
def test_hostile_parameters(rng, dtype, size):
    """In the bins, at knots, at the bounds and beyond: finite, increasing, and back to 1e-5 in float32."""
    n = 4000
    raw = rng.normal(size=(n, 3 * BINS - 1)) if size < 1e4 else rng.choice([-1.0, 1.0], size=(n, 3 * BINS - 1))
    through = spline_of(tf.constant(size * raw, dtype), BINS, BOUND, SLOPES)
    x = rng.uniform(-1.1 * BOUND, 1.1 * BOUND, n).astype(dtype)
    x[: n // 2] = through.x.numpy()[np.arange(n // 2), rng.integers(0, BINS + 1, n // 2)]
    x[-8:] = [BOUND, -BOUND, np.nextafter(x.dtype.type(BOUND), 0), -np.nextafter(x.dtype.type(BOUND), 0), 1e30, -1e30, 0, 1e-30]
    y, log_slope = spline(tf.constant(x), through, BOUND)
    back, again = spline_inverse(tf.identity(y), through, BOUND)
    assert all(np.isfinite(t).all() for t in (y, log_slope, back, again))
    assert np.abs(np.where(np.abs(x) > 5, 0, back - x)).max() < (1e-5 if dtype == "float32" else 1e-13)
    np.testing.assert_array_equal(back[-4:-2], x[-4:-2])
    np.testing.assert_allclose(again, log_slope, atol=5e-3 if dtype == "float32" else 1e-10)
    assert np.exp(log_slope).min() > 0.03
    assert np.all(np.diff(through.x) > 0)
    assert np.all(np.diff(through.y) > 0)
    with tf.GradientTape(persistent=True) as tape:
        variables = [tf.constant(x), tf.constant(raw * min(size, 1e4), dtype)]
        tape.watch(variables)
        through = spline_of(variables[1], BINS, BOUND, SLOPES)
        outputs = [*spline(variables[0], through, BOUND), *spline_inverse(variables[0], through, BOUND)]
    for output in outputs:
        assert all(np.isfinite(gradient).all() for gradient in tape.gradient(output, variables))


def test_increasing_also_across_knots(rng):
    through = Spline(*(tf.repeat(part, 2001, axis=0) for part in random_spline(rng, 1, 0.7)))
    x = np.linspace(-4.5, 4.5, 2001)
    y, log_slope = spline(tf.constant(x), through, BOUND)
    assert np.diff(y).min() > 0
    # ∫ h′ over a step is what h grows by: the derivative has no jump at a knot.
    slopes = np.exp(log_slope)
    np.testing.assert_allclose((slopes[1:] + slopes[:-1]) / 2 * np.diff(x), np.diff(y), atol=2e-4)


@pytest.mark.parametrize("function", [spline, spline_inverse])
def test_gradients_are_those_of_central_differences(rng, function):
    """For x and every parameter, with a number in either tail; rows are independent, so that all are moved at once."""
    x, raw, step = np.array([-5.0, -2.2, 0.3, 1.7, 3.9, 4.5]), rng.normal(size=(6, 3 * BINS - 1)), 1e-6

    def run(x, raw):
        return function(x, spline_of(raw, BINS, BOUND, SLOPES), BOUND)

    tensors = [tf.constant(x), tf.constant(raw)]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(tensors)
        outputs = run(*tensors)
    for index, output in enumerate(outputs):
        of_x, of_raw = (g.numpy() for g in tape.gradient(output, tensors))
        sides = [run(tf.constant(x + sign * step), tensors[1])[index].numpy() for sign in (1, -1)]
        np.testing.assert_allclose(of_x, (sides[0] - sides[1]) / (2 * step), rtol=1e-6, atol=1e-7)
        for column in range(raw.shape[1]):
            moved = np.eye(raw.shape[1])[column] * step
            sides = [run(tensors[0], tf.constant(raw + sign * moved))[index].numpy() for sign in (1, -1)]
            np.testing.assert_allclose(of_raw[:, column], (sides[0] - sides[1]) / (2 * step), rtol=1e-6, atol=1e-7)


def test_what_is_not_a_number_stays_so_and_disturbs_nobody(rng):
    through = random_spline(rng, 4, 1.0, "float32")
    x = tf.constant([np.nan, np.inf, -np.inf, 1.5], "float32")
    for function in (spline, spline_inverse):
        y, log_slope = (t.numpy() for t in function(x, through, BOUND))
        np.testing.assert_array_equal(y[:3], x[:3])
        np.testing.assert_array_equal(log_slope[:3], [np.nan, 0, 0])
        assert np.isfinite([y[3], log_slope[3]]).all()


def test_derivatives_of_both_orders_are_those_of_the_formula(rng, monkeypatch):
    """The closed form of the gradient, and its own gradient, against automatic differentiation of the map."""
    x, raw = tf.constant(rng.uniform(-5, 5, (50, 3))), tf.constant(2 * rng.normal(size=(50, 3, 3 * BINS - 1)))
    weights = tf.constant(rng.normal(size=(2, 50, 3)))

    def derivatives():
        with tf.GradientTape() as outer:
            outer.watch([x, raw])
            with tf.GradientTape() as tape:
                tape.watch([x, raw])
                both = tf.stack(spline(x, spline_of(raw, BINS, BOUND, SLOPES), BOUND))
                value = tf.reduce_sum(weights * both)
            first = tape.gradient(value, [x, raw])
            bent = sum(tf.reduce_sum(tf.sin(gradient)) for gradient in first)
        return [*first, *outer.gradient(bent, [x, raw])]

    found = derivatives()
    monkeypatch.setattr(backend, "closed_or_plain", lambda *parts: parts[-1](*parts[-2]))
    for value, expected in zip(found, derivatives(), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-9)
