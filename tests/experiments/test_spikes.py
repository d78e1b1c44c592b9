"""The length of gradients, step by step."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from experiments import rnn, spikes
from experiments.harness import data, sequences


def network() -> tuple[keras.Sequential, sequences.Sequences]:
    keras.utils.set_random_seed(0)
    x = sequences.pixels(data.load("digits").limit(64))
    return rnn.build_model("aux", "pixels", x, hidden=6, start="cayley"), x


def trained(clip: float | None, steps: int, rate: float = 1e-3) -> tuple[dict, float, float]:
    """What was recorded; and the loss and the gradient of the first batch, by other means."""
    model, x = network()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with tf.GradientTape() as tape:  # the batch is all there is: its order does not matter
        loss = loss_of(x.train[1], model(x.train[0], training=True))
    (kernel,) = [v.value for v in model.trainable_variables if "/transition/" in v.path]
    length = np.linalg.norm(tape.gradient(loss, kernel))
    model.compile(rnn.optimizer(rate, rate, clip), loss_of)
    inputs, labels = (np.tile(part, (steps, *[1] * (part.ndim - 1))) for part in x.train)
    return spikes.trace(model, inputs, labels, 64, steps), float(loss), float(length)


@pytest.mark.parametrize("clip", [None, 1e-6])
def test_the_gradient_is_that_of_the_transition_before_clipping(clip):
    found, loss, length = trained(clip, steps=1)
    assert found["gradient"] == [pytest.approx(length, rel=1e-3)]
    assert found["loss"] == [pytest.approx(loss, rel=1e-3)]


def test_the_network_is_trained():
    found, loss, _ = trained(1.0, steps=30, rate=1e-2)
    assert [len(values) for values in found.values()] == [30, 30]
    assert found["loss"][0] == pytest.approx(loss, rel=0.2)
    assert np.mean(found["loss"][-5:]) < 0.8 * loss
    assert len(set(found["gradient"])) > 20


def test_a_spike_is_told_from_a_slow_change():
    gradient = list(np.linspace(100, 50, 60))
    assert spikes.spike(gradient)[1] < 1.1
    gradient[40] = 6000.0
    step, ratio = spikes.spike(gradient)
    assert step == 40
    assert ratio == pytest.approx(80, rel=0.01)
    assert spikes.spike(gradient[:20]) == (0, 1.0)


@pytest.mark.slow
def test_writes_its_file_and_its_figure(experiment_here, tmp_path):
    arguments = ("--transition", "aux", "--hidden", "6", "--train-size", "704", "--train-steps", "22", "--output", "here")
    done = experiment_here("spikes", *arguments)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "here" / "spikes-digits.json").read_text())
    assert [run["clip"] for run in written["runs"]] == [None, 1.0]
    assert all(len(run["gradient"]) == 22 and min(run["gradient"]) > 0 for run in written["runs"])
    # The same network and the same batches: apart from the first step on.
    first, second = (run["gradient"] for run in written["runs"])
    assert first[0] == pytest.approx(second[0], rel=0.01)
    assert first[-1] != second[-1]
    assert (tmp_path / "here" / "spikes-digits.png").stat().st_size > 10_000


@pytest.mark.slow
def test_another_backend_is_refused(experiment):
    pytest.importorskip("jax")
    done = experiment("spikes", KERAS_BACKEND="jax")
    assert done.returncode == 1
    assert "expected Keras' backend tensorflow, received jax" in done.stderr


def test_more_steps_than_an_epoch_has_are_refused(experiment_here):
    done = experiment_here("spikes", "--train-size", "64", "--train-steps", "3")
    assert done.returncode == 1
    assert "expected at most the 2 steps of an epoch, received 3" in done.stderr


@pytest.mark.parametrize("argument", [("--resume",), ("--jit",), ("--strategy", "mirrored")])
def test_arguments_without_use_are_refused(experiment_here, argument):
    done = experiment_here("spikes", *argument)
    assert done.returncode == 2
    assert f"not of use here: {argument[0]}" in done.stderr


def test_a_transition_with_a_proof_is_recorded_over_all_of_its_weights():
    _, x = network()
    model = rnn.build_model("aux+relaxed_cayley=1.1", "pixels", x, hidden=6, start="cayley")
    assert model.layers[0].cell.transition_map.certificate().lipschitz <= 1.1
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with tf.GradientTape() as tape:
        value = loss(x.train[1], model(x.train[0], training=True))
    weights = [v.value for v in model.trainable_variables if "/transition/" in v.path]
    assert len(weights) == 2
    length = float(tf.linalg.global_norm(tape.gradient(value, weights)))
    model.compile(rnn.optimizer(1e-3, 1e-3), loss)
    assert spikes.trace(model, *x.train, 64, 1)["gradient"] == [pytest.approx(length, rel=1e-3)]
