"""How the methods of every invertible layer take their input; a new layer is tested by the registry of tests/layers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref.layers import AuxReflection, FactoredReflection, ModReLU
from tests.layers.test_invertible import CASES, _input, _make
from tests.support import assert_agree, relative

FEW = [
    "aux_relaxed_cayley",
    "factored",
    "householder",
    "svd",
    "qr",
    "act_norm",
    "dense",
    "coupling_image",
    "permutation",
    "squeeze",
]
each = pytest.mark.parametrize("name", FEW)


def _move(layer, rng):
    for weight in layer.trainable_weights:
        weight.assign_add(0.2 * rng.normal(size=weight.shape))


@each
def test_functional_models_hold_the_methods_with_the_weights_of_the_layer(rng, tmp_path, name):
    layer_class, arguments, shape = CASES[name]
    layer, x = layer_class(**arguments), _input(name, rng)
    inputs = keras.Input(shape[1:])
    outputs = layer(inputs)
    model = keras.Model(inputs, [layer.inverse(outputs), layer.log_det_jacobian(inputs), *layer.forward_and_log_det(inputs)])
    assert len(model.weights) == len(layer.weights)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    for own, this in ((layer, model), (loaded.layers[1], loaded)):
        _move(own, rng)  # a model that kept tensors instead of weights would not notice
        back, log_det, y, both = this(x)
        assert [tuple(t.shape)[1:] for t in this.outputs] == [tuple(t.shape)[1:] for t in (back, log_det, y, both)]
        assert relative(back, x) < 1e-4
        for found, expected in ((log_det, own.log_det_jacobian(x)), (y, own(x)), (both, own.log_det_jacobian(x))):
            assert_agree(found, expected)


@pytest.mark.slow
def test_an_autoencoder_with_a_tied_inverse_trains(rng):
    layer = AuxReflection("spectral")
    inputs = keras.Input((4,))
    code = layer(inputs) * np.array([1, 1, 0, 0], "float32")
    model = keras.Model(inputs, layer.inverse(code))
    model.compile(keras.optimizers.Adam(0.03), "mse")
    x = (rng.normal(size=(64, 2)) @ rng.normal(size=(2, 4))).astype("float32")
    losses = model.fit(x, x, epochs=12, verbose=0).history["loss"]
    assert losses[-1] < 0.9 * losses[0]


def test_a_layer_that_is_first_used_by_its_inverse_belongs_to_the_model():
    layer = FactoredReflection()
    inputs = keras.Input((4,))
    decoder = keras.Model(inputs, layer.inverse(keras.layers.Dense(4)(inputs)))
    assert len(decoder.trainable_weights) == 2 + len(layer.trainable_weights)


@each
@pytest.mark.parametrize("method", ["forward_and_log_det", "inverse", "log_det_jacobian"])
def test_methods_build_on_first_use(rng, name, method):
    layer_class, arguments, _ = CASES[name]
    built, x = _make(name), _input(name, rng)
    x = built(x) if method == "inverse" else x
    layer = layer_class(**arguments)
    found = getattr(layer, method)(x)
    assert layer.built
    assert len(layer.weights) == len(built.weights)
    for weight, other in zip(layer.weights, built.weights, strict=True):
        assert weight.shape == other.shape
        other.assign(weight)
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(getattr(built, method)(x)), strict=True):
        assert_agree(a, b)


class FirstUse(keras.Model):
    def __init__(self):
        super().__init__()
        self.reflection = FactoredReflection()

    def call(self, x):
        y, log_det = self.reflection.forward_and_log_det(x)
        return y + log_det[:, None]


def test_a_layer_of_a_model_is_built_and_trained_inside_its_first_step(rng):
    model, x = FirstUse(), rng.normal(size=(8, 4)).astype("float32")
    model.compile(keras.optimizers.SGD(0.01), "mse")
    model.fit(x, x, verbose=0)
    start = [weight.numpy() for weight in model.trainable_weights]
    assert len(start) == 3
    model.fit(x, x, verbose=0)
    assert max(np.abs(a - b).max() for a, b in zip(start, model.trainable_weights, strict=True)) > 0


X = np.ones((2, 4), "float32")
BAD = {
    "none": (None, "Received: None"),
    "no_numbers": (X[:, :0], r"Expected shape .*Received: \((2|None), 0\)"),
    "two": ([X, X], r"Received: 2 (inputs|tensors in a list)"),
    "sparse": (tf.sparse.from_dense(X), "Received: a sparse tensor"),
    "ragged": (tf.ragged.constant([[X[0], X[0]], [X[0]]], inner_shape=(4,)), "Received: a ragged tensor"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", ["aux_spectral", "factored", "householder", "svd", "qr", "act_norm", "dense", "permutation"])
def test_what_is_not_one_tensor_gets_one_sentence(name, kind):
    layer_class, arguments, _ = CASES[name]
    value, message = BAD[kind]
    with pytest.raises(ValueError, match=message):
        layer_class(**arguments)(value)
    for method in ("inverse", "log_det_jacobian", "forward_and_log_det"):
        for built in (False, True):
            layer = layer_class(**arguments)
            if built:
                layer.build((None, 4))
            with pytest.raises(ValueError, match=message):
                getattr(layer, method)(value)


def test_two_inputs_of_a_layer_that_is_not_invertible():
    with pytest.raises(ValueError, match="Received: 2 inputs"):
        ModReLU()([X, X])


def test_lists_of_numbers_are_tensors():
    layer = FactoredReflection()
    assert_agree(layer.inverse([[1.0, 2.0], [3.0, 4.0]]), layer.inverse(np.array([[1, 2], [3, 4]], "float32")))


@pytest.mark.parametrize("method", ["forward_and_log_det", "inverse", "log_det_jacobian"])
def test_another_width_than_the_layer_was_built_for(method):
    layer = FactoredReflection()
    layer.build((None, 3))
    with pytest.raises(ValueError, match=rf"FactoredReflection.{method}.*Expected shape \(..., 3\). Received: \(2, 4\)"):
        getattr(layer, method)(X)
