"""TFP's cache and variables; parameters by reference; events behind any number of axes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref import bijectors
from keras_auxref.bijectors._base import map_events, reference, require_one_dtype

tfb, tfd = tfp.bijectors, tfp.distributions
NORMAL = tfd.MultivariateNormalDiag(tf.constant([0.5, -1.0, 0.0, 2.0], tf.float64))


ZERO, MOVE = tf.zeros(4, tf.float64), tf.constant([0.1, 0.2, -0.1, 0.3], tf.float64)


class Counting(bijectors.ActNorm):
    """Counts the inverses that are really computed."""

    def __init__(self, w):
        super().__init__(ZERO, w)
        self.inverses = 0

    def _inverse(self, y):
        self.inverses += 1
        return super()._inverse(y)


@pytest.fixture
def w(rng):
    """Values and log-determinants depend on it."""
    return tf.Variable(rng.normal(size=4))


@pytest.fixture
def x(rng):
    return tf.constant(rng.normal(size=(5, 4)))


def _gradient(distribution, x, w):
    with tf.GradientTape() as tape:
        value = distribution.log_prob(x)
    return tape.gradient(value, w)


@pytest.mark.parametrize("invert", [False, True])
def test_stock_tfp_has_the_problem_that_the_hash_solves(invert):
    """Should this test fail, TFP has solved it, and `FreshBijector` can go."""
    scale, x = tf.Variable([1.0, 2.0]), tf.constant([[1.0, 1.0]])
    bijector = tfb.Invert(tfb.Scale(scale)) if invert else tfb.Scale(scale)
    distribution = tfd.TransformedDistribution(tfd.MultivariateNormalDiag(tf.zeros(2)), bijector)
    distribution.log_prob(x)
    assert np.abs(_gradient(distribution, x, scale) - _gradient(distribution, tf.identity(x), scale)).max() > 0.1
    scale.assign([3.0, 4.0])
    assert abs(float(distribution.log_prob(x)[0] - distribution.log_prob(tf.identity(x))[0])) > 0.1


@pytest.mark.parametrize("invert", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_a_value_from_before_the_tape_does_not_cost_the_gradient(w, x, invert, graph):
    bijector = bijectors.ActNorm(ZERO, w)
    distribution = tfd.TransformedDistribution(NORMAL, tfb.Invert(bijector) if invert else bijector)

    def gradients():
        kept = distribution.log_prob(x)
        with tf.GradientTape() as tape:
            with tape.stop_recording():
                kept = kept + distribution.log_prob(x)
            value = distribution.log_prob(x)
        return kept, tape.gradient(value, w), _gradient(distribution, x, w), _gradient(distribution, tf.identity(x), w)

    _, first, second, right = (tf.function(gradients) if graph else gradients)()
    np.testing.assert_allclose(first, right, rtol=1e-12)
    np.testing.assert_allclose(second, right, rtol=1e-12)


@pytest.mark.parametrize("taped", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_the_cache_still_saves_the_second_inverse(w, x, taped, graph):
    """log_prob under Invert computes forward(x) and asks for the log-determinant at its image."""
    bijector = Counting(w)
    distribution = tfd.TransformedDistribution(NORMAL, tfb.Invert(bijector))

    def log_prob():
        if not taped:
            return distribution.log_prob(x)
        with tf.GradientTape() as tape:
            value = distribution.log_prob(x)
        tape.gradient(value, w)
        return value

    (tf.function(log_prob) if graph else log_prob)()
    assert bijector.inverses == 0
    tfd.TransformedDistribution(NORMAL, bijector).log_prob(tf.identity(x))
    assert bijector.inverses == 1


def test_values_do_not_leak_between_eager_execution_and_graphs(w, x):
    bijector = bijectors.ActNorm(ZERO, w)
    kept = bijector.forward(x)
    function = tf.function(lambda: bijector.forward(x))
    np.testing.assert_allclose(function(), kept)
    w.assign_add(MOVE)
    changed = function()
    np.testing.assert_allclose(changed, bijector.forward(tf.identity(x)))
    np.testing.assert_allclose(bijector.forward(x), changed)
    assert np.abs(changed - kept).max() > 1e-3


def test_an_assignment_by_a_function_called_inside_a_function_is_seen(w, x):
    bijector = bijectors.ActNorm(ZERO, w)
    move = tf.function(lambda: w.assign_add(MOVE))

    @tf.function
    def both():
        before = bijector.forward(x)
        move()
        return before, bijector.forward(x)

    before, after = both()
    assert np.abs(before - after).max() > 1e-3
    np.testing.assert_allclose(after, bijector.forward(tf.identity(x)))


def test_without_private_tensorflow_nothing_is_remembered_under_a_tape(w, x, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "tensorflow.python.eager.record", None)
    bijector = bijectors.ActNorm(ZERO, w)
    distribution = tfd.TransformedDistribution(NORMAL, bijector)
    distribution.log_prob(x)
    np.testing.assert_allclose(_gradient(distribution, x, w), _gradient(distribution, tf.identity(x), w), rtol=1e-12)


def test_hash_of_constants_is_stable_inside_one_context():
    first, second = (bijectors.Householder(tf.constant(v)) for v in ([[1.0], [2.0]], [[2.0], [1.0]]))
    before = hash(first)
    with tf.GradientTape():
        assert hash(first) == before
    assert first != second
    assert hash(second) != before


@pytest.mark.parametrize("kind", [tf.Variable, keras.Variable])
def test_variables_stay_variables(kind):
    v = kind(np.eye(3, 2, dtype="float32"))
    bijector = bijectors.Householder(v)
    (listed,) = bijector.trainable_variables
    x = tf.constant([[1.0, 2.0, 3.0]])
    before = bijector.forward(x).numpy()
    v.assign(np.ones((3, 2)))
    assert np.abs(bijector.forward(x) - before).max() > 0.1
    np.testing.assert_array_equal(listed, np.ones((3, 2)))


def test_a_transformed_variable_trains_through_its_bijector():
    scale = tfp.util.TransformedVariable(tf.constant([2.0, 3.0]), tfb.Exp())
    bijector = bijectors.ActNorm(tf.zeros(2), scale)
    with tf.GradientTape() as tape:
        y = bijector.forward([[1.0, 1.0]])
    (gradient,) = tape.gradient(y, bijector.trainable_variables)
    # d/dlog s of exp(s) = s exp(s).
    np.testing.assert_allclose(gradient, [2 * np.exp(2), 3 * np.exp(3)], rtol=1e-6)


def test_parameters_that_make_no_sense():
    with pytest.raises(ValueError, match=r"Expected float32 or float64. Received: int32"):
        reference([[1, 2]], "w")
    with pytest.raises(ValueError, match="share one dtype"):
        require_one_dtype(a=tf.zeros(2), b=tf.zeros(2, tf.float64))


def test_events_of_too_few_axes_or_of_unknown_rank():
    with pytest.raises(ValueError, match=r"Expected an input of rank ≥ 3. Received: shape \(2, 3\)"):
        map_events(tf.identity, tf.zeros((2, 3)), 3)

    @tf.function(input_signature=[tf.TensorSpec(None)])
    def function(x):
        return map_events(tf.identity, x, 1)

    with pytest.raises(ValueError, match="known rank"):
        function(tf.zeros((2, 3)))


def test_events_keep_what_is_known_of_their_shape():
    @tf.function(input_signature=[tf.TensorSpec([None, 3, None, 4])])
    def function(x):
        y = map_events(lambda t: tf.concat([t, t], axis=-1), x, 1)
        assert y.shape.as_list() == [None, 3, None, 8]
        return y

    assert function(tf.zeros((2, 3, 5, 4))).shape == (2, 3, 5, 8)
