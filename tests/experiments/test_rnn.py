"""The experiment as a user runs it, in an empty folder; then its parts."""

import csv
import itertools
import json
import math

import keras
import matplotlib.image
import numpy as np
import pytest

from experiments import rnn
from experiments.harness import checkpoints, data, plotting, sequences, training
from experiments.harness.results import Results, Run

SMALL = ("--hidden", "8", "--epochs", "2", "--runs", "1", "--verbose", "2")
TINY = ("--transition", "aux", "--transition", "householder-1", "--train-size", "64", *SMALL)


@pytest.mark.slow
def test_trains_draws_and_resumes(experiment_here, tmp_path):
    done = experiment_here("rnn", *TINY)
    assert done.returncode == 0, done.stderr
    folder, stem = tmp_path / "runs" / "rnn-digits", "rnn-digits"
    names = [f"{stem}-{name}-0.{kind}" for name in ("aux", "householder-1") for kind in ("csv", "keras")]
    names += [f"{stem}.json", f"{stem}.png"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)

    text = (folder / f"{stem}.json").read_text()
    assert str(tmp_path) not in text
    content = json.loads(text)
    assert content["dataset"]["train"] == 64
    assert content["dataset"]["permuted"] is False
    assert content["settings"]["learning_rate"] == rnn.DEFAULTS["digits"]["learning_rate"]
    assert "clip" not in content["settings"]  # as in files from before there was one
    assert [(run["map"], run["run"], run["seed"]) for run in content["runs"]] == [("aux", 0, 0), ("householder-1", 0, 0)]
    for run in content["runs"]:
        assert run["finished"]
        assert {len(curve) for curve in run["curves"].values()} == {2}
        rows = list(csv.DictReader((folder / f"{stem}-{run['map']}-0.csv").open()))
        np.testing.assert_allclose([float(row["val_loss"]) for row in rows], run["curves"]["validation_loss"], rtol=1e-4)
    picture = matplotlib.image.imread(folder / f"{stem}.png")
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 100
    assert "| householder-1 |    1 |" in done.stdout

    again = experiment_here("rnn", *TINY, "--resume")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("finished before") == 2
    assert json.loads((folder / f"{stem}.json").read_text()) == content

    clipped = experiment_here("rnn", *TINY, "--resume", "--clip", "1")
    assert clipped.returncode == 1
    assert "other settings (clip=None)" in clipped.stderr


@pytest.mark.parametrize("kernel", rnn.KERNELS)
def test_a_bound_makes_a_transition_with_a_proof(monkeypatch, kernel):
    monkeypatch.setattr("sys.argv", ["rnn", "--transition", "aux", "--lipschitz", "1.5", "--kernel", kernel])
    args = rnn.arguments()
    assert args.transitions == ["aux", f"aux+{kernel}=1.5"]
    x = sequences.pixels(data.load("digits").limit(8))
    layer = rnn.build_model(args.transitions[1], "pixels", x, 6, "cayley").layers[0]
    assert layer.cell.transition_map.certificate().lipschitz <= 1.5
    monkeypatch.setattr("sys.argv", ["rnn", "--lipschitz", "3"])
    with pytest.raises(SystemExit):
        rnn.arguments()


@pytest.mark.parametrize("task", ["copying", "adding"])
def test_memory_tests(experiment_here, tmp_path, task):
    options = ("--task", task, "--length", "12", "--steps-per-epoch", "3", "--batch-size", "8", "--transition", "lstm")
    done = experiment_here("rnn", *options, "--transition", "aux", *SMALL)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "runs" / f"rnn-{task}-12" / f"rnn-{task}-12.json").read_text())
    assert content["dataset"]["length"] == 12
    assert content["settings"]["steps_per_epoch"] == 3
    assert [run["map"] for run in content["runs"]] == ["lstm", "aux"]
    assert all(len(run["curves"]["validation_loss"]) == 2 for run in content["runs"])
    assert "Loss of the best answer without memory" in done.stdout


def test_missing_mnist_is_one_sentence(experiment, tmp_path):
    done = experiment("rnn", "--dataset", "mnist", "--no-download", TFDS_DATA_DIR=str(tmp_path / "empty"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "--dataset digits" in done.stderr


@pytest.mark.parametrize(
    "options",
    [("--transition", "qr"), ("--hidden", "0"), ("--learning-rate", "-1"), ("--task", "copying", "--permute"), ("--length", "5")],
)
def test_wrong_arguments_are_refused_at_once(experiment, options):
    done = experiment("rnn", *options)
    assert done.returncode == 2
    assert options[-1 if options[-1].startswith("--") else 0] in done.stderr
    assert "Traceback" not in done.stderr


def test_pixels():
    dataset = data.load("digits").limit(5)
    plain, permuted = sequences.pixels(dataset), sequences.pixels(dataset, permute=True)
    assert plain.train[0].shape == (5, 64, 1)
    assert plain.steps == 64
    np.testing.assert_array_equal(plain.train[0][:, :, 0] * 16, dataset.train_images.reshape(5, 64))
    assert not np.array_equal(plain.train[0], permuted.train[0])
    for a, b in ((plain.train, permuted.train), (plain.validation, permuted.validation)):
        np.testing.assert_array_equal(np.sort(a[0], axis=1), np.sort(b[0], axis=1))
    np.testing.assert_array_equal(permuted.train[0], sequences.pixels(dataset, permute=True).train[0])
    assert permuted.description["permuted"]


def test_copying():
    x = sequences.copying(30, train=200, validation=50)
    inputs, targets = x.train
    assert inputs.shape == targets.shape == (200, 50)
    assert x.validation[0].shape == (50, 50)
    symbols = inputs[:, :10]
    assert set(np.unique(symbols)) == set(range(1, 9))
    np.testing.assert_array_equal(targets[:, -10:], symbols)
    assert not targets[:, :-10].any()
    assert not inputs[:, 10:39].any()
    assert (inputs[:, 39] == sequences.DELIMITER).all()
    assert not inputs[:, 40:].any()
    assert x.baseline == pytest.approx(10 * math.log(8) / 50)
    assert not np.array_equal(inputs[:50], x.validation[0])


def test_adding():
    x = sequences.adding(31, train=500, validation=20)
    inputs, targets = x.train
    assert inputs.shape == (500, 31, 2)
    assert targets.shape == (500, 1)
    marks = inputs[..., 1]
    np.testing.assert_array_equal(marks[:, :15].sum(axis=1), 1)
    np.testing.assert_array_equal(marks[:, 15:].sum(axis=1), 1)
    np.testing.assert_allclose(targets[:, 0], (inputs[..., 0] * marks).sum(axis=1))
    assert np.mean((targets - 1) ** 2) == pytest.approx(x.baseline, rel=0.2)


@pytest.mark.parametrize(
    ("name", "task"),
    zip([*rnn.TRANSITIONS, *rnn.REFERENCES], itertools.cycle(["copying", "adding", "pixels"]), strict=False),
)
def test_models(task, name):
    x = {
        "pixels": lambda: sequences.pixels(data.load("digits").limit(8)),
        "copying": lambda: sequences.copying(7, 8, 4),
        "adding": lambda: sequences.adding(7, 8, 4),
    }[task]()
    model = rnn.build_model(name, task, x, hidden=6, start="henaff")
    outputs = model(x.train[0])
    assert outputs.shape == {"pixels": (8, 10), "copying": (8, 27, 9), "adding": (8, 1)}[task]
    optimizer = rnn.optimizer(1e-3, 1e-4)
    optimizer.build(model.trainable_variables)
    chosen = {v.path.split("/", 1)[1]: type(optimizer._optimizer_map(v)).__name__ for v in model.trainable_variables}
    transition = [path for path, kind in chosen.items() if kind == "Adam"]
    assert transition == ([] if name in rnn.REFERENCES else ["rnn/orthogonal_rnn_cell/transition/kernel"])


def test_all_but_one_reflection_start_as_the_same_network():
    x = sequences.pixels(data.load("digits").limit(8))
    outputs = {}
    for name in rnn.TRANSITIONS:
        keras.utils.set_random_seed(0)
        outputs[name] = rnn.build_model(name, "pixels", x, hidden=10, start="cayley")(x.train[0]).numpy()
    for name in ("householder", "cayley", "exp"):
        np.testing.assert_allclose(outputs[name], outputs["aux"], rtol=1e-3, atol=1e-3)
    assert np.abs(outputs["householder-1"] - outputs["aux"]).max() > 0.1


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_gradients_are_clipped_where_asked(clip):
    """Of every weight, whichever optimizer has it."""
    optimizer = rnn.optimizer(1.0, 1.0, clip)
    model = rnn.build_model("aux", "adding", sequences.adding(3, 8, 4), 4, "cayley")
    optimizer.build(model.trainable_variables)
    gradients = [keras.ops.ones(variable.shape) for variable in model.trainable_variables]
    optimizer.apply(gradients, model.trainable_variables)
    adam, rms = optimizer.optimizers
    # Both keep a running mean of squares: after one step (1 − β) times the square of what they were given.
    for part, share in ((adam, 1e-3), (rms, 0.1)):
        squares = [keras.ops.convert_to_numpy(v) for v in part.variables if v.path.endswith("velocity")]
        assert squares
        for velocity in squares:
            length = np.sqrt(velocity.sum() / share)
            assert length == pytest.approx(clip or math.sqrt(velocity.size), rel=1e-3)


class Interrupt(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt


def test_both_optimizers_are_in_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "SECONDS", 0)
    x = sequences.adding(5, 32, 8)

    def start(run, callbacks=()):
        keras.utils.set_random_seed(0)
        model = rnn.build_model("aux", "adding", x, 4, "cayley")
        model.compile(rnn.optimizer(1e-3, 1e-4), "mse", run_eagerly=True)
        results = Results(tmp_path / "r.json", "rnn", {}, {})
        options = {"epochs": 4, "batch_size": 16, "checkpoints": tmp_path / "c", "verbose": 0, "measures": rnn.losses}
        training.train(model, x.train, x.validation, run, results, callbacks=callbacks, **options)
        return model, results

    with pytest.raises(KeyboardInterrupt):
        start(Run("aux", 0, seed=0), (Interrupt(),))
    model, results = start(Results(tmp_path / "r.json", "rnn", {}, {}).find("aux", 0))
    assert len(results.runs()[0].curves["validation_loss"]) == 4
    assert [int(optimizer.iterations) for optimizer in model.optimizer.optimizers] == [8, 8]


def test_figure_with_two_rows_and_a_baseline(tmp_path):
    curves = {"seconds": [1.0, 2.0], "validation_error": [0.5, 0.1], "validation_loss": [2.0, 0.001]}
    runs = [Run(name, 0, 0, True, curves=curves) for name in ("aux", "householder-1", "lstm")]
    more = [("validation_loss", "Loss", 1.0)]
    plotting.learning_curves(runs, tmp_path / "one.png")
    plotting.learning_curves(runs, tmp_path / "two.png", more=more, baseline=(20.0, "without memory"))
    one, two = (plotting.plt.imread(tmp_path / f"{name}.png") for name in ("one", "two"))
    assert two.shape[0] > 1.5 * one.shape[0]
    assert one.shape[1] == two.shape[1]


@pytest.mark.parametrize(("slower", "scale"), [(11, "linear"), (13, "log")])
def test_a_fast_map_beside_a_slow_one_is_more_than_a_stroke_at_the_edge(tmp_path, monkeypatch, slower, scale):
    drawn = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: drawn.append(figure))
    curves = [{"seconds": [t, 2 * t, 3 * t], "validation_error": [0.3, 0.2, 0.1]} for t in (7.0, 7.0 * slower)]
    runs = [Run(name, 0, 0, True, curves=c) for name, c in zip(("aux", "exp"), curves, strict=True)]
    plotting.learning_curves(runs, tmp_path / "x.png")
    over_epochs, over_seconds = drawn[0].axes
    assert (over_epochs.get_xscale(), over_seconds.get_xscale()) == ("linear", scale)
    low, high = over_seconds.get_xlim()
    assert low < 7
    assert high > 21 * slower
    assert (low == 0) == (scale == "linear")
    plotting.plt.close(drawn[0])


def test_a_baseline_below_all_curves_is_in_the_figure(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: drawn.append(figure))
    curves = {"seconds": [1.0, 2.0, 3.0], "validation_bits": [4.2, 3.9, 3.8]}
    names = ("aux_factored", "aux_factored+additive", "conv")
    runs = [Run(name, 0, 0, True, curves=curves) for name in names]
    options = {"measure": "validation_bits", "scale": 1.0, "skip": 0.1}
    plotting.learning_curves(runs, tmp_path / "x.png", baseline=(3.66, "the paper"), **options)
    axis = drawn[0].axes[0]
    assert axis.get_ylim()[0] < 3.66
    assert axis.get_ylim()[1] > 4.2
    labels = [line.get_label() for line in axis.get_lines()]
    assert labels == ["factored reflection", "factored reflection, additive", "1×1 convolution", "the paper"]
    # A setting is told from its map by the line, and from other maps by the colour.
    looks = [(line.get_color(), line.get_linestyle()) for line in axis.get_lines()[:3]]
    assert looks[0][0] == looks[1][0] != looks[2][0]
    assert looks[0][1] != looks[1][1]
    plotting.plt.close(drawn[0])
