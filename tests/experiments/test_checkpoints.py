"""A run that is killed while it writes a checkpoint, at any moment, goes on with the one before."""

import os

import keras
import numpy as np
import pytest

from experiments.harness import checkpoints
from experiments.harness.checkpoints import Checkpoint, restore
from keras_auxref import Flow

X, Y = np.random.default_rng(0).normal(size=(8, 4)).astype("float32"), np.zeros(8)


def network():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("adam", "sparse_categorical_crossentropy", run_eagerly=True)
    model.optimizer.build(model.trainable_variables)
    return model


def state(model):
    return [keras.ops.convert_to_numpy(variable) for variable in (*model.variables, *model.optimizer.variables)]


def assert_same(first, second):
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


class States(keras.callbacks.Callback):
    """The state after every epoch."""

    def __init__(self):
        super().__init__()
        self.states = {}

    def on_epoch_end(self, epoch, logs=None):
        self.states[epoch + 1] = state(self.model)


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A folder with checkpoints of three epochs, and the states after each."""
    monkeypatch.setattr(checkpoints, "SECONDS", 0)
    seen = States()
    network().fit(X, Y, epochs=3, verbose=0, callbacks=[Checkpoint(tmp_path), seen])
    return tmp_path, seen.states


def test_two_are_kept_and_the_newest_is_restored(trained):
    folder, states = trained
    assert sorted(os.listdir(folder)) == ["epoch-2.weights.h5", "epoch-3.weights.h5"]
    model = network()
    assert restore(model, folder) == 3
    assert_same(state(model), states[3])


@pytest.mark.parametrize("share", [0, 0.3, 0.7, 0.99])
def test_a_file_that_was_cut_off_is_passed_over(trained, share, capsys):
    folder, states = trained
    newest = folder / "epoch-3.weights.h5"
    os.truncate(newest, int(share * newest.stat().st_size))
    model = network()
    assert restore(model, folder) == 2
    assert_same(state(model), states[2])
    assert "epoch-3.weights.h5: expected a checkpoint" in capsys.readouterr().out


def test_without_a_readable_one_the_model_is_as_it_was(trained, tmp_path):
    folder, _ = trained
    for file in folder.iterdir():
        os.truncate(file, file.stat().st_size // 2)
    model = network()
    before = state(model)
    assert restore(model, folder) == 0
    assert restore(model, tmp_path / "none") == 0
    assert_same(state(model), before)


def test_one_that_is_killed_while_it_writes_leaves_those_before(trained, monkeypatch):
    folder, states = trained

    def killed(self, path):
        path.write_bytes(b"half of a checkpoint")
        raise KeyboardInterrupt

    model = network()
    start = restore(model, folder)
    with monkeypatch.context() as patch:
        patch.setattr(keras.Model, "save_weights", killed)
        with pytest.raises(KeyboardInterrupt):
            model.fit(X, Y, initial_epoch=start, epochs=5, verbose=0, callbacks=[Checkpoint(folder)])
    model = network()
    assert restore(model, folder) == 3
    assert_same(state(model), states[3])
    model.fit(X, Y, initial_epoch=3, epochs=4, verbose=0, callbacks=[Checkpoint(folder)])
    assert sorted(os.listdir(folder)) == ["epoch-3.weights.h5", "epoch-4.weights.h5"]


def test_quick_epochs_share_a_checkpoint(tmp_path):
    network().fit(X, Y, epochs=3, verbose=0, callbacks=[Checkpoint(tmp_path / "c")])
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(("other", "expected"), [([3, 2, 0], 3), ([2, 1, 0], 2), ([4, 1, 0], 0), ([0, 0, 0], 0)])
def test_processes_begin_with_an_epoch_that_all_of_them_have(trained, other, expected):
    folder, states = trained
    model = network()
    before = state(model)
    assert restore(model, folder, lambda mine: [mine, other]) == expected
    assert_same(state(model), states[expected] if expected else before)


def test_what_one_process_cannot_read_is_no_epoch_of_all(trained):
    folder, states = trained
    newest = folder / "epoch-3.weights.h5"
    os.truncate(newest, newest.stat().st_size // 2)
    asked = []

    def gather(mine):
        asked.append(mine)
        return [mine, [3, 2, 0]]

    model = network()
    assert restore(model, folder, gather) == 2
    assert asked == [[2, 0, 0]]
    assert_same(state(model), states[2])


def test_processes_write_together_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "SECONDS", 0)
    due = iter([0, 1, 0])  # of the other process
    network().fit(X, Y, epochs=3, verbose=0, callbacks=[Checkpoint(tmp_path, lambda mine: [mine, [next(due)]])])
    assert sorted(os.listdir(tmp_path)) == ["epoch-2.weights.h5"]


def test_an_average_of_weights_and_the_weights_go_on_together(tmp_path, monkeypatch):
    """A checkpoint between two epochs, where the model shows the average, has the weights that are trained."""
    monkeypatch.setattr(checkpoints, "SECONDS", 0)
    x = np.random.default_rng(1).normal(size=(16, 2)).astype("float32")

    def flow():
        keras.utils.set_random_seed(0)
        model = Flow(2, steps=1, hidden=4, coupling="affine", seed=1)
        model.compile(Flow.optimizer(0.05, warmup_steps=0, average=0.9), run_eagerly=True)
        model.initialize(x)
        model.optimizer.build(model.trainable_variables)
        return model

    whole, seen = flow(), States()
    settings = {"batch_size": 8, "verbose": 0, "shuffle": False, "validation_data": (x,)}
    whole.fit(x, epochs=2, callbacks=[seen], **settings)
    flow().fit(x, epochs=1, callbacks=[Checkpoint(tmp_path)], **settings)
    resumed = flow()
    assert restore(resumed, tmp_path) == 1
    averages = seen.states[1][: len(whole.variables)]
    assert any(not np.allclose(a, b, atol=1e-4) for a, b in zip(state(resumed), averages, strict=False))
    resumed.fit(x, epochs=2, initial_epoch=1, **settings)
    for one, other in zip(state(resumed), state(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
