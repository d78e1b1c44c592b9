"""What the Sylvester bijector has of its own; the rest is in the contracts."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref import bijectors
from tests.support import jacobians


def test_a_posterior_with_parameters_of_every_image(rng):
    """log_prob of samples is that of the change of variables, with a determinant by differences."""
    n, d, m = 3, 4, 2
    r, r_tilde = np.tanh(rng.normal(size=(2, n, m, m)))
    q, b = np.linalg.qr(rng.normal(size=(n, d, m)))[0], rng.normal(size=(n, m))
    bijector = bijectors.Sylvester(r, r_tilde, b, q)
    base = tfp.distributions.MultivariateNormalDiag(tf.zeros((n, d), tf.float64))
    posterior = tfp.distributions.TransformedDistribution(base, bijector)
    z0 = rng.normal(size=(5, n, d))
    z = bijector.forward(z0)
    expected = base.log_prob(z0) - np.linalg.slogdet(jacobians(bijector.forward, z0))[1]
    np.testing.assert_allclose(posterior.log_prob(tf.identity(z)), expected, atol=1e-7)
    assert posterior.sample(6, seed=0).shape == (6, n, d)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": np.ones((2, 3))}, "`r` must be square"),
        ({"r": np.ones((3, 3))}, r"`r` must fit `b`. Expected 2 columns, .* Received: \(3, 3\)"),
        ({"q": np.ones((4, 3))}, "`q` must fit `b`. Expected 2 columns"),
        ({"b": 1.0}, "`b` must have 1 axes or more"),
        ({"b": np.ones(2, "float32")}, "share one dtype"),
        ({"r": np.ones((3, 2, 2)), "b": np.ones((2, 2))}, "do not fit each other"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        bijectors.Sylvester(**{"r": np.eye(2), "r_tilde": np.eye(2), "b": np.zeros(2), **change})
