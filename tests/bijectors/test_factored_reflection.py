"""The factored reflection as a bijector; the contract of all bijectors is elsewhere."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref import bijectors, ops
from tests.support import orthogonal

EYE = np.eye(3)


def make(rng, d=4, **kwargs):
    return bijectors.FactoredReflection(orthogonal(d, rng), orthogonal(d, rng), rng.uniform(1, 1.9, d), **kwargs)


def test_is_the_function_of_ops(rng):
    bijector, x = make(rng, validate_args=True), rng.normal(size=(2, 3, 4))
    parts = bijector.u, bijector.v, bijector.eigenvalues
    expected, log_det = ops.factored_reflect_and_log_det(x, *parts)
    np.testing.assert_allclose(bijector.forward(x), expected, rtol=1e-12)
    np.testing.assert_allclose(bijector.forward_log_det_jacobian(x, 1), log_det, rtol=1e-12)
    np.testing.assert_allclose(bijector.inverse(tf.identity(expected)), x, rtol=1e-10)
    np.testing.assert_allclose(bijector.inverse_log_det_jacobian(tf.identity(expected), 1), -log_det, rtol=1e-9)


def test_density_of_a_chain_is_right(rng):
    chain = tfp.bijectors.Chain([make(rng, 2), tfp.bijectors.Scale(np.array([1.0, 2.0])), make(rng, 2)])
    base = tfp.distributions.MultivariateNormalDiag(np.zeros(2), np.ones(2))
    distribution = tfp.distributions.TransformedDistribution(base, tfp.bijectors.Invert(chain))
    axis = np.linspace(-7, 7, 281)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1) + 1e-3
    assert np.exp(distribution.log_prob(grid)).sum() * (axis[1] - axis[0]) ** 2 == pytest.approx(1, abs=2e-3)


def test_variables_stay_variables(rng):
    exponents = tf.Variable(np.zeros(3))
    scales = tfp.util.DeferredTensor(exponents, lambda r: tf.exp(0.3 * tf.tanh(r)))
    bijector, x = bijectors.FactoredReflection(orthogonal(3, rng), EYE, scales), rng.normal(size=(5, 3))
    before = bijector.forward(x)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(bijector.forward_log_det_jacobian(x, 1))
    assert np.abs(tape.gradient(loss, exponents)).max() > 0.01
    exponents.assign([-1.0, 0.0, 1.0])
    assert np.abs(bijector.forward(x) - before).max() > 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2 * EYE, EYE, np.ones(3)), r"`u` must be an orthogonal matrix.*Received"),
        ((EYE, np.full((3, 3), np.nan), np.ones(3)), r"`v` must be an orthogonal matrix"),
        ((EYE, EYE, np.array([1.0, 2.0, 1.0])), r"below 2.*Received: min λ = 1.0, max λ = 2.0"),
        ((EYE, EYE, np.array([1.0, -1.0, 1.0])), "positive"),
        ((EYE, EYE, np.array([1.0, np.nan, 1.0])), "positive"),
        ((np.eye(4), EYE, np.ones(3)), r"`u` must fit.*Expected shape \(..., 3, 3\)"),
        ((EYE, EYE, np.float64(1)), "`eigenvalues` must have 1 axes or more"),
        ((EYE, np.ones((3, 2)), np.ones(3)), "`v` must be square"),
        ((np.stack([EYE, EYE]), EYE, np.ones((3, 3))), "do not fit each other"),
        ((EYE, EYE, np.array([[1.0, 1.0, 1.0], [1.0, 3.0, 1.0]])), "Received: min λ = 1.0, max λ = 3.0"),
        ((EYE.astype("float32"), EYE, np.ones(3)), "one dtype"),
        ((EYE.astype("int32"), EYE, np.ones(3)), "floating-point"),
    ],
)
def test_bad_parameters_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        bijectors.FactoredReflection(*arguments)


@pytest.mark.parametrize("bad", ["u", "v", "eigenvalues"])
def test_validate_args_sees_what_variables_became(rng, bad):
    parts = {"u": tf.Variable(EYE), "v": tf.Variable(EYE), "eigenvalues": tf.Variable(np.ones(3))}
    bijector, x = bijectors.FactoredReflection(**parts, validate_args=True), rng.normal(size=(2, 3))
    bijector.forward(x)
    parts[bad].assign(parts[bad] * np.array([1.0, 1.0, 2.5]))
    for function in (bijector.forward, tf.function(bijector.inverse)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="below 2" if bad == "eigenvalues" else f"`{bad}`"):
            function(x)
