import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref import AuxReflection, ops

tfb, tfd = tfp.bijectors, tfp.distributions
KERNELS = ["spectral", "relaxed_cayley"]


def _layer(kernel="relaxed_cayley", d=4, dtype="float32"):
    layer = AuxReflection(kernel, dtype=dtype)
    layer.build((None, d))
    return layer


@pytest.mark.parametrize("kernel", KERNELS)
def test_forward_inverse_and_log_det(rng, dtype, kernel):
    layer = _layer(kernel, dtype=dtype)
    bijector = layer.bijector()
    x = tf.constant(rng.normal(size=(3, 5, 4)), dtype)
    y = bijector.forward(x)
    tolerance = 1e-4 if dtype == "float32" else 1e-10
    # tf.identity: TFP would answer inverse(forward(x)) from its cache.
    np.testing.assert_allclose(bijector.inverse(tf.identity(y)), x, atol=tolerance)
    forward = bijector.forward_log_det_jacobian(x, event_ndims=1)
    assert forward.shape == (3, 5)
    np.testing.assert_allclose(forward, -bijector.inverse_log_det_jacobian(tf.identity(y), event_ndims=1), atol=tolerance)
    jacobian = tf.reshape(_jacobian(layer, tf.reshape(x, [-1, 4])), [3, 5, 4, 4])
    np.testing.assert_allclose(forward, tf.linalg.slogdet(jacobian)[1], atol=tolerance)


def _jacobian(layer, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x)
    return tape.batch_jacobian(y, x)


def test_goes_into_chain_invert_and_blockwise(rng):
    layer = _layer()
    chain = tfb.Chain([tfb.Shift(tf.ones(4)), layer.bijector(), tfb.Invert(layer.bijector()), tfb.Scale(2.0)])
    x = tf.constant(rng.normal(size=(6, 4)), tf.float32)
    y = chain.forward(x)
    np.testing.assert_allclose(y, 2 * x + 1, atol=1e-4)
    np.testing.assert_allclose(chain.inverse(tf.identity(y)), x, atol=1e-4)
    block = tfb.Blockwise([layer.bijector(), tfb.Identity()], [4, 2])
    z = tf.constant(rng.normal(size=(6, 6)), tf.float32)
    np.testing.assert_allclose(block.forward(z)[:, :4], layer(z[:, :4]), atol=1e-6)
    np.testing.assert_allclose(block.inverse(tf.identity(block.forward(z))), z, atol=1e-4)


def test_density_integrates_to_one():
    """On a grid in the plane: what a wrong log-determinant or a second preimage would break."""
    layer = _layer(d=2, dtype="float64")
    for weight in layer.weights:
        weight.assign_add(np.random.default_rng(1).normal(size=weight.shape))
    base = tfd.MultivariateNormalDiag(tf.constant([1.0, -0.5], tf.float64), tf.constant([0.6, 1.1], tf.float64))
    distribution = tfd.TransformedDistribution(base, layer.bijector())
    axis = np.linspace(-7, 7, 400)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    mass = np.exp(distribution.log_prob(grid)).sum() * (axis[1] - axis[0]) ** 2
    assert mass == pytest.approx(1, abs=2e-3)


def test_is_a_view_and_never_a_copy(rng):
    layer = _layer()
    bijector = layer.bijector()
    x = tf.constant(rng.normal(size=(2, 4)), tf.float32)
    before = bijector.forward(x).numpy()
    layer.weights[-1].assign_add(rng.normal(size=(4, 4)))
    after = layer.bijector().forward(tf.identity(x)).numpy()
    assert np.abs(before - after).max() > 1e-2
    np.testing.assert_allclose(after, layer(x), atol=1e-6)


def test_trains_through_a_transformed_distribution(rng):
    layer = _layer(d=3)
    data = tf.constant(rng.normal(size=(256, 3)) @ np.diag([0.2, 1, 3]) + 1.0, tf.float32)
    base = tfd.MultivariateNormalDiag(tf.constant([2.0, 1.0, 0.0]), tf.constant([3.0, 1.0, 0.2]))
    optimizer = keras.optimizers.Adam(0.05)
    assert len(layer.bijector().trainable_variables) == 2

    @tf.function
    def step():
        bijector = layer.bijector()
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(tfd.TransformedDistribution(base, tfb.Invert(bijector)).log_prob(data))
        variables = bijector.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), layer.trainable_weights, strict=True))
        return loss

    losses = [float(step()) for _ in range(40)]
    assert losses[-1] < losses[0] - 1
    assert layer.certificate().invertible


def test_sampling_and_log_prob_agree(rng):
    distribution = tfd.TransformedDistribution(tfd.MultivariateNormalDiag(tf.zeros(4)), _layer().bijector())
    sample = distribution.sample((2, 3), seed=1)
    assert sample.shape == (2, 3, 4)
    cached, recomputed = distribution.log_prob(sample), distribution.log_prob(tf.identity(sample))
    np.testing.assert_allclose(cached, recomputed, rtol=1e-4)


def test_validate_args_raises_where_no_preimage_was_found(rng, monkeypatch):
    layer = _layer("free")
    monkeypatch.setattr(layer, "inverse", lambda y: ops.inverse(y, layer.kernel, max_steps=1))
    y = tf.constant(rng.normal(size=(20, 4)), tf.float32)
    assert np.isnan(layer.bijector().inverse(y)).any()
    with pytest.raises(tf.errors.InvalidArgumentError, match="did not find a preimage"):
        layer.bijector(validate_args=True).inverse(tf.identity(y))
