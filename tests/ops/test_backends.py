"""The mathematics where Keras runs on JAX (compiled) or torch, in a process that cannot import TensorFlow."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_every_function_on_every_backend(backend):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    script = Path(__file__).with_name("on_a_backend.py")
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": str(script.parents[2])}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) >= 16
    assert {name: error for name, error in found.items() if not error < 2e-4} == {}
