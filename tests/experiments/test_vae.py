"""Posteriors of variational autoencoders, and the maps of the fully connected network that are orthogonal by a penalty."""

import json

import pytest

from experiments import fcnn, vae


def test_trains_draws_and_tells(experiment_here, tmp_path, monkeypatch):
    options = (
        "--posterior",
        "none",
        "--posterior",
        "aux-1",
        "--epochs",
        "1",
        "--runs",
        "1",
        "--train-size",
        "64",
        "--verbose",
        "0",
    )
    done = experiment_here("vae", *options)
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "runs/vae-digits/vae-digits.json").read_text())["runs"]
    assert [run["map"] for run in runs] == ["none", "aux-1"]
    for run in runs:
        measured = run["measurements"]
        assert 20 < measured["importance_weighted"] < measured["negative_elbo"] < 45
    assert runs[0]["measurements"]["flow_weights"] == 0
    assert runs[1]["measurements"]["flow_weights"] == 2 * 129 * 8  # the direction and the eigenvalues
    assert "| aux-1     |    1 |" in done.stdout
    assert (tmp_path / "runs/vae-digits/vae-digits.png").exists()


@pytest.mark.parametrize("name", vae.POSTERIORS)
def test_every_posterior_has_its_flow(name):
    model = vae.build_model(name, 6, 3, 4)
    kind, _, setting = name.partition("-")
    steps = {"none": 0, "sylvester": vae.SYLVESTER_STEPS}.get(kind)
    assert model.flow.steps == (int(setting) if steps is None else steps)
    assert getattr(model.flow, "form", setting) == setting


@pytest.mark.parametrize("name", ["aux", "cayley", "soft-so", "soft-mc", "dense"])
def test_orthogonality_of_the_maps(name):
    model = fcnn.build_model(name, 8, 3)
    found = fcnn.orthogonality(model)
    if name == "aux":
        assert found == {}
    else:
        assert (found["orthogonality_defect"] < 1e-4) == (name == "cayley")
    assert len(model.losses) == (6 if name.startswith("soft") else 0)
