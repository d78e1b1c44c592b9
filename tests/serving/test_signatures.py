import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import AuxReflection
from keras_auxref.serving.signatures import signatures_of
from tests.support import assert_agree


def _model(units=3, activation=None, **compiled):
    model = keras.Sequential([keras.Input((4,)), AuxReflection(), keras.layers.Dense(units, activation=activation)])
    if compiled:
        model.compile("adam", **compiled)
    return model


def _answer(model, x=None, **kwargs):
    signature = signatures_of(model, **kwargs)["serving_default"]
    return signature.function(**{name: tf.constant(x) for name in signature.inputs})


X = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
SPARSE = keras.losses.SparseCategoricalCrossentropy


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (lambda: _model(loss=SPARSE(from_logits=True)), "logits"),
        (lambda: _model(loss=[SPARSE(from_logits=True)]), "logits"),
        (lambda: _model(activation="softmax", loss=SPARSE()), "probabilities"),
        (lambda: _model(activation="softmax", loss="sparse_categorical_crossentropy"), "probabilities"),
        (lambda: _model(activation="softmax"), "probabilities"),
        (lambda: _model(), "raw"),
        (lambda: _model(loss="mse"), "raw"),
        (lambda: _model(activation="softmax", loss="mse"), "raw"),
    ],
)
def test_a_classifier_is_known_by_its_loss(model, kind):
    model = model()
    answer, y = _answer(model, X), model(X)
    if kind == "raw":
        assert set(answer) == {"outputs"}
        assert_agree(answer["outputs"], y)
        return
    expected = tf.nn.softmax(y) if kind == "logits" else y
    np.testing.assert_allclose(answer["probabilities"], expected, rtol=1e-6)
    np.testing.assert_array_equal(answer["class"], np.argmax(y, axis=-1))
    assert answer["class"].dtype == tf.int64


@pytest.mark.parametrize("from_logits", [True, False])
def test_two_classes(from_logits):
    loss = keras.losses.BinaryCrossentropy(from_logits=from_logits)
    model = _model(1, None if from_logits else "sigmoid", loss=loss)
    answer, y = _answer(model, X), model(X).numpy()
    p = 1 / (1 + np.exp(-y)) if from_logits else y
    np.testing.assert_allclose(answer["probabilities"], p, rtol=1e-5)
    np.testing.assert_array_equal(answer["class"], (p[:, 0] > 0.5).astype(int))


def test_the_user_may_say_what_the_outputs_are():
    model = _model()
    assert set(_answer(model, X, outputs="logits")) == {"probabilities", "class"}
    model = _model(loss=SPARSE(from_logits=True))
    assert_agree(_answer(model, X, outputs="raw")["outputs"], model(X))


def test_names_of_inputs():
    def names(*inputs):
        merged = keras.layers.Add()(list(inputs)) if len(inputs) > 1 else inputs[0]
        return list(signatures_of(keras.Model(list(inputs), AuxReflection()(merged)))["serving_default"].inputs)

    assert names(keras.Input((4,))) == ["inputs"]
    assert names(keras.Input((4,)), keras.Input((4,))) == ["inputs", "inputs_1"]
    assert names(keras.Input((4,), name="left side"), keras.Input((4,), name="right")) == ["left_side", "right"]


def test_batch_is_free_whatever_the_model_says():
    model = keras.Sequential([keras.Input((4,), batch_size=2, dtype="int32"), keras.layers.Embedding(5, 3)])
    spec = signatures_of(model)["serving_default"].inputs["inputs"]
    assert tuple(spec.shape) == (None, 4)
    assert spec.dtype == tf.int32


class TwoArguments(keras.Model):
    def call(self, inputs):
        return inputs[0] + inputs[1]


def test_a_model_that_keras_knows_nothing_of_needs_a_signature():
    model = TwoArguments()
    with pytest.raises(ValueError, match=r"Nothing tells the shape.*Received: TwoArguments, built=False"):
        signatures_of(model)
    example = [np.ones((7, 4), "float32"), tf.TensorSpec((None, 4), tf.float32, name="right")]
    signature = signatures_of(model, input_signature=example)["serving_default"]
    assert list(signature.inputs) == ["inputs", "right"]
    answer = signature.function(inputs=tf.constant(X), right=tf.constant(X))["outputs"]
    np.testing.assert_allclose(answer, 2 * X)
    with pytest.raises(ValueError, match=r"Expected tf.TensorSpec or examples. Received: 3"):
        signatures_of(model, input_signature=3)


def test_several_outputs_are_no_classifier():
    x = keras.Input((4,))
    model = keras.Model(x, [keras.layers.Dense(2, name="a")(x), keras.layers.Dense(3, name="b")(x)])
    assert {key: value.shape for key, value in _answer(model, X).items()} == {"a": (5, 2), "b": (5, 3)}
    with pytest.raises(ValueError, match=r"Expected a tensor for outputs='logits'.*Received: list of 2"):
        _answer(model, X, outputs="logits")


def test_a_model_may_bring_its_signatures():
    class Doubling(TwoArguments):
        def export_signatures(self):
            return {"double": (lambda x: {"y": 2 * x}, {"x": ((None, 4), "float32")})}

    found = signatures_of(Doubling())
    assert list(found) == ["double"]
    assert found["double"].inputs == {"x": tf.TensorSpec((None, 4), tf.float32, name="x")}
    np.testing.assert_array_equal(found["double"].function(x=X)["y"], 2 * X)
