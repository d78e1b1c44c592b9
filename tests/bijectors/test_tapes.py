"""A second tape over the same tensor: a bijector without variables must not answer with what the first one recorded."""

import importlib
import sys

import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import bijectors, flows
from keras_auxref.bijectors import _cache


def _permutation():
    layer = flows.Permutation(order=[2, 0, 1, 3])
    layer.build((None, 4))
    return layer.bijector()


MAKE = {
    "squeeze": (bijectors.Squeeze, (2, 2, 2, 1)),
    "permutation": (_permutation, (2, 4)),
    "act_norm": (lambda: bijectors.ActNorm(tf.constant([0.5, 1.0]), tf.constant([0.3, 0.1])), (3, 2)),
    "factored": (lambda: bijectors.FactoredReflection(tf.eye(2), tf.eye(2), tf.constant([1.0, 1.5])), (3, 2)),
}
METHODS = ("forward", "inverse", "forward_log_det_jacobian", "inverse_log_det_jacobian")


def _gradient(function, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = tf.reduce_sum(tf.square(function(x))) + tf.reduce_sum(x)
    return tape.gradient(value, x)


def _case(name, method):
    make, shape = MAKE[name]
    bijector, x = make(), np.random.default_rng(0).normal(size=shape).astype("float32")
    if method.startswith("inverse"):
        x = bijector.forward(x).numpy()
    return bijector, x


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MAKE)
def test_every_tape_gets_its_gradient(name, method, private, monkeypatch):
    bijector, x = _case(name, method)
    function = getattr(bijector, method)
    expected = _gradient(function, tf.constant(x))
    if not private:  # TensorFlow without the functions that tell what a tape has recorded
        monkeypatch.delattr(importlib.import_module("tensorflow.python.eager"), "record", raising=False)
        monkeypatch.setitem(sys.modules, "tensorflow.python.eager.record", None)
        assert not _cache._recorded(tf.constant(x))
        assert _cache._follows(tf.constant(x))
    same = tf.constant(x)
    kept = [function(same)]  # a value from before the tapes, which TFP keeps as long as somebody holds it
    for _ in range(3):
        with tf.GradientTape() as tape:
            tape.watch(same)
            kept.append(function(same))
            value = tf.reduce_sum(tf.square(kept[-1])) + tf.reduce_sum(same)
        np.testing.assert_allclose(tape.gradient(value, same), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["squeeze", "factored"])
def test_the_inverse_of_a_value_from_before_the_tape(name):
    """TFP remembers which x gave y, but a tape that watches y knows nothing of it."""
    bijector, x = _case(name, "forward")
    y = bijector.forward(tf.constant(x))
    np.testing.assert_allclose(_gradient(bijector.inverse, y), _gradient(bijector.inverse, tf.constant(y.numpy())), rtol=1e-6)


def test_the_cache_still_saves_the_second_inverse_under_a_tape(monkeypatch):
    bijector, y = _case("factored", "inverse")
    calls, inverse = [], type(bijector)._inverse
    monkeypatch.setattr(type(bijector), "_inverse", lambda self, y: calls.append(y) or inverse(self, y))
    same = tf.constant(y)
    for count in (1, 2):
        with tf.GradientTape() as tape:
            tape.watch(same)
            x = bijector.inverse(same)
            value = tf.reduce_sum(tf.square(x)) + tf.reduce_sum(bijector.inverse_log_det_jacobian(same))
        assert np.isfinite(tape.gradient(value, same)).all()
        assert len(calls) == count
