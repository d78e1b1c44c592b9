"""The experiment as a user runs it: in a process of its own, in an empty folder."""

import json

import keras
import matplotlib.image
import numpy as np
import pytest

from experiments.harness import cli, data
from keras_auxref import SVDDense  # noqa: F401 (Keras then knows the classes of a file)

TINY = ("--map", "aux", "--map", "householder", "--epochs", "1", "--runs", "1", "--train-size", "64", "--verbose", "2")


@pytest.mark.slow
def test_trains_draws_and_resumes(experiment, experiment_here, tmp_path):
    done = experiment("fcnn", *TINY)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "fcnn-digits"
    models = ["fcnn-digits-aux-0.keras", "fcnn-digits-householder-0.keras"]
    assert sorted(path.name for path in folder.iterdir()) == [*models, "fcnn-digits.json", "fcnn-digits.png"]

    text = (folder / "fcnn-digits.json").read_text()
    assert str(tmp_path) not in text
    content = json.loads(text)
    assert content["commands"] == ["python -m experiments.fcnn " + " ".join(TINY)]
    assert content["dataset"] == {"name": "digits", "train": 64, "validation": 500, "image_shape": [8, 8, 1], "classes": 10}
    assert content["settings"]["epochs"] == 1
    assert [(run["map"], run["run"], run["seed"]) for run in content["runs"]] == [("aux", 0, 0), ("householder", 0, 0)]
    for run in content["runs"]:
        assert run["finished"]
        assert 0 <= run["curves"]["validation_error"][0] <= 1
        assert run["curves"]["seconds"][0] == pytest.approx(run["seconds_per_epoch"], rel=1e-4)

    picture = matplotlib.image.imread(folder / "fcnn-digits.png")
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 100

    table = done.stdout[done.stdout.index("| map") :]
    assert "ratio to aux" in table
    assert "| aux         |    1 |" in table

    again = experiment_here("fcnn", *TINY, "--resume")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("finished before") == 2
    assert "Epoch 1/1" not in again.stdout
    assert json.loads((folder / "fcnn-digits.json").read_text()) == content

    export = ("export", f"runs/fcnn-digits/{models[1]}", "served/digits")
    for version, options in ((1, ()), (2, ()), (2, ("--overwrite",))):
        exported = experiment_here(*export, *options)
        assert exported.returncode == 0, exported.stderr
        assert f"served/digits/{version}\n" in exported.stdout
    card = (tmp_path / "served" / "digits" / "README.md").read_text()
    error = content["runs"][1]["curves"]["validation_error"][0]
    for part in (
        content["commands"][0],
        "python -m experiments.export runs/fcnn-digits/fcnn-digits-householder-0.keras served/digits --overwrite",
        f"Error on 500 validation images: **{100 * error:.2f} %**",
        "| `serving_default` | `inputs: (batch, 64) float32` | `class: (batch) int64`<br>`probabilities: (batch, 10) float32` |",
        "digits, 64 training examples, 8×8×1",
    ):
        assert part in card
    assert sorted(path.name for path in (tmp_path / "served" / "digits").iterdir()) == ["1", "2", "README.md"]


def test_a_missing_model_is_one_sentence(experiment):
    done = experiment("export", "nothing.keras", "served")
    assert done.returncode == 2
    assert "expected a .keras file, received nothing.keras" in done.stderr


def test_missing_mnist_is_one_sentence(experiment, tmp_path):
    done = experiment("fcnn", "--dataset", "mnist", "--no-download", TFDS_DATA_DIR=str(tmp_path / "empty"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "--dataset digits" in done.stderr
    assert done.stdout == ""


def test_tensorflow_datasets_not_installed(experiment, tmp_path):
    package = tmp_path / "blocked" / "tensorflow_datasets"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ModuleNotFoundError('No module named tensorflow_datasets')")
    done = experiment("fcnn", "--dataset", "mnist", PYTHONPATH=str(package.parent))
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "pip install tensorflow-datasets" in done.stderr


def test_resume_with_other_settings_is_one_sentence(experiment, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    stored = {"experiment": "fcnn", "dataset": {"name": "digits"}, "settings": {"epochs": 7}, "runs": []}
    (folder / "fcnn-digits.json").write_text(json.dumps(stored))
    done = experiment("fcnn", "--resume", "--epochs", "2", "--output", str(folder))
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "epochs=7" in done.stderr
    assert json.loads((folder / "fcnn-digits.json").read_text()) == stored


@pytest.mark.parametrize(("argument", "value"), [("--epochs", "0"), ("--runs", "x"), ("--seed", "-1"), ("--map", "qr")])
def test_wrong_arguments_are_refused_at_once(experiment, argument, value):
    done = experiment("fcnn", argument, value)
    assert done.returncode == 2
    assert argument in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["fcnn", "rnn", "glow"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--distribute",), "--distribute: expected --backend jax, received tensorflow"),
        (("--backend", "torch", "--distribute"), "--distribute: expected --backend jax, received torch"),
        (("--backend", "jax", "--strategy", "mirrored"), "--strategy: expected none with --backend jax, received mirrored"),
        (("--backend", "numpy"), "--backend: invalid choice: 'numpy'"),
    ],
)
def test_backends_that_do_not_fit_are_refused(experiment_here, monkeypatch, name, arguments, message):
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    done = experiment_here(name, *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_results_from_before_backends_still_resume(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    parser = cli.parser("", ("digits",), {"digits": {}})
    cli.add_backend(parser)
    args = cli.parse(parser, [])
    assert cli.settings(args, ("seed", "strategy")) == {"seed": 0, "strategy": "none"}
    args.backend, args.distribute = "jax", True
    assert cli.settings(args, ("seed",)) == {"seed": 0, "backend": "jax", "distribute": True}


@pytest.mark.slow
def test_distributes_over_devices(experiment, tmp_path):
    pytest.importorskip("jax")
    options = ("--map", "cayley", "--epochs", "1", "--train-size", "72", "--verbose", "2", "--backend", "jax", "--distribute")
    variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    done = experiment("fcnn", *options, **variables)
    assert done.returncode == 0, done.stderr
    assert "\n2/2 - " in done.stdout  # the last eight images make no full batch
    file = tmp_path / "runs" / "fcnn-digits" / "fcnn-digits.json"
    content = json.loads(file.read_text())
    assert (content["settings"]["backend"], content["settings"]["distribute"]) == ("jax", True)
    (run,) = content["runs"]
    assert run["finished"]
    assert run["measurements"]["orthogonality_defect"] < 1e-4
    assert "jax" in run["environment"]["versions"]
    # The file has all of what was trained, for any backend.
    model = keras.models.load_model(file.with_name("fcnn-digits-cayley-0.keras"))
    x, y = data.load("digits").vectors()[1]
    error = np.mean(np.argmax(model.predict(x, verbose=0), axis=-1) != y)
    assert error == pytest.approx(run["curves"]["validation_error"][0], abs=0.005)

    uneven = experiment("fcnn", *options, "--batch-size", "33", "--output", "uneven", **variables)
    assert uneven.returncode == 1
    assert "Expected a batch size divisible by 2. Received: 33" in uneven.stderr
    assert "Traceback" not in uneven.stderr


@pytest.mark.slow
def test_every_map_and_mirrored_strategy(experiment_here, tmp_path):
    options = ("--epochs", "1", "--train-size", "64", "--strategy", "mirrored", "--verbose", "2", "--output", "here")
    done = experiment_here("fcnn", *options, "--runs", "1")
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "here" / "fcnn-digits.json").read_text())["runs"]
    assert [(run["map"], run["run"]) for run in runs] == [(name, 0) for name in ("aux", "householder", "cayley", "exp")]

    # Only the runs that the file does not have are trained.
    again = experiment_here("fcnn", *options, "--runs", "2", "--map", "aux", "--map", "dense", "--resume")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("finished before") == 1
    assert " ± " in again.stdout
    after = json.loads((tmp_path / "here" / "fcnn-digits.json").read_text())["runs"]
    assert [run for run in after if run in runs] == runs
    names = [("aux", 0), ("aux", 1), ("householder", 0), ("cayley", 0), ("exp", 0), ("dense", 0), ("dense", 1)]
    assert [(run["map"], run["run"]) for run in after] == names


@pytest.mark.parametrize("map", ["aux", "householder"])
@pytest.mark.parametrize("start", ["uniform", "rotation"])
@pytest.mark.parametrize("rate", [1e-3, 3e-4, 1e-4])
def test_the_name_of_a_run_has_its_settings(map, start, rate):
    from experiments import fcnn

    name = fcnn.run_name(map, start, rate)
    assert fcnn.parts_of(name) == (map, start, rate)
    assert (name == map) == (start == "uniform" and rate == 1e-3)


@pytest.mark.parametrize("map", ["aux", "householder", "cayley", "exp"])
def test_every_map_starts_as_a_rotation(map, rng):
    from experiments import fcnn

    layer = fcnn.build_model(map, 6, 3, start="rotation").layers[0]
    x = rng.normal(size=(6, 6)).astype("float32")
    for part in (layer.u, layer.v):
        matrix = np.linalg.solve(x, part(x).numpy())  # of the linear map that it is at the start
        assert np.abs(matrix.T @ matrix - np.eye(6)).max() < 1e-4
        assert np.linalg.det(matrix) > 0
