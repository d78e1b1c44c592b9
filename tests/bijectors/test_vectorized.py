"""`tf.vectorized_map`, and what TFP builds on it."""

import logging

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref import bijectors, ops
from tests.bijectors.cases import TRACED
from tests.support import certified

tfd = tfp.distributions


@pytest.mark.parametrize("case", TRACED, ids=lambda case: case.name)
def test_every_method_vectorises_without_a_word(rng, case, caplog):
    bijector = case.make(rng, "float64")
    x = tf.constant(rng.normal(size=(4, *case.event)))
    y = bijector.forward(x)

    def methods(pair):
        x, y = pair
        back = bijector.inverse(y), bijector.inverse_log_det_jacobian(y)
        return bijector.forward(x), bijector.forward_log_det_jacobian(x), *back

    with caplog.at_level(logging.WARNING):
        results = tf.vectorized_map(methods, (x, y))
    assert [record.message for record in caplog.records if "converting" in record.message] == []
    for result, expected in zip(results, methods((tf.identity(x), tf.identity(y))), strict=True):
        expected = np.broadcast_to(expected, result.shape)
        np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["spectral", "free"])
def test_gradients_inside_of_a_vectorised_map(rng, kernel):
    """One gradient for W per vector."""
    w, y = tf.Variable(certified(3, 1.4, 1.0, rng)), tf.constant(rng.normal(size=(3, 3)))
    bijector = bijectors.AuxReflection(w, kernel)

    def gradient(y):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(tf.sin(bijector.inverse(y)))
        return tape.gradient(value, w)

    np.testing.assert_allclose(tf.vectorized_map(gradient, y), tf.stack([gradient(row) for row in y]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("function", [pytest.param(ops.inverse, marks=pytest.mark.slow), ops.log_det_jacobian])
def test_a_matrix_for_every_iteration(rng, function):
    """Symmetric, general and without a basis of eigenvectors, side by side."""
    w = np.stack([np.diag([1.0, 1.2, 1.5]), certified(3, 1.4, 1.0, rng), np.eye(3) + 0.1 * np.eye(3, k=1)])
    y = rng.normal(size=(3, 2, 3))
    result = tf.vectorized_map(lambda pair: function(*pair), (tf.constant(y), tf.constant(w)))
    np.testing.assert_allclose(result, tf.stack([function(*pair) for pair in zip(y, w, strict=True)]), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_joint_distributions_that_batch_themselves(rng):
    """Sampling and density of a hierarchy whose last part is the view of a flow."""
    bijector = bijectors.AuxReflection(rng.normal(size=(3, 3)), "spectral")

    def model():
        scale = yield tfd.LogNormal(tf.constant(0.0, tf.float64), 0.5, name="scale")
        base = tfd.MultivariateNormalDiag(tf.zeros(3, tf.float64), scale * tf.ones(3, tf.float64))
        yield tfd.TransformedDistribution(base, bijector, name="y")

    joint = tfd.JointDistributionCoroutineAutoBatched(model)
    sample = joint.sample(5, seed=1)
    assert sample.y.shape == (5, 3)
    log_prob = joint.log_prob(tf.nest.map_structure(tf.identity, sample))
    # f keeps lengths, and the density of y is that of x = f⁻¹(y) without the change of volume.
    x = bijector.inverse(tf.identity(sample.y))
    normal = tfd.MultivariateNormalDiag(tf.zeros(3, tf.float64), sample.scale[:, None] * tf.ones(3, tf.float64))
    expected = tfd.LogNormal(tf.constant(0.0, tf.float64), 0.5).log_prob(sample.scale) + normal.log_prob(x)
    np.testing.assert_allclose(log_prob, expected - bijector.forward_log_det_jacobian(x), rtol=1e-9)
