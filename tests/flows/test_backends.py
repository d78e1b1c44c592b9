"""A flow on JAX and torch: it answers and trains there, and files go from backend to backend."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import Glow, export_saved_model
from tests.flows.on_a_backend import answers, answers_of_the_trained, flow_answers, small_flow
from tests.flows.support import disturb, images

SCRIPT, ROOT = Path(__file__).parent / "on_a_backend.py", Path(__file__).parents[2]
SHAPE = (4, 4, 3)
# Tests of the layers have every mixing and coupling on every backend. A free W compiles for minutes.
MIXINGS = [
    ("jax", "aux_factored affine variational"),
    pytest.param("jax", "aux logistic_mixture variational", marks=pytest.mark.exhaustive),
    ("torch", "aux_factored"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "parts"), MIXINGS)
def test_a_flow_answers_and_trains_on_another_backend_and_comes_back(backend, parts, tmp_path):
    """The parts are a mixing and, where they are not Glow's, coupling and dequantisation."""
    names = dict(zip(("mixing", "coupling", "dequantisation"), parts.split(), strict=False))
    model = Glow(SHAPE, levels=1, steps=1, hidden=4, seed=1, **names)
    x, z = images(8, SHAPE), np.random.default_rng(0).normal(size=(2, 48)).astype("float32")
    model.initialize(x)
    disturb(model).save(tmp_path / "flow.keras")
    np.savez(tmp_path / "inputs.npz", images=x, z=z)
    _run(backend, tmp_path, *parts.split())
    _same(answers(model, x, z), np.load(tmp_path / "answers.npz"))
    trained = keras.models.load_model(tmp_path / "trained.keras")
    assert trained.initialized
    assert int(trained.optimizer.iterations) == 4
    _same(answers_of_the_trained(trained, x, z), np.load(tmp_path / "trained.npz"))
    if (backend, parts) == MIXINGS[0]:  # trained on JAX, served by TensorFlow
        export_saved_model(trained, tmp_path / "served")
        served = tf.saved_model.load(str(tmp_path / "served" / "1")).signatures
        found = {"log_prob": served["log_prob"](images=tf.constant(x / 255, tf.float32))["log_prob"]}
        found["decoded"] = served["decode"](z=tf.constant(z))["images"]
        theirs = np.load(tmp_path / "trained.npz")
        _same({key: value.numpy() for key, value in found.items()}, {key: theirs[key] for key in found})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "mixing", "coupling"),
    [
        ("jax", "aux_factored", "spline"),
        pytest.param("jax", "conv", "affine", marks=pytest.mark.exhaustive),
        ("torch", "aux_factored", "spline"),
    ],
)
def test_a_flow_of_vectors_does_so_too(backend, mixing, coupling, tmp_path):
    x, labels = np.random.default_rng(0).normal(size=(8, 3)).astype("float32"), np.arange(8) % 2
    model = small_flow(mixing, coupling)
    model.initialize(x, labels)
    disturb(model).save(tmp_path / "flow.keras")
    np.savez(tmp_path / "inputs.npz", x=x, labels=labels)
    _run(backend, tmp_path, "vectors", mixing, coupling)
    _same(flow_answers(model, x, labels), np.load(tmp_path / "answers.npz"))
    trained = keras.models.load_model(tmp_path / "trained.keras")
    assert trained.initialized
    assert int(trained.optimizer.iterations) == 4
    _same({"log_prob": np.asarray(trained.log_prob(x, labels))}, np.load(tmp_path / "trained.npz"))


@pytest.mark.slow
def test_on_jax_a_loop_is_its_steps_written_out():
    found = json.loads(_output("jax", SCRIPT.with_name("loop_on_jax.py"), JAX_ENABLE_X64="1"))
    assert found["float32"] < 1e-6
    assert found["float64"] < 1e-12
    assert found["convolution"] < 1e-12


@pytest.mark.slow
def test_two_devices_train_as_one_and_sum_gradients_after_the_loop():
    settings = {"JAX_ENABLE_X64": "1", "JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    found = json.loads(_output("jax", SCRIPT.with_name("devices_on_jax.py"), **settings))
    inside, left_to_xla = found.pop("sums")
    assert (inside, left_to_xla > 0) == (0, True)
    for weights, rest in found.values():
        assert weights < 1e-12
        assert rest < 1e-6


def _run(backend, folder, *parts):
    assert _output(backend, SCRIPT, folder, *parts).split()[:2] == ["keras_auxref", backend]


def _output(backend, *command, **environment):
    """What a script prints on a backend; no test where that is not installed."""
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    environment = {**os.environ, "KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _same(ours, theirs):
    assert set(ours) == set(theirs)
    for key, value in ours.items():
        # Log-densities are sums over 48 entries.
        np.testing.assert_allclose(theirs[key], value, rtol=1e-5, atol=5e-4 if "log" in key else 1e-5, err_msg=key)
