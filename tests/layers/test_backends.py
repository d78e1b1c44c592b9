"""The layers where Keras runs on JAX or torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import json, os, sys

os.environ["KERAS_BACKEND"] = sys.argv[1]
sys.modules["tensorflow"] = None  # not there
import keras
import numpy as np
import keras_auxref
from keras_auxref import layers

keras.utils.set_random_seed(0)
x, found = np.random.default_rng(0).normal(size=(32, 4)).astype("float32"), {}
array = keras.ops.convert_to_numpy

tracking = layers.AuxReflection(track_branch=True)
model = keras.Sequential([keras.Input((4,)), tracking])
model.compile("sgd", "mse")
start = float(array(tracking.branch))
model.fit(x, x, verbose=0)
found["the branch moves"] = float(array(tracking.branch)) != start

try:
    tracking.bijector()
except NotImplementedError as error:
    found["bijectors are refused"] = f"Received: KERAS_BACKEND={sys.argv[1]!r}" in str(error)

for name, layer in {
    "act_norm": layers.ActNorm(),
    "coupling": layers.AffineCoupling(hidden=4),
    "additive": layers.AdditiveCoupling(hidden=4),
    "mixture": layers.LogisticMixtureCoupling(hidden=4),
    "permutation": layers.Permutation(),
    "dense": layers.InvertibleDense(),
    "householder": layers.OrthogonalDense(),
    "cayley": layers.OrthogonalDense("cayley"),
}.items():
    y = layer(x)
    found[f"{name} inverts"] = bool(np.abs(array(layer.inverse(y)) - x).max() < 1e-4)
    found[f"{name} is certified"] = layer.certificate().invertible
for kernel in ("free", "spectral", "relaxed_cayley"):
    for dtype in ("float32", "mixed_bfloat16"):
        layer = layers.AuxReflection(kernel, dtype=dtype)
        y = array(keras.ops.cast(layer(x), "float32"))
        found[f"{kernel} keeps norms in {dtype}"] = bool(
            np.abs(np.linalg.norm(y, axis=-1) / np.linalg.norm(x, axis=-1) - 1).max() < (1e-4 if dtype == "float32" else 0.05)
        )
        if kernel != "free":
            found[f"{kernel} is certified in {dtype}"] = layer.certificate().invertible
network = keras.Sequential([keras.Input((3, 4)), layers.OrthogonalRNN(5), layers.SVDDense(2, map="cayley")])
network.compile("sgd", "mse")
found["networks train"] = bool(np.isfinite(network.fit(np.ones((8, 3, 4)), np.ones((8, 2)), verbose=0).history["loss"][0]))
print(json.dumps(found))
"""


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_layers_work_on_other_backends(backend):
    pytest.importorskip(backend)
    run = subprocess.run(
        [sys.executable, "-c", CODE, backend], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert len(found) > 15
    assert all(found.values()), found
