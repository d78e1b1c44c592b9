"""The logit of a mixture of logistics against sums of exponentials in extended precision, and its inverse against both."""

import math

import numpy as np
import pytest
import tensorflow as tf

from keras_auxref.ops import logistic_mixture
from keras_auxref.ops.logistic_mixture import STEPS, Mixture, evaluate, mixture_logit, mixture_logit_inverse
from tests.support import gradients

WIDE = np.finfo(np.longdouble).maxexp > 10_000  # exp(±10⁴) is a number: so on x86, not everywhere
EPSILON = {"float32": 2.0**-23, "float64": 2.0**-52}


def random_mixture(rng, n, components, spread=1.0, scales=1.0):
    """log π, μ and log s; spread and scales may differ from row to row."""
    weights = rng.normal(size=(n, components))
    means = np.reshape(spread, (-1, 1)) * rng.normal(size=(n, components))
    log_scales = np.reshape(scales, (-1, 1)) * rng.uniform(-1, 1, (n, components))
    return [weights - np.log(np.exp(weights).sum(-1, keepdims=True)), means, log_scales]


def as_mixture(parts, dtype):
    return Mixture(*(tf.constant(part, dtype) for part in parts))


def reference(x, log_weights, means, log_scales, wide=np.longdouble):
    """g and log g′ from F, 1 − F and F′ themselves, as the definition has it."""
    x, log_weights, means, log_scales = (np.asarray(part, wide) for part in (x, log_weights, means, log_scales))
    z = (x[..., None] - means) / np.exp(log_scales)
    weights, up, down = np.exp(log_weights), 1 / (1 + np.exp(-z)), 1 / (1 + np.exp(z))
    below, above = (weights * up).sum(-1), (weights * down).sum(-1)
    density = (weights * up * down / np.exp(log_scales)).sum(-1)
    return np.log(below / above), np.log(density / below / above)


@pytest.mark.skipif(not WIDE, reason="needs a long double of 15 bits of exponent")
@pytest.mark.parametrize("components", [1, 2, 8])
def test_values_are_those_of_the_definition(rng, dtype, components):
    size, scales = (np.repeat(part.ravel(), 50) for part in np.meshgrid([1e-3, 1.0, 30.0, 1e3], [0.0, 0.5, 1.0]))
    parts = random_mixture(rng, 600, components, scales=scales)
    x = tf.constant(size * rng.normal(size=600), dtype)
    logit, log_slope = (t.numpy() for t in mixture_logit(x, as_mixture(parts, dtype)))
    assert logit.dtype == log_slope.dtype == dtype
    expected, expected_slope = (t.astype("float64") for t in reference(x, *parts))
    # Relative in the tails. The shares of the components in a tail come from differences of z, whose rounding grows with |z|.
    z = np.abs((x.numpy()[:, None] - parts[1]) * np.exp(-parts[2])).max(-1)
    rounding = 16 * EPSILON[dtype]
    assert (np.abs(logit - expected) < rounding * (1 + np.abs(expected))).all()
    assert (np.abs(log_slope - expected_slope) < rounding * (1 + z)).all()
    assert np.abs(expected).max() > 1000


def test_the_slope_keeps_its_digits_far_out():
    """log F′ and log(1 − F) are both −10⁷ there, with nothing but their difference to say that g′ is 1/s."""
    parts = [np.log([[0.25, 0.75]]), np.array([[0.0, 0.0]]), np.log([[2.0, 2.0]])]
    for x in (1e4, -1e4, 2e7, -2e7):
        logit, log_slope = mixture_logit(tf.constant([x], "float32"), as_mixture(parts, "float32"))
        assert float(logit[0]) == pytest.approx(x / 2, rel=1e-6)
        assert float(log_slope[0]) == pytest.approx(-math.log(2), rel=1e-6)


@pytest.mark.parametrize("log_scale", [-12.0, -5.0, 0.0, 5.0, 12.0])
def test_one_component_is_affine_with_all_digits(dtype, log_scale):
    """g(x) = (x − μ)/s, also where that is tiny, and a logit of F close to ½ would be all rounding."""
    x = np.array([-1e4, -3.0, -1e-5, 0.25, 0.5, 2.0, 1e4])
    parts = [np.zeros((7, 1)), np.full((7, 1), 0.25), np.full((7, 1), log_scale)]
    t, mixture = (x - 0.25) * math.exp(-log_scale), as_mixture(parts, dtype)
    logit, log_slope = mixture_logit(tf.constant(x, dtype), mixture)
    np.testing.assert_allclose(logit, t, rtol=16 * EPSILON[dtype])
    np.testing.assert_allclose(log_slope, -log_scale, rtol=0, atol=16 * EPSILON[dtype] * max(1, abs(log_scale)))
    np.testing.assert_allclose(mixture_logit_inverse(tf.constant(t, dtype), mixture)[0], x, rtol=64 * EPSILON[dtype], atol=1e-6)


@pytest.mark.parametrize("components", [1, 2, 8])
def test_the_inverse_solves_the_equation_whatever_the_mixture(rng, dtype, components):
    """For t of any size: the residual is rounding, in the middle of a tail as in the gap between far components."""
    grid = np.meshgrid([0.0, 1e-20, 0.5, 40.0, 1e4], [0.0, 1.0, 30.0, 1000.0], [0.0, 5.0, 10.0])
    size, spread, scales = (np.repeat(part.ravel(), 50) for part in grid)
    t = tf.constant(size * rng.normal(size=size.size), dtype)
    mixture = as_mixture(random_mixture(rng, size.size, components, spread, scales), dtype)
    x, log_slope = mixture_logit_inverse(t, mixture)
    assert np.isfinite(x).all()
    value = evaluate(x, mixture)
    np.testing.assert_allclose(log_slope, value.log_slope, rtol=1e-5, atol=1e-5)
    rounding = EPSILON[dtype] * (value.size + np.abs(t) + np.exp(value.log_slope) * np.abs(x))
    assert (np.abs(value.logit - t) <= 4 * rounding).numpy().all()


def test_round_trip_and_batches_of_one(rng, dtype):
    parts = random_mixture(rng, 64, 5)
    x = tf.constant(rng.normal(size=64) * 3, dtype)
    mixture = as_mixture(parts, dtype)
    logit = mixture_logit(x, mixture)[0]
    back = mixture_logit_inverse(logit, mixture)[0]
    np.testing.assert_allclose(back, x, atol=100 * EPSILON[dtype] * 10)
    one = mixture_logit_inverse(logit[:1], Mixture(*(part[:1] for part in mixture)))[0]
    np.testing.assert_allclose(one, back[:1], rtol=4 * EPSILON[dtype])
    assert mixture_logit_inverse(logit[:0], Mixture(*(part[:0] for part in mixture)))[0].shape == (0,)


def test_steps_are_few(rng, dtype, monkeypatch):
    calls = []
    monkeypatch.setattr(logistic_mixture, "evaluate", lambda *a: calls.append(1) or evaluate(*a))
    mixture = as_mixture(random_mixture(rng, 2000, 8, 3.0, 2.0), dtype)
    mixture_logit_inverse(tf.constant(5 * rng.normal(size=2000), dtype), mixture)
    assert 3 < len(calls) - 3 < 20 < STEPS[dtype]


def test_bisection_where_newton_goes_astray():
    """Two narrow components far apart with t in the gap: Newton's steps there are 10³⁰ long."""
    parts = [np.log([[0.5, 0.5]]), np.array([[-100.0, 100.0]]), np.zeros((1, 2))]
    x, log_slope = mixture_logit_inverse(tf.constant([1e-30], "float64"), as_mixture(parts, "float64"))
    assert float(log_slope[0]) < -60
    assert abs(reference(x, *parts)[0][0]) < 1e-15
    assert abs(float(x[0])) < 100


def test_nothing_wrong_is_returned(monkeypatch, rng):
    """NaN and infinity give NaN, without keeping others from their answer; so does a search that is cut short."""
    parts = random_mixture(rng, 4, 3)
    mixture = as_mixture(parts, "float32")
    t = tf.constant([np.nan, np.inf, -np.inf, 1.5], "float32")
    x = mixture_logit_inverse(t, mixture)[0].numpy()
    np.testing.assert_array_equal(np.isnan(x), [True, True, True, False])
    assert float(mixture_logit(tf.constant(x), mixture)[0][3]) == pytest.approx(1.5, rel=1e-6)
    parts[1][3, 0] = np.nan
    assert np.isnan(mixture_logit_inverse(t, as_mixture(parts, "float32"))[0]).all()
    monkeypatch.setitem(STEPS, "float32", 1)
    assert np.isnan(mixture_logit_inverse(t, mixture)[0][3])


@pytest.mark.parametrize("function", [mixture_logit, mixture_logit_inverse])
def test_gradients_are_those_of_central_differences(rng, function):
    """For x and every parameter; the rows have nothing to do with each other, so that all of them are moved at once."""
    arguments, step = [rng.normal(size=5) * [0.1, 1, 3, 10, 0.5], *random_mixture(rng, 5, 2)], 1e-6
    tensors = [tf.constant(argument) for argument in arguments]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(tensors)
        outputs = function(tensors[0], Mixture(*tensors[1:]))
    for output in (0, 1):
        found = [g.numpy().reshape(5, -1) for g in tape.gradient(outputs[output], tensors)]
        for position, gradient in enumerate(found):
            for column in range(gradient.shape[1]):
                sides = []
                for sign in (1, -1):
                    moved = [argument.reshape(5, -1).copy() for argument in arguments]
                    moved[position][:, column] += sign * step
                    sides.append(function(tf.constant(moved[0][:, 0]), as_mixture(moved[1:], "float64"))[output].numpy())
                np.testing.assert_allclose(gradient[:, column], (sides[0] - sides[1]) / (2 * step), rtol=1e-6, atol=1e-7)


def test_second_derivatives_of_the_inverse(rng):
    """With h = g⁻¹: h′ = 1/g′ and h″ = −g″/g′³, g′ and g″ by automatic differentiation of g."""
    mixture = as_mixture(random_mixture(rng, 6, 3), "float64")
    t = tf.constant(rng.normal(size=6))

    def derivatives(function, x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                value = function(x, mixture)[0]
            first = inner.gradient(value, x)
        return first.numpy(), outer.gradient(first, x).numpy()

    first, second = derivatives(mixture_logit_inverse, t)
    slope, bend = derivatives(mixture_logit, mixture_logit_inverse(t, mixture)[0])
    np.testing.assert_allclose(first, 1 / slope, rtol=1e-10)
    np.testing.assert_allclose(second, -bend / slope**3, rtol=1e-8)


def test_gradients_stay_finite_at_the_extremes(dtype):
    """Far tails, the middle, and a gap so wide that 1/g′ is no number."""
    parts = [np.log([[0.5, 0.5]] * 5), np.array([[-1.0, 1.0]] * 4 + [[-2000.0, 2000.0]]), np.zeros((5, 2))]
    x = [1e4, -1e4, 0.0, 1e-30, 3.0]
    for function in (mixture_logit, mixture_logit_inverse):
        for output in (0, 1):
            found = gradients(
                lambda x, *parts, f=function, i=output: f(x, Mixture(*parts))[i],
                [np.array(x, dtype), *as_mixture(parts, dtype)],
                np.ones(5),
            )
            assert all(np.isfinite(g).all() for g in found[:1])
            assert all(np.isfinite(g[:4]).all() for g in found)


@pytest.mark.parametrize("jit", [False, True])
def test_compiled_as_eager(rng, jit):
    mixture, t = as_mixture(random_mixture(rng, 20, 4, 3.0), "float32"), tf.constant(rng.normal(size=20) * 5, "float32")

    def value_and_gradient(t):
        with tf.GradientTape() as tape:
            tape.watch(t)
            x = mixture_logit_inverse(t, mixture)[0]
        return x, tape.gradient(x, t)

    compiled = tf.function(value_and_gradient, jit_compile=jit, autograph=False)(t)
    for a, b in zip(compiled, value_and_gradient(t), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
