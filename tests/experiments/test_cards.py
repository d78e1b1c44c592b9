"""What a model card says of a run, a flow and a model of unknown origin."""

import json

import keras
import numpy as np

from experiments.harness import cards
from experiments.harness.results import Results, Run
from keras_auxref import AuxReflection, Glow
from keras_auxref.serving.show import SignatureTable

TABLES = [SignatureTable("sample", ["n: number, int32"], ["images: (batch, 4, 4, 1) float32"])]


def _flow():
    model = Glow((4, 4, 1), levels=1, steps=2, hidden=2, mixing="aux_relaxed_cayley", seed=0)
    model.initialize(np.random.default_rng(0).integers(0, 256, (8, 4, 4, 1), dtype="uint8"))
    return model


def test_a_flow(tmp_path):
    data = {"name": "patches", "train": 10, "validation": 4, "image_shape": [4, 4, 1]}
    results = Results(tmp_path / "glow-patches.json", "glow", data, {"train_steps": 50, "batch_size": 8})
    measured = {"bits_per_dim": 3.25, "reconstruction": {"max_error": 2e-6}}
    run = Run("aux_relaxed_cayley", 1, seed=4, finished=True, curves={"seconds": [1.0]}, measurements=measured)
    results.save(run)
    training = cards.find_training(tmp_path / "glow-patches-aux_relaxed_cayley-1.keras")
    assert training.run.seed == 4
    text = cards.card("tiny", _flow(), training, "python -m experiments.export a b", TABLES, 1_500_000)
    for part in (
        "# tiny",
        'L = 1, K = 2, C = 2, `mixing="aux_relaxed_cayley"`',
        "Bits per dimension on 4 validation images: **3.250**",
        "**2.0e-06**",
        "Seed 4; train steps 50, batch size 8.",
        "| `sample` | `n: number, int32` | `images: (batch, 4, 4, 1) float32` |",
        "Size: 1.50 MB. Certificate: 2 of 2 mixings are proven to be invertible",
        "python -m experiments.export a b",
    ):
        assert part in text, text


def test_only_the_run_of_that_file(tmp_path):
    (tmp_path / "other.json").write_text(json.dumps([1, 2]))
    Results(tmp_path / "a.json", "a", {}, {}).save(Run("aux", 0, seed=0, finished=False))
    assert cards.find_training(tmp_path / "a-aux-0.keras") is None  # it has not finished
    assert cards.find_training(tmp_path / "a-aux-1.keras") is None


def test_a_model_of_unknown_origin():
    model = keras.Sequential([keras.Input((4,)), AuxReflection(), keras.layers.Dense(3)])
    text = cards.card("mine", model, None, "", TABLES, 1000)
    assert '`AuxReflection()` → `Dense(units=3, activation="linear")`; 31 trained weights' in text
    assert "Made by" not in text
