"""AutoGraph and SavedModels have nothing to warn of."""

import ast
import logging
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_auxref
from keras_auxref import Glow, posteriors
from keras_auxref.layers import AuxReflection, FactoredReflection, OrthogonalDense, OrthogonalRNN, SVDDense
from tests.layers.test_invertible import CLASSES, _input, _make


class Warnings(logging.Handler):
    """What TensorFlow and absl log, from WARNING on."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@pytest.fixture
def warnings():
    handler, loggers = Warnings(), [logging.getLogger(name) for name in ("tensorflow", "absl", None)]
    for logger in loggers:
        logger.addHandler(handler)
    yield handler.messages
    for logger in loggers:
        logger.removeHandler(handler)


def _everything(layer, x, y):
    """All methods of the contract, and the gradient of all of them."""

    def methods(x, y):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            values = [layer(x), layer.inverse(y), layer.log_det_jacobian(x), *layer.forward_and_log_det(x)]
            total = tf.add_n([tf.reduce_sum(value) for value in values])
        return tape.gradient(total, [x, y])

    return methods, (x, y)


def _recurrent(transition, training):
    layer = OrthogonalRNN(3, transition=transition, return_sequences=training)

    def methods(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = layer(x, training=training)
        return tape.gradient(value, x), layer(x, mask=tf.constant([[True, False], [False, False]]))

    layer.build((None, None, 4))
    return methods, (tf.ones((2, 2, 4)),)


def _amortised(layer):
    z, context = tf.ones((2, 3)), tf.ones((2, 4))
    layer(z, context)
    return lambda z, h: (layer(z, h), layer.inverse(z, h), layer.forward_and_log_det(z, h)), (z, context)


def _flow():
    model = Glow((4, 4, 1), levels=1, steps=1, hidden=4)
    images = np.random.default_rng(0).integers(0, 256, (8, 4, 4, 1), dtype="uint8")
    model.initialize(images)
    return lambda images, z: (model.encode(images), model.log_prob(images), model.decode(z)), (images, tf.zeros((2, 16)))


FLOWS = {
    "rnn_aux": lambda: _recurrent("aux", True),
    "rnn_exp": lambda: _recurrent("exp", False),
    "sylvester": lambda: _amortised(posteriors.SylvesterFlow(1)),
    "householder_flow": lambda: _amortised(posteriors.HouseholderFlow(1)),
    "factored_flow": lambda: _amortised(posteriors.FactoredFlow(1)),
    "glow": _flow,
}
QUICK = ("factored_cayley", "coupling_odd", "act_norm", "dense_image", "rnn_aux")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in (*CLASSES, "exp", *FLOWS)]
)
def test_autograph_converts_every_public_method(rng, warnings, name):
    if name in FLOWS:
        function, arguments = FLOWS[name]()
    else:
        layer, x = _make(name, rng), tf.constant(_input(name, rng))
        function, arguments = _everything(layer, x, layer(x))
    warnings.clear()
    tf.function(function)(*arguments)
    assert warnings == []


NEVER_IN_GRAPHS = {"diagnostics.py", "saved_model.py"}


def test_no_annotated_name_is_used_by_an_inner_function():
    """AutoGraph makes such a name nonlocal, which Python refuses."""
    found = []
    for path in Path(keras_auxref.__file__).parent.rglob("*.py"):
        for outer in ast.walk(ast.parse(path.read_text())):
            if not isinstance(outer, ast.FunctionDef) or path.name in NEVER_IN_GRAPHS:
                continue
            inner = [n for n in ast.walk(outer) if isinstance(n, ast.FunctionDef | ast.Lambda) and n is not outer]
            used = {n.id for function in inner for n in ast.walk(function) if isinstance(n, ast.Name)}
            annotated = {n.target.id for n in ast.walk(outer) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
            found += [f"{path.name}: {outer.name}: {name}" for name in used & annotated]
    assert found == []


SAVED = {
    "aux": AuxReflection,
    "factored": FactoredReflection,
    "exp": lambda: OrthogonalDense("exp"),
    "svd": lambda: SVDDense(3, map="householder"),
}


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_model_loads_without_warnings_and_has_its_gradient(rng, tmp_path, warnings, name):
    layer = SAVED[name]()
    model = keras.Sequential([keras.Input((4,)), layer])
    x = tf.constant(rng.normal(size=(3, 4)), "float32")

    def gradient(function):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = tf.reduce_sum(tf.sin(function(x)))
        return tape.gradient(value, x)

    expected = gradient(model)
    warnings.clear()
    model.export(tmp_path / "model", verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    assert warnings == []
    np.testing.assert_allclose(gradient(loaded.serve), expected, atol=1e-5)


class Inverse(tf.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.weights = layer, [weight.value for weight in layer.weights]

    @tf.function
    def __call__(self, y):
        return self.layer.inverse(y)


@pytest.mark.parametrize("name", [pytest.param("aux_spectral", marks=pytest.mark.slow), "factored"])
def test_a_saved_inverse_has_its_gradient_and_refuses_a_second_one(rng, tmp_path, warnings, name):
    layer, y = _make(name), tf.constant(_input(name, rng))
    module = Inverse(layer)
    module(y)
    warnings.clear()
    tf.saved_model.save(module, str(tmp_path / "inverse"))
    loaded = tf.saved_model.load(str(tmp_path / "inverse"))
    assert warnings == []
    gradients = []
    for function in (layer.inverse, loaded):
        with tf.GradientTape() as tape:
            tape.watch(y)
            value = function(y)
        gradients.append(tape.gradient(value, y))
    np.testing.assert_allclose(*gradients, atol=1e-4)
    if name == "factored":
        with pytest.raises(LookupError, match="SavedModel keeps the first derivatives"):
            _second_derivative(loaded, y)


def _second_derivative(function, y):
    with tf.GradientTape() as outer:
        outer.watch(y)
        with tf.GradientTape() as inner:
            inner.watch(y)
            value = function(y)
        first = inner.gradient(value, y)
    return outer.gradient(first, y)
