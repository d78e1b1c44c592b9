import math

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref import AuxReflection, bijectors, flows, layers
from keras_auxref.invertible import Invertible

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


@pytest.mark.slow
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
    layer = _layer()
    monkeypatch.setattr(layer, "inverse", lambda y: tf.where(y[:, :1] > 0, y, np.nan))  # as where the search fails
    y = tf.constant(rng.normal(size=(20, 4)), tf.float32)
    assert np.isnan(layer.bijector().inverse(y)).any()
    with pytest.raises(tf.errors.InvalidArgumentError, match="did not find a preimage"):
        layer.bijector(validate_args=True).inverse(tf.identity(y))


@pytest.mark.parametrize("graph", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_validate_args_raises_where_uniqueness_is_not_proven(rng, graph):
    layer = _layer("free")
    assert not layer.certificate().invertible
    bijector = layer.bijector(validate_args=True)
    inverse = tf.function(bijector.inverse) if graph else bijector.inverse
    y = tf.constant(rng.normal(size=(3, 4)), tf.float32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not certified"):
        inverse(y)
    layer.weights[0].assign(np.eye(4))
    np.testing.assert_allclose(inverse(tf.identity(y)), -y, rtol=1e-5)


def test_rows_that_came_in_as_nan_are_nobodys_failure(rng):
    y = rng.normal(size=(3, 4)).astype("float32")
    y[1, 2] = np.nan
    x = _layer().bijector(validate_args=True).inverse(y)
    np.testing.assert_array_equal(np.isnan(x).any(axis=-1), [False, True, False])


class Flow(Invertible, keras.layers.Layer):
    """(H, W, C) → (HWC,) through two parts, and a count of the passes."""

    event_ndims = 3
    inverse_event_ndims = 1

    def build(self, input_shape):
        self.event = tuple(input_shape[1:])
        self.mixing, self.coupling = layers.AuxReflection("spectral"), flows.AffineCoupling(hidden=4)
        self.mixing.build(input_shape)
        self.coupling.build(input_shape)
        self.passes = 0

    def call(self, x):
        return self.forward_and_log_det(x)[0]

    def forward_and_log_det(self, x):
        self.passes += 1
        x, first = self.mixing.forward_and_log_det(x)
        y, second = self.coupling.forward_and_log_det(x)
        return keras.ops.reshape(y, (-1, math.prod(self.event))), keras.ops.sum(first, axis=(1, 2)) + second

    def log_det_jacobian(self, x):
        return self.forward_and_log_det(x)[1]

    def inverse(self, y):
        return self.mixing.inverse(self.coupling.inverse(keras.ops.reshape(y, (-1, *self.event))))

    def inverse_parts(self):
        return [self.mixing, self.coupling]

    def compute_output_shape(self, input_shape):
        return (input_shape[0], math.prod(input_shape[1:]))

    def inverse_output_shape(self, output_shape):
        return (output_shape[0], *self.event)


def _flow(rng):
    flow = Flow()
    flow.build((None, 2, 4, 3))
    for weight in flow.trainable_weights:
        weight.assign_add(0.1 * rng.normal(size=weight.shape))
    return flow


def test_a_flow_that_changes_the_rank_of_an_event(rng):
    flow = _flow(rng)
    distribution = tfd.TransformedDistribution(tfd.MultivariateNormalDiag(tf.zeros(24)), tfb.Invert(flow.bijector()))
    assert distribution.event_shape == (2, 4, 3)
    sample = distribution.sample((5, 2), seed=1)
    assert sample.shape == (5, 2, 2, 4, 3)
    log_prob = distribution.log_prob(tf.identity(sample))
    assert log_prob.shape == (5, 2)
    z, log_det = flow.forward_and_log_det(tf.reshape(sample, (10, 2, 4, 3)))
    expected = -0.5 * np.sum(np.square(z), axis=-1) - 12 * np.log(2 * np.pi) + log_det
    np.testing.assert_allclose(tf.reshape(log_prob, [-1]), expected, rtol=1e-4)
    gradient_of = flow.bijector().trainable_variables
    assert len(gradient_of) == len(flow.trainable_weights) == 7


def test_validate_args_looks_at_the_parts_of_a_flow(rng, monkeypatch):
    flow = _flow(rng)
    y = tf.constant(rng.normal(size=(2, 24)), tf.float32)
    np.testing.assert_allclose(flow.bijector(validate_args=True).inverse(y), flow.bijector().inverse(y), rtol=1e-5, atol=1e-5)
    free = _layer("free", d=3)
    monkeypatch.setattr(flow, "inverse_parts", lambda: [free, flow.coupling])
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not certified"):
        flow.bijector(validate_args=True).inverse(tf.identity(y))


@pytest.mark.parametrize(("graph", "cheap", "passes"), [(True, False, 1), (True, True, 1), (False, True, 1), (False, False, 2)])
def test_value_and_log_det_share_a_pass(rng, graph, cheap, passes):
    flow = _flow(rng)
    flow.cheap_log_det = cheap
    bijector = flow.bijector()
    x = tf.constant(rng.normal(size=(2, 2, 4, 3)), tf.float32)
    expected = flow.forward_and_log_det(x)
    flow.passes = 0

    def both():
        return bijector.forward(x), bijector.forward_log_det_jacobian(x)

    y, log_det = (tf.function(both) if graph else both)()
    assert flow.passes == passes
    np.testing.assert_allclose(y, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(log_det, expected[1], rtol=1e-4)


def test_event_shapes_inside_a_graph():
    bijector = _squeeze().bijector()

    @tf.function(input_signature=[tf.TensorSpec([3], tf.int32)])
    def shapes(shape):
        forward = bijector.forward_event_shape_tensor(shape)
        return forward, bijector.inverse_event_shape_tensor(forward)

    forward, back = shapes(tf.constant([4, 6, 3]))
    assert forward.numpy().tolist() == [2, 3, 12]
    assert back.numpy().tolist() == [4, 6, 3]
    assert bijector.forward_event_shape(tf.TensorShape(None)).rank is None


def _squeeze():
    layer = flows.Squeeze()
    layer.build((None, 2, 2, 1))
    return layer


def test_event_shapes_with_axes_before_the_event(rng):
    """Only the last axes are an event of the layer; what comes before stays."""
    bijector = _flow(rng).bijector()
    assert bijector.forward_event_shape([7, 2, 4, 3]) == (7, 24)
    assert bijector.inverse_event_shape([5, 7, 24]) == (5, 7, 2, 4, 3)
    assert tuple(bijector.forward_event_shape_tensor([7, 2, 4, 3])) == (7, 24)
    assert tuple(bijector.inverse_event_shape_tensor([7, 24])) == (7, 2, 4, 3)
    with pytest.raises(ValueError, match=r"an event of 3 axes or more. Received: \(4, 3\)"):
        bijector.forward_event_shape([4, 3])


def test_two_views_of_one_layer_are_equal(rng):
    layer, other = _layer(), _layer()
    first, second = layer.bijector(), layer.bijector()
    assert first == second
    assert hash(first) == hash(second)
    assert first.layer is layer
    assert first != other.bijector()
    # They share TFP's cache, and neither answers with what the weights were.
    x = tf.constant(rng.normal(size=(2, 4)), tf.float32)
    before = first.forward(x)
    assert second.forward(x) is before
    layer.weights[-1].assign_add(rng.normal(size=(4, 4)))
    np.testing.assert_allclose(second.forward(x), layer(x), rtol=1e-6)
    assert np.abs(second.forward(x) - before).max() > 1e-2


def test_refuses_a_layer_without_inverse():
    with pytest.raises(ValueError, match=r"Expected a layer with `Invertible`. Received: <Dense"):
        bijectors.LayerBijector(keras.layers.Dense(3))
