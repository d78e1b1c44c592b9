import keras
import numpy as np
import pytest

from experiments.harness import checkpoints, plotting, training
from experiments.harness.results import Results, Run


def network(eagerly=True):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], run_eagerly=eagerly)  # a dozen steps, which tracing would cost more than
    return model


def random_data(count=40):
    generator = np.random.default_rng(0)
    return generator.normal(size=(count, 4)).astype("float32"), generator.integers(0, 3, count)


def start(folder, run, callbacks=(), model=None):
    model = model or network()
    results = Results(folder / "r.json", "test", {}, {})
    options = {"epochs": 4, "batch_size": 16, "checkpoints": folder / "c", "callbacks": callbacks, "verbose": 0}
    training.train(model, random_data(), random_data(10), run, results, **options)
    return model, results


class Interrupt(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt


class Clock(keras.callbacks.Callback):
    """A step takes a second, a validation a thousand."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def on_train_batch_begin(self, batch, logs=None):
        self.now += 1

    def on_test_begin(self, logs=None):
        self.now += 1000


def test_records_every_epoch_and_leaves_no_checkpoint(tmp_path):
    _, results = start(tmp_path, Run("aux", 0, seed=0), model=network(eagerly=False))
    (run,) = results.runs()
    assert run.finished
    assert {name: len(curve) for name, curve in run.curves.items()} == dict.fromkeys(
        ("seconds", "training_loss", "validation_loss", "validation_error"), 4
    )
    assert all(np.diff([0, *run.curves["seconds"]]) > 0)
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_continues_after_the_last_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "SECONDS", 0)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, Run("aux", 0, seed=0), callbacks=(Interrupt(),))
    results = Results(tmp_path / "r.json", "test", {}, {}, resume=True)
    stopped = results.find("aux", 0)
    assert not stopped.finished
    first = list(stopped.curves["validation_loss"])
    assert len(first) == 2
    model, results = start(tmp_path, stopped)
    (run,) = results.runs()
    assert run.curves["validation_loss"][:2] == first
    assert len(run.curves["seconds"]) == 4
    # Four epochs of three steps in all, in Adam's state too: two before the interruption and two after it.
    assert int(model.optimizer.iterations) == 12


def test_repeats_epochs_without_a_checkpoint(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, Run("aux", 0, seed=0), callbacks=(Interrupt(),))
    model, results = start(tmp_path, Results(tmp_path / "r.json", "test", {}, {}).find("aux", 0))
    assert len(results.runs()[0].curves["seconds"]) == 4
    assert int(model.optimizer.iterations) == 12


def test_a_new_run_ignores_an_old_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "SECONDS", 0)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, Run("aux", 0, seed=0), callbacks=(Interrupt(),))
    _, results = start(tmp_path, Run("aux", 0, seed=0))
    assert len(results.runs()[0].curves["seconds"]) == 4


def test_validation_is_not_timed(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(training, "time", clock)
    _, results = start(tmp_path, Run("aux", 0, seed=0), callbacks=(clock,))
    assert results.runs()[0].curves["seconds"] == [3, 6, 9, 12]  # three steps in an epoch


def test_warm_up_changes_nothing():
    model = network()
    before = model.get_weights()
    training.warm_up(model, training._arrays(random_data(), 16))
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize("repeats", [3])
def test_figure_is_drawn(tmp_path, repeats):
    runs = []
    for position, name in enumerate(("aux", "exp", "something else")):
        for repeat in range(repeats):
            errors = [0.5 / (epoch + 1 + position + repeat / 9) for epoch in range(30)]
            runs.append(Run(name, repeat, repeat, True, curves={"seconds": list(range(30)), "validation_error": errors}))
    path = tmp_path / "figure.png"
    plotting.learning_curves(runs, path, title="test")
    picture = plotting.plt.imread(path)
    assert picture.shape[1] > picture.shape[0] > 400
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 100
    assert [p.name for p in tmp_path.iterdir()] == ["figure.png"]


def test_figure_of_one_epoch_without_errors(tmp_path):
    runs = [Run("aux", 0, 0, True, curves={"seconds": [1.0], "validation_error": [0.0]})]
    plotting.learning_curves(runs, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
