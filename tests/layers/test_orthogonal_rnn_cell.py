"""OrthogonalRNNCell: one step, on its own and inside Keras' containers."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import OrthogonalRNNCell
from keras_auxref.initializers import Cayley, Henaff, ReflectionOf
from keras_auxref.layers import ModReLU
from tests.support import assert_agree, orthogonal, reflect

TRANSITIONS = ["aux", "householder", "cayley", "exp"]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def built(units: int = 6, features: int = 3, **arguments: Any) -> OrthogonalRNNCell:
    cell = OrthogonalRNNCell(units, **arguments)
    cell.build((None, features))
    return cell


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_one_step_by_hand(transition: str) -> None:
    cell = built(transition=transition, bias_initializer="normal", dtype="float64")
    x, h = random(4, 3).astype("float64"), random(4, 6, seed=1).astype("float64")
    kernel = cell.transition_kernel().numpy()
    moved = reflect(h, kernel) if transition == "aux" else h @ kernel.T
    z = moved + x @ cell.kernel.numpy() + cell.bias.numpy()
    expected = np.sign(z) * np.maximum(np.abs(z) + cell.activation.bias.numpy(), 0)
    output, [state] = cell(x, [h])
    np.testing.assert_allclose(output, expected, atol=1e-13)
    np.testing.assert_array_equal(state, output)
    output, state = cell(x, h)
    np.testing.assert_array_equal(state, output)


@pytest.mark.parametrize("units", [1, 2, 7, 20])
@pytest.mark.parametrize("start", ["cayley", "henaff"])
def test_every_transition_starts_as_the_same_map(start: str, units: int) -> None:
    h = random(5, units)
    source = {"cayley": Cayley, "henaff": Henaff}[start](seed=3)
    expected = h @ np.asarray(source((units, units))).T
    for transition in TRANSITIONS:
        for given in (source, ReflectionOf(source), np.asarray(source((units, units)))):
            cell = built(units, transition=transition, recurrent_initializer=given, activation=None, use_bias=False)
            np.testing.assert_allclose(cell(np.zeros((5, 3), "float32"), h)[0], expected, atol=2e-5)
    cell = OrthogonalRNNCell(units, recurrent_initializer=start)
    assert isinstance(cell.recurrent_initializer, type(source))


def test_default_start_is_the_one_of_exprnn() -> None:
    for transition in TRANSITIONS:
        assert isinstance(OrthogonalRNNCell(4, transition).recurrent_initializer, Cayley)
    assert isinstance(OrthogonalRNNCell(4, "householder", reflections=4).recurrent_initializer, Cayley)
    few = built(8, transition="householder", reflections=2)
    assert few.recurrent_initializer is None
    assert few.transition_map.kernel.shape == (8, 2)
    assert np.linalg.matrix_rank(np.eye(8) - few.transition_kernel().numpy(), tol=1e-4) == 2


def test_any_other_initializer_makes_the_weights() -> None:
    np.testing.assert_array_equal(built(recurrent_initializer="ones").transition_map.kernel, np.ones((6, 6)))
    q = orthogonal(6, np.random.default_rng(0), 1)
    np.testing.assert_allclose(built(recurrent_initializer=q).transition_kernel(), np.eye(6) - q, atol=1e-6)


def test_initial_state() -> None:
    cell = built(600)
    limit = np.sqrt(3 / (2 * 600))
    assert 0.98 * limit < np.abs(cell.initial_state.numpy()).max() <= limit
    [state] = cell.get_initial_state(batch_size=3)
    np.testing.assert_array_equal(state, np.tile(cell.initial_state.numpy(), (3, 1)))
    cell = built(train_initial_state=False)
    np.testing.assert_array_equal(cell.get_initial_state(batch_size=2)[0], np.zeros((2, 6)))
    assert "initial_state" not in [weight.name for weight in cell.weights]


@pytest.mark.parametrize("activation", ["modrelu", "tanh", "gelu", None, ModReLU(), keras.layers.PReLU()])
@pytest.mark.parametrize("transition", TRANSITIONS)
def test_zero_state_is_safe(transition: str, activation: Any) -> None:
    cell = built(transition=transition, activation=activation)
    h, x = tf.zeros((2, 6)), tf.zeros((2, 3))
    with tf.GradientTape() as tape:
        tape.watch([h, x])
        loss = tf.reduce_sum(cell(x, h)[0] * random(2, 6))
    for gradient in tape.gradient(loss, [h, x, *(w.value for w in cell.trainable_weights)], unconnected_gradients="zero"):
        assert np.isfinite(gradient).all()


def test_in_rnn_and_stacked(tmp_path: Path) -> None:
    cells = [OrthogonalRNNCell(6), OrthogonalRNNCell(4, "exp", activation="tanh", dropout=0.2, recurrent_dropout=0.2)]
    inputs = keras.Input((None, 3))
    single = keras.layers.RNN(OrthogonalRNNCell(5, "cayley"), return_sequences=True)(inputs)
    stacked = keras.layers.RNN(cells)(single)
    model = keras.Model(inputs, stacked)
    x = random(4, 7, 3)
    model.compile("sgd", "mse")
    before = [w.numpy() for w in model.trainable_weights]
    model.fit(x, random(4, 4), verbose=0)
    assert all(np.abs(w.numpy() - b).max() > 0 for w, b in zip(model.trainable_weights, before, strict=True))
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert_agree(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


def test_dropout_masks_are_shared_by_the_steps() -> None:
    """As in Keras' cells: with ones as inputs and nothing else, every step sees the same inputs."""
    cell = OrthogonalRNNCell(
        5, activation=None, use_bias=False, kernel_initializer="ones", train_initial_state=False, dropout=0.5
    )
    cell.build((None, 8))
    cell.transition_map.set_weights([np.zeros((5, 5))])
    layer = keras.layers.RNN(cell, return_sequences=True)
    y = layer(np.ones((6, 4, 8), "float32"), training=True).numpy()[..., 0]
    np.testing.assert_allclose(y, y[:, :1] * np.arange(1, 5), rtol=1e-6)
    assert len(np.unique(y[:, 0])) > 1
    np.testing.assert_allclose(layer(np.ones((1, 4, 8), "float32"))[0, :, 0], 8 * np.arange(1, 5), rtol=1e-6)


def test_configuration() -> None:
    cell = OrthogonalRNNCell(
        5,
        "householder",
        reflections=3,
        activation=ModReLU(bias_regularizer="l2"),
        kernel_regularizer="l2",
        recurrent_regularizer="l1",
        kernel_constraint="max_norm",
        dropout=0.1,
        seed=7,
        train_initial_state=False,
        name="turn",
    )
    again = OrthogonalRNNCell.from_config(cell.get_config())
    assert again.get_config() == cell.get_config()
    assert again.activation.bias_regularizer is not None
    assert again.transition_map.kernel_regularizer is not None


def test_regularizers_see_their_weights() -> None:
    cell = built(kernel_regularizer="l2", recurrent_regularizer="l2", bias_regularizer="l2", bias_initializer="ones")
    expected = [0.01 * np.sum(np.square(w)) for w in (cell.kernel, cell.bias, cell.transition_map.kernel)]
    np.testing.assert_allclose(sorted(float(loss) for loss in cell.losses), sorted(expected), rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"units": 0}, "`units` must be a positive integer. Expected 1, 2, 3, … Received: 0"),
        ({"units": 2.5}, "`units` must be a positive integer. Expected 1, 2, 3, … Received: 2.5"),
        ({"transition": "svd"}, r"Expected one of \['aux', 'cayley', 'exp', 'householder'\]. Received: 'svd'"),
        ({"reflections": 2}, "Expected transition=\"householder\". Received: transition='aux'"),
        ({"transition": "householder", "reflections": 5}, r"Expected 1 ≤ reflections ≤ 4. Received: 5"),
        ({"transition": "householder", "reflections": 0}, r"Expected None, 1, 2, 3, … Received: 0"),
        ({"recurrent_initializer": np.ones((4, 4))}, "Expected an orthogonal matrix"),
        ({"dtype": "int32"}, "floating-point"),
        ({"dropout": 2.0}, r"Expected a number with 0 ≤ dropout ≤ 1. Received: 2.0"),
        ({"recurrent_dropout": "much"}, r"Expected a number with 0 ≤ recurrent_dropout ≤ 1. Received: 'much'"),
    ],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OrthogonalRNNCell(**{"units": 4, **arguments})


def test_error_at_build() -> None:
    with pytest.raises(ValueError, match=r"Expected shape \(batch, ..., d\). Received: \(None, None\)"):
        OrthogonalRNNCell(4).build((None, None))
    with pytest.raises(ValueError, match=r"Expected shape \(4, 4\). Received: \(5, 5\)"):
        built(4, recurrent_initializer=np.eye(5))
