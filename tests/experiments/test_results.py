import json

import pytest

from experiments.harness import results
from experiments.harness.results import Results, ResultsMismatchError, Run

DATASET = {"name": "digits", "train": 1297}
SETTINGS = {"epochs": 2, "seed": 0}


def open_results(folder, resume=False, **changes):
    return Results(folder / "r.json", "fcnn", DATASET, {**SETTINGS, **changes}, resume=resume)


def finished(name, run, error=0.1, seconds=(1.0, 3.0)):
    curves = {"seconds": list(seconds), "validation_error": [0.5, error]}
    return Run(name, run, seed=run, finished=True, curves=curves)


def test_runs_are_merged_per_map_and_run(tmp_path):
    store = open_results(tmp_path)
    for run in (finished("aux", 0), finished("exp", 0), finished("aux", 1), finished("aux", 0, error=0.2)):
        store.save(run)
    assert [(r.map, r.run) for r in store.runs()] == [("aux", 0), ("aux", 1), ("exp", 0)]
    assert store.find("aux", 0).curves["validation_error"] == [0.5, 0.2]
    assert store.find("aux", 2) is None
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_file_says_what_was_run(tmp_path):
    store = open_results(tmp_path)
    run = finished("aux", 0)
    run.environment = results.environment()
    store.save(run)
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["experiment"] == "fcnn"
    assert content["dataset"] == DATASET
    assert content["settings"] == SETTINGS
    assert content["commands"]
    (entry,) = content["runs"]
    assert entry["seconds_per_epoch"] == 1.5
    assert entry["date"].startswith("20")
    assert entry["environment"]["cpu_cores"] >= 1
    assert {"python", "keras", "tensorflow"} <= set(entry["environment"]["versions"])


def test_unfinished_runs_are_kept_but_not_counted(tmp_path):
    store = open_results(tmp_path)
    store.save(Run("aux", 0, seed=0, curves={"seconds": [1.0]}))
    assert store.runs() == []
    assert open_results(tmp_path, resume=True).find("aux", 0).curves == {"seconds": [1.0]}


def test_resume_refuses_other_settings(tmp_path):
    open_results(tmp_path).save(finished("aux", 0))
    with pytest.raises(ResultsMismatchError, match=r"r.json holds runs with other settings \(epochs=2\)"):
        open_results(tmp_path, resume=True, epochs=9)


def test_other_settings_without_resume_set_the_old_file_aside(tmp_path):
    open_results(tmp_path).save(finished("aux", 0))
    store = open_results(tmp_path, epochs=9)
    assert store.runs() == []
    assert json.loads((tmp_path / "r.previous.json").read_text())["settings"] == SETTINGS


def test_same_settings_without_resume_keep_the_other_maps(tmp_path):
    open_results(tmp_path).save(finished("aux", 0))
    store = open_results(tmp_path)
    store.save(finished("exp", 0))
    assert [r.map for r in store.runs()] == ["aux", "exp"]


def test_diverged_values_survive_json(tmp_path):
    store = open_results(tmp_path)
    store.save(finished("aux", 0, error=float("nan")))
    assert "NaN" not in (tmp_path / "r.json").read_text()
    error = store.runs()[0].curves["validation_error"][1]
    assert error != error


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "r.json"
    results.write_json(path, {"a": [1.5, 2]})
    with pytest.raises(TypeError):
        results.write_json(path, {"a": object()})
    assert path.read_text() == '{\n  "a": [1.5, 2]\n}\n'


def test_command_names_no_folder_of_this_machine():
    arguments = ["--map", "aux", "--output", "/elsewhere/x", "--epochs", "3"]
    expected = "python -m experiments.fcnn --map aux --epochs 3"
    assert results.command(arguments, "/somewhere/experiments/fcnn.py") == expected
    assert results.command(["--output=/x", "--map", "aux"], "/y/experiments/fcnn.py") == "python -m experiments.fcnn --map aux"
    assert results.command(["/elsewhere/digits", "runs/x"], "/y/benchmarks/b.py") == "python -m benchmarks.b digits runs/x"


def test_mean_and_deviation():
    assert results.mean_and_deviation([1.0, 3.0]) == (2.0, pytest.approx(2**0.5))
    assert results.mean_and_deviation([1.0]) == (1.0, None)
