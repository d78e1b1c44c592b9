"""The scripts to learn from, on a few images: they train, print a result, save, and what they save can be exported."""

import re
from pathlib import Path

import keras
import matplotlib.image
import numpy as np
import pytest

import keras_auxref.flows
from tests.examples.conftest import EXAMPLES, load

export, fcnn, glow, rnn = map(load, ("export", "fcnn", "glow", "rnn"))
SCRIPTS = tuple(sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "__init__"))
SHORT = {"fcnn": 100, "rnn": 100, "glow": 100, "export": 100, "serve": 300, "protocol": 190, "client": 220}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def _few(load, count):
    """A loader that gives the first images only."""

    def few(name):
        return tuple(tuple(a[:count] for a in part) if isinstance(part, tuple) else part[:count] for part in load(name))

    return few


@pytest.mark.parametrize(
    ("script", "options", "path"),
    [
        (fcnn, ["--map", "aux"], "runs/fcnn-digits-aux.keras"),
        (fcnn, ["--map", "householder"], "runs/fcnn-digits-householder.keras"),
        (rnn, ["--transition", "aux"], "runs/rnn-digits-aux.keras"),
        (rnn, ["--transition", "lstm"], "runs/rnn-digits-lstm.keras"),
    ],
)
def test_classifiers(script, options, path, monkeypatch, capsys):
    load = _few(script.load, 64)
    monkeypatch.setattr(script, "load", load)
    monkeypatch.setattr(rnn, "HIDDEN", 8)
    script.main([*options, "--epochs", "1"])
    printed = capsys.readouterr().out
    assert path in printed
    error = float(re.search(r"Validation error after 1 epochs: ([\d.]+) %", printed)[1])
    x, labels = load("digits")[1]
    found = keras.models.load_model(path).predict(x, verbose=0).argmax(axis=-1)
    assert error == pytest.approx(100 * np.mean(found != labels), abs=0.01)


def test_digits_are_parted_and_scaled():
    (x, labels), (x_val, labels_val) = fcnn.load("digits")
    assert x.shape == (1297, 64)
    assert x_val.shape == (500, 64)
    assert (x.min(), x.max()) == (0, 1)
    assert set(labels) == set(labels_val) == set(range(10))
    np.testing.assert_array_equal(rnn.load("digits")[0][0][..., 0], x)


def test_data_that_keras_downloads(monkeypatch):
    images = np.full((3, 28, 28), 255, "uint8")
    colour = np.full((3, 32, 32, 3), 255, "uint8")
    labels = np.arange(3, dtype="uint8")
    monkeypatch.setattr(keras.datasets.mnist, "load_data", lambda: ((images, labels), (images[:1], labels[:1])))
    monkeypatch.setattr(keras.datasets.cifar10, "load_data", lambda: ((colour, labels), (colour[:1], labels[:1])))
    (x, y), (x_val, _) = fcnn.load("mnist")
    assert (x.shape, x_val.shape, x.max(), list(y)) == ((3, 784), (1, 784), 1, [0, 1, 2])
    assert rnn.load("mnist")[0][0].shape == (3, 784, 1)
    assert [part.shape for part in glow.load("mnist")] == [(3, 28, 28, 1), (1, 28, 28, 1)]
    assert [part.shape for part in glow.load("cifar10")] == [(3, 32, 32, 3), (1, 32, 32, 3)]


def test_patches_of_photographs():
    images, validation = glow.load("patches")
    assert (images.shape, validation.shape) == ((4000, 32, 32, 3), (256, 32, 32, 3))
    assert images.dtype == validation.dtype == np.uint8


def test_flow_and_its_export(monkeypatch, capsys):
    # Patches of 8×8 in the place of 32×32, and the smallest of flows.
    monkeypatch.setattr(glow, "load", lambda name, load=glow.load: tuple(part[:128, :8, :8] for part in load(name)))
    monkeypatch.setattr(glow, "Glow", _SmallGlow)
    glow.main(["--mixing", "aux_factored", "--epochs", "1"])
    printed = capsys.readouterr().out
    assert float(re.search(r"per dimension after 1 epochs: ([\d.]+)", printed)[1]) < 10
    assert float(re.search(r"error of the inverse .+: (\S+)", printed)[1]) < 1e-3
    assert matplotlib.image.imread("runs/glow-patches-aux_factored.png").shape == (4 * 8, 8 * 8, 3)

    export.main(["runs/glow-patches-aux_factored.keras", "served/flow"])
    printed = capsys.readouterr().out
    assert "log_prob(images: (batch, 8, 8, 3) float32) → log_prob: (batch) float32" in printed
    assert sorted(path.name for path in Path("served/flow").iterdir()) == ["1", "samples.png"]


def test_flow_of_a_folder(monkeypatch, capsys):
    Path("pictures", "more").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (16, 40, 20, 3)).astype("uint8")
    for i, picture in enumerate(pixels):
        matplotlib.image.imsave(Path("pictures", "more" if i % 2 else "", f"{i:02d}.png"), picture)
    Path("pictures", "notes.txt").write_text("not a picture")
    images, validation = glow.load_folder(Path("pictures"))
    assert (images.shape, validation.shape, images.dtype) == ((14, 32, 32, 3), (2, 32, 32, 3), np.uint8)
    monkeypatch.setattr(glow, "load_folder", lambda folder, load=glow.load_folder: tuple(a[:, :8, :8] for a in load(folder)))
    monkeypatch.setattr(glow, "Glow", _SmallGlow)
    glow.main(["--folder", "pictures", "--output", "made/here", "--epochs", "1"])
    assert sorted(path.name for path in Path("made/here").iterdir()) == [
        "glow-pictures-aux_factored.keras",
        "glow-pictures-aux_factored.png",
    ]
    Path("pictures", "broken.jpg").write_bytes(b"no")
    with pytest.raises(SystemExit, match=r"Expected pictures alone in pictures. Received: cannot identify image file"):
        glow.load_folder(Path("pictures"))
    with pytest.raises(SystemExit, match=r"at least 8 pictures .+ Received: 0 in made"):
        glow.load_folder(Path("made/nowhere"))


class _SmallGlow:
    optimizer = staticmethod(keras_auxref.flows.Glow.optimizer)

    def __new__(cls, image_shape, levels, steps, hidden, mixing):
        return keras_auxref.flows.Glow(image_shape, levels=1, steps=1, hidden=4, mixing=mixing)


def test_images_side_by_side():
    images = np.arange(6).reshape(6, 1, 1, 1) * np.ones((6, 2, 2, 1))
    picture = glow.side_by_side(images, across=3)
    assert picture.shape == (4, 6, 1)
    np.testing.assert_array_equal(picture[::2, ::2, 0], [[0, 1, 2], [3, 4, 5]])


def test_a_missing_model_is_one_sentence(capsys):
    with pytest.raises(SystemExit):
        export.main(["nothing.keras", "served"])
    assert "expected a .keras file, received nothing.keras" in capsys.readouterr().err


@pytest.mark.parametrize("name", SCRIPTS)
def test_examples_need_no_harness(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert not re.search(r"^\s*(from|import) (experiments|benchmarks)", text, re.M)
    assert len(text.splitlines()) < SHORT.get(name, 200)


def test_as_a_user_runs_it_and_without_a_log_of_tensorflow(example):
    done = example("fcnn.py", "--epochs", "1")
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.rstrip().endswith("runs/fcnn-digits-aux.keras")
