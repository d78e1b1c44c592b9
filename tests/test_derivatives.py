"""Derivatives of every kind through every public layer and bijector: eager, in a graph and compiled by XLA.

Eager ones are compared with each other and with differences; graphs with eager ones. Everything in float64, for two tiny inputs.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref import bijectors, flows, layers, posteriors
from keras_auxref.invertible import Invertible
from tests.bijectors.cases import CASES as BIJECTORS

KIND = {"dtype": "float64"}


def _layer(make, *event, step=0.2):
    """A function of a built layer, of its inverse and of its log-determinant, all of (2, *event)."""

    def function():
        layer = make()
        layer.build((None, *event))
        _move(layer, step)
        methods = [layer]
        if isinstance(layer, Invertible):
            shape = layer.compute_output_shape((2, *event))
            methods += [lambda x: layer.inverse(tf.reshape(x, shape)), layer.log_det_jacobian]
        return methods, event

    return function


def _amortised(make):
    def function():
        layer, h = make(), tf.constant(np.random.default_rng(1).normal(size=(2, 2)))
        layer(tf.zeros((2, 3), "float64"), h)
        _move(layer)
        return [lambda z: layer(z, h), lambda z: layer.forward_and_log_det(z, h)[1], lambda y: layer.inverse(y, h)], (3,)

    return function


def _cell():
    cell, x = layers.OrthogonalRNNCell(3, **KIND), tf.ones((2, 2), "float64")
    cell.build((None, 2))
    _move(cell)
    return [lambda h: cell(x, [h])[0]], (3,)


def _dequantiser():
    layer = flows.VariationalDequantisation(hidden=2, **KIND)
    values = tf.constant(np.random.default_rng(1).uniform(size=(2, 2, 2, 1)))
    layer(values, tf.fill((2, 2, 2, 1), tf.constant(0.5, "float64")))
    _move(layer)
    return [lambda x: layer(values, tf.sigmoid(x))[0], lambda x: layer(values, tf.sigmoid(x))[1]], (2, 2, 1)


def _multi_scale():
    layer = flows.MultiScale(levels=1, steps=1, hidden=2, seed=1, **KIND)
    layer.build((None, 2, 2, 1))
    _move(layer)
    return [lambda x: layer(tf.sigmoid(x)), lambda x: layer.log_det_jacobian(tf.sigmoid(x))], (2, 2, 1)


def _flow():
    model = flows.Flow(2, steps=1, hidden=2, seed=1, **KIND)
    model.initialize(np.random.default_rng(1).normal(size=(8, 2)))
    return [lambda x: model.encode(x)[0], model.log_prob, model.decode], (2,)


def _glow():
    model = flows.Glow((2, 2, 1), levels=1, steps=1, hidden=2, seed=1, **KIND)
    model.initialize(np.random.default_rng(1).uniform(size=(8, 2, 2, 1)))
    return [lambda x: model.log_prob(tf.sigmoid(x)), lambda x: model.decode(tf.reshape(x, (2, 4)))], (2, 2, 1)


def _bijector(case):
    def function():
        bijector = case.make(np.random.default_rng(1), "float64")
        after = bijector.forward_event_shape(case.event)
        # tf.identity: TFP would answer from its cache.
        methods = [
            lambda x: bijector.forward(tf.identity(x)),
            lambda x: bijector.inverse(tf.reshape(x, (2, *after))),
            lambda x: bijector.forward_log_det_jacobian(tf.identity(x)),
        ]
        return methods, case.event

    return function


def _move(layer, step=0.2):
    """Away from the start, where much is zero."""
    rng = np.random.default_rng(2)
    for weight in layer.trainable_weights:
        weight.assign_add(step * rng.normal(size=weight.shape))


def _one_to_one(shape, dtype=None):
    """A general W with a certificate. Without one, XLA may find another preimage, since it factors W in another way."""
    skew = np.triu(np.random.default_rng(4).normal(size=shape), 1)
    return np.linalg.inv(np.diag(np.linspace(1, 1.5, shape[0])) + skew - skew.T)


CASES = {
    "AuxReflection": _layer(lambda: layers.AuxReflection(kernel_initializer=_one_to_one, strict=True, **KIND), 3, step=0.01),
    "AuxReflection(spectral)": _layer(lambda: layers.AuxReflection("spectral", **KIND), 3),
    "FactoredReflection": _layer(lambda: layers.FactoredReflection(**KIND), 3),
    "ModReLU": _layer(lambda: layers.ModReLU(**KIND), 3),
    "OrthogonalDense": _layer(lambda: layers.OrthogonalDense(**KIND), 3),
    "OrthogonalDense(cayley)": _layer(lambda: layers.OrthogonalDense("cayley", **KIND), 3),
    "OrthogonalDense(exp)": _layer(lambda: layers.OrthogonalDense("exp", **KIND), 3),
    "OrthogonalRNN": _layer(lambda: layers.OrthogonalRNN(2, **KIND), 2, 2),
    "OrthogonalRNNCell": _cell,
    "SVDDense": _layer(lambda: layers.SVDDense(3, map="householder", **KIND), 3),
    "ActNorm": _layer(lambda: flows.ActNorm(**KIND), 2),
    "AdditiveCoupling": _layer(lambda: flows.AdditiveCoupling(hidden=2, **KIND), 2),
    "AffineCoupling": _layer(lambda: flows.AffineCoupling(hidden=2, **KIND), 2),
    "Chain": _layer(lambda: flows.Chain([flows.ActNorm(**KIND), flows.InvertibleDense(**KIND)], **KIND), 2),
    "Flow": _flow,
    "Glow": _glow,
    "InvertibleDense": _layer(lambda: flows.InvertibleDense(**KIND), 2),
    "LogisticMixtureCoupling": _layer(lambda: flows.LogisticMixtureCoupling(hidden=2, components=2, **KIND), 2),
    "MultiScale": _multi_scale,
    "Permutation": _layer(lambda: flows.Permutation(**KIND), 3),
    "QRDense": _layer(lambda: flows.QRDense(**KIND), 3),
    "ReflectedDense": _layer(lambda: flows.ReflectedDense(**KIND), 3),
    "Repeat": _layer(lambda: flows.Repeat(flows.ActNorm(**KIND), 2, **KIND), 2),
    "SplineCoupling": _layer(lambda: flows.SplineCoupling(hidden=2, bins=2, **KIND), 2),
    "Squeeze": _layer(lambda: flows.Squeeze(**KIND), 2, 2, 1),
    "VariationalDequantisation": _dequantiser,
    "FactoredFlow": _amortised(lambda: posteriors.FactoredFlow(1, **KIND)),
    "HouseholderFlow": _amortised(lambda: posteriors.HouseholderFlow(1, **KIND)),
    "SylvesterFlow": _amortised(lambda: posteriors.SylvesterFlow(1, **KIND)),
    **{f"bijector {case.name}": _bijector(case) for case in BIJECTORS},
}


# The loops of whole flows take pfor minutes to convert.
WITHOUT_PFOR = ("Flow", "Glow", "MultiScale", "Repeat")
# TensorFlow cannot take the lists of a loop out of XLA, to a tape around the compiled function.
INSIDE_XLA = ("OrthogonalRNN", *WITHOUT_PFOR)
# Of every kind one, which CI runs.
OFTEN = ("AuxReflection", "AuxReflection(spectral)", "bijector aux_relaxed_cayley", "FactoredReflection", "Chain")


def _cases():
    for name in CASES:
        for way in ("eager", "graph", "XLA"):
            rare = [] if name in OFTEN and way == "graph" else [pytest.mark.exhaustive]
            yield pytest.param(name, way, marks=[pytest.mark.slow, *rare])


@functools.cache
def _given(name):
    """One function of (2, *event) → (2, m) that has all the methods, an input, and a direction."""
    keras.utils.set_random_seed(0)
    methods, event = CASES[name]()

    def function(x):
        return tf.concat([tf.reshape(method(x), (2, -1)) for method in methods], axis=1)

    rng = np.random.default_rng(0)
    return function, tf.constant(rng.normal(size=(2, *event))), tf.constant(rng.normal(size=(2, *event)))


def _gradient(function, x, second=None):
    """∂/∂x of a weighted sum of the outputs, and its derivative along a direction."""
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        weights = tf.constant(np.random.default_rng(3).normal(size=y.shape))
        slope = tape.gradient(y, x, weights, unconnected_gradients="zero")
    if second is None:
        return slope
    return slope, outer.gradient(slope, x, second, unconnected_gradients="zero")


def _jacobians(function, x, pfor):
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = function(x)
    options = {"unconnected_gradients": "zero", "experimental_use_pfor": pfor}
    return tape.jacobian(y, x, **options), tape.batch_jacobian(y, x, **options)


@functools.cache
def _eager(name):
    function, x, direction = _given(name)
    return [t.numpy() for t in (*_gradient(function, x, direction), *_jacobians(function, x, name not in WITHOUT_PFOR))]


def _agree(found, expected, tolerance=1e-6):
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * (1 + np.abs(expected).max()))


@pytest.mark.parametrize(("name", "way"), _cases())
def test_derivatives(name, way):
    function, x, direction = _given(name)
    slope, product, jacobian, batch = _eager(name)
    if way == "eager":
        m = jacobian.shape[1]
        weights = np.random.default_rng(3).normal(size=(2, m))
        _agree(np.tensordot(weights, jacobian, 2), slope)
        _agree(np.stack([jacobian[i, :, i] for i in range(2)]), batch)
        ahead, behind = (_gradient(function, x + sign * 1e-5 * direction) for sign in (1, -1))
        _agree((ahead - behind) / 2e-5, product, 1e-4)
        values = [function(x + sign * 1e-5 * direction) for sign in (1, -1)]
        _agree((values[0] - values[1]) / 2e-5, np.tensordot(jacobian, direction, direction.shape.rank), 1e-5)
        return
    if way == "XLA" and name in INSIDE_XLA:

        def known(x):  # a flow's methods do not know the size of a batch inside a graph
            return tf.ensure_shape(function(x), jacobian.shape[:2])

        _agree(tf.function(lambda x: _gradient(known, x), autograph=False, jit_compile=True)(x), slope)
        return
    graph = tf.function(function, autograph=False, jit_compile=way == "XLA")
    found, again = _gradient(graph, x, None if way == "XLA" else direction), None
    if way == "graph":
        found, again = found
        _agree(again, product)
    _agree(found, slope)
    for pfor in (False,) if name in WITHOUT_PFOR else (True, False):
        whole, rows = _jacobians(graph, x, pfor)
        _agree(whole, jacobian)
        _agree(rows, batch)


@pytest.mark.slow
def test_every_public_layer_and_bijector_is_asked():
    public = {name: getattr(module, name) for module in (flows, layers, posteriors) for name in module.__all__}
    found = {name for name, value in public.items() if isinstance(value, type) and issubclass(value, keras.layers.Layer)}
    assert found <= set(CASES)
    made = {type(case.make(np.random.default_rng(0), "float64")).__name__ for case in BIJECTORS}
    public = {name: getattr(bijectors, name) for name in bijectors.__all__}
    found = {name for name, value in public.items() if isinstance(value, type) and issubclass(value, tfp.bijectors.Bijector)}
    assert found <= made
