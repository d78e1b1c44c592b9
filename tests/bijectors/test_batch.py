"""Batches of parameters, against one bijector for each member."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref import bijectors
from keras_auxref.bijectors._batch import map_member_rows, map_members
from tests.bijectors.cases import BATCHES
from tests.support import relative

tfd = tfp.distributions
every_batch = pytest.mark.parametrize("case", BATCHES, ids=lambda case: case.name)
BATCH = (2, 2)


def _each(case, parameters, x, method):
    """method(x) of the bijector of every member, made of its own parameters."""
    x = np.broadcast_to(x, (*np.broadcast_shapes(x.shape[:-1], BATCH), case.d))
    members = []
    for i, j in np.ndindex(*BATCH):
        one = {name: np.broadcast_to(value, (*BATCH, *case.shapes[name]))[i, j] for name, value in parameters.items()}
        members.append(getattr(case.make(**one), method)(x[..., i, j, :]).numpy())
    axis = x.ndim - 3
    stacked = np.stack(members, axis=axis)
    return stacked.reshape(*stacked.shape[:axis], *BATCH, *stacked.shape[axis + 1 :])


@pytest.mark.parametrize(
    ("case", "lead"),
    [pytest.param(case, (3, 2, 1) if case.name != "aux_spectral" else (), id=case.name) for case in BATCHES],
)
def test_every_member_is_a_bijector_of_its_own(rng, case, lead):
    parameters = case.parameters(rng, BATCH)
    x, bijector = rng.normal(size=(*lead, case.d)), case.make(**parameters)
    y = bijector.forward(x)
    assert y.shape == (*np.broadcast_shapes(lead, BATCH), case.d)
    np.testing.assert_allclose(y, _each(case, parameters, x, "forward"), rtol=1e-12)
    assert relative(bijector.inverse(tf.identity(y)), np.broadcast_to(x, y.shape)) < 1e-10
    log_det = np.broadcast_to(bijector.forward_log_det_jacobian(x), y.shape[:-1])
    np.testing.assert_allclose(log_det, _each(case, parameters, x, "forward_log_det_jacobian"), rtol=1e-10, atol=1e-13)


@every_batch
def test_an_axis_of_one_is_shared_by_all_vectors_along_it(rng, case):
    parameters = case.parameters(rng, (2, 1))
    x, bijector = rng.normal(size=(2, case.d)), case.make(**parameters)
    y = bijector.forward(x)
    assert y.shape == (2, 2, case.d)
    np.testing.assert_allclose(y, _each(case, parameters, x, "forward"), rtol=1e-12)
    lonely = case.make(**{name: value[:1] for name, value in parameters.items()})
    np.testing.assert_allclose(lonely.forward(x), y[:1], rtol=1e-12)


@every_batch
def test_gradients_of_a_batch_are_those_of_its_members(rng, case):
    """Through value, log-determinant and inverse at once."""
    parameters = case.parameters(rng, (2,))
    x = tf.constant(rng.normal(size=(5, 1, case.d)))

    def gradients(parameters, x, graph=False):
        variables = {name: tf.Variable(value) for name, value in parameters.items()}
        bijector = case.make(**variables)

        def compute():
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = tf.reduce_sum(tf.sin(bijector.inverse(x))) + tf.reduce_sum(tf.cos(bijector.forward(x)))
                log_det = bijector.forward_log_det_jacobian(x)
                value += tf.reduce_sum(tf.broadcast_to(log_det, bijector.forward(x).shape[:-1]))
            return tape.gradient(value, (x, variables), unconnected_gradients="zero")

        return (tf.function(compute) if graph else compute)()

    gx, whole = gradients(parameters, x, graph=case.name in ("factored", "householder"))
    singles = [gradients({name: value[i] for name, value in parameters.items()}, x[:, 0]) for i in range(2)]
    np.testing.assert_allclose(gx[:, 0], singles[0][0] + singles[1][0], rtol=1e-9)
    for name, gradient in whole.items():
        np.testing.assert_allclose(gradient, np.stack([single[1][name] for single in singles]), rtol=1e-9, atol=1e-12)
        assert np.abs(gradient).max() > 1e-3


@every_batch
def test_batch_shape_and_slices(rng, case):
    parameters = {name: tf.Variable(value) for name, value in case.parameters(rng, BATCH).items()}
    bijector, x = case.make(**parameters), rng.normal(size=case.d)
    assert bijector.experimental_batch_shape() == BATCH
    assert bijector.experimental_batch_shape(x_event_ndims=2) == BATCH[:1]
    assert tuple(bijector.experimental_batch_shape_tensor()) == BATCH
    assert bijector[1].experimental_batch_shape() == (2,)
    assert bijector[..., 1:].experimental_batch_shape() == (2, 1)
    np.testing.assert_allclose(bijector[1, 0].forward(x), bijector.forward(x)[1, 0], rtol=1e-12)
    distribution = tfd.TransformedDistribution(tfd.MultivariateNormalDiag(tf.zeros(case.d, tf.float64)), bijector)
    assert distribution.batch_shape == BATCH
    assert distribution.sample(4, seed=1).shape == (4, *BATCH, case.d)
    with tf.GradientTape() as tape:
        value = distribution[0, 1].log_prob(x)
    np.testing.assert_allclose(value, distribution.log_prob(x)[0, 1], rtol=1e-10)
    # A slice still trains the variables that it was cut from, where it was cut.
    for gradient in tape.gradient(value, list(parameters.values())):
        assert np.abs(gradient[0, 1]).max() > 0
        assert np.abs(gradient).sum() == pytest.approx(np.abs(gradient[0, 1]).sum())


@pytest.mark.parametrize("case", [case for case in BATCHES if len(case.shapes) > 1], ids=lambda case: case.name)
def test_weights_of_one_member_broadcast_against_those_of_many(rng, case):
    first, *_ = case.shapes
    parameters = case.parameters(rng, BATCH)
    parameters[first] = parameters[first][0, 0]
    bijector = case.make(**parameters)
    assert bijector.experimental_batch_shape() == BATCH
    x = rng.normal(size=(2, case.d))
    np.testing.assert_allclose(bijector.forward(x), _each(case, parameters, x, "forward"), rtol=1e-12)


@pytest.mark.parametrize(
    "case", [case for case in BATCHES if case.name in ("aux", "householder", "act_norm")], ids=lambda c: c.name
)
def test_a_batch_of_unknown_size(rng, case):
    parameters = case.parameters(rng, (4,))
    specs = {name: tf.TensorSpec([None, *shape], tf.float64) for name, shape in case.shapes.items()}

    @tf.function(input_signature=[tf.TensorSpec([None, None, case.d], tf.float64), specs])
    def function(x, parameters):
        bijector = case.make(**parameters)
        assert bijector.experimental_batch_shape().as_list() == [None]
        y = bijector.forward(x)
        return y, bijector.inverse(tf.identity(y))

    x = rng.normal(size=(2, 4, case.d))
    y, back = function(x, {name: tf.constant(value) for name, value in parameters.items()})
    np.testing.assert_allclose(y, case.make(**parameters).forward(x), rtol=1e-12)
    np.testing.assert_allclose(back, x, atol=1e-10)


def test_a_proof_of_a_batch_is_one_of_all_members(rng):
    w = tf.Variable(np.stack([np.diag([1.0, 1.2, 1.9]), np.diag([1.0, 1.5, 1.6])]))
    bijector = bijectors.AuxReflection(w, validate_args=True)
    certificate = bijector.certificate()
    assert certificate.invertible
    assert certificate.condition == pytest.approx(1.9)
    assert certificate.bracket == pytest.approx((2 / 1.9, 2.0))
    assert certificate.reason.startswith("Member 0 of 2: Proven")
    y = tf.constant(rng.normal(size=(5, 1, 3)))
    assert relative(bijector.forward(bijector.inverse(y)), tf.broadcast_to(y, (5, 2, 3))) < 1e-12
    w[1].assign(np.diag([1.0, 2.0, 5.0]))
    assert not bijector.certificate().invertible
    assert "Member 1 of 2: Not proven" in bijector.certificate().reason
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not certified"):
        bijector.inverse(tf.identity(y))


def test_a_factorisation_is_computed_once_per_member(rng):
    calls = []

    def function(x, w):
        calls.append(x.shape)
        return x @ w

    map_member_rows(function, tf.zeros((7, 5, 2, 3)), {"w": tf.zeros((2, 3, 3))}, 2)
    assert calls == [(35, 3), (35, 3)]
    calls.clear()
    map_member_rows(function, tf.zeros((7, 5, 3)), {"w": tf.zeros((1, 3, 3))}, 2)
    assert calls == [(35, 3)]
    assert map_members(lambda w: tf.linalg.trace(w), {"w": tf.eye(3, batch_shape=[2, 4])}, 2).numpy().tolist() == [[3.0] * 4] * 2


def test_errors():
    with pytest.raises(ValueError, match=r"broadcasts with \(2,\) before the last axis. Received: \(5, 3\)"):
        bijectors.AuxReflection(np.zeros((2, 3, 3))).forward(np.zeros((5, 3)))
    with pytest.raises(ValueError, match=r"Received: shift \(2, 3\), log_scale \(4, 3\)"):
        bijectors.ActNorm(np.zeros((2, 3)), np.zeros((4, 3)))

    def unknown(shape):
        return tf.function(lambda w: bijectors.AuxReflection(w).matrix, input_signature=[tf.TensorSpec(shape)])

    with pytest.raises(ValueError, match=r"`w` must have 2 axes or more. Expected shape \(..., d, d\). Received: unknown rank"):
        unknown(None)(tf.eye(3))
    with pytest.raises(ValueError, match=r"`w` must have a known size. Expected shape \(..., d, d\). Received: \(None, None\)"):
        unknown([None, None])(tf.eye(3))

    @tf.function(input_signature=[tf.TensorSpec(None)])
    def function(x):
        return bijectors.Householder(tf.zeros((2, 3, 1))).forward(x)

    with pytest.raises(ValueError, match="Expected an input of known rank"):
        function(tf.zeros(3))
