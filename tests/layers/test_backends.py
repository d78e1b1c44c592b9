"""The layers where Keras runs on JAX or torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CODE = r"""
import json, os, sys

os.environ["KERAS_BACKEND"] = sys.argv[1]
sys.modules["tensorflow"] = None  # not there
import keras
import numpy as np
import keras_auxref
from keras_auxref import flows, layers

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
    "act_norm": flows.ActNorm(),
    "coupling": flows.AffineCoupling(hidden=4),
    "additive": flows.AdditiveCoupling(hidden=4),
    "mixture": flows.LogisticMixtureCoupling(hidden=4),
    "spline": flows.SplineCoupling(hidden=4),
    "permutation": flows.Permutation(),
    "dense": flows.InvertibleDense(),
    "qr": flows.QRDense(),
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
found["information about arrays"] = bool(keras_auxref.ops.inverse_with_info(np.ones((2, 2)), np.diag([1.0, 1.5])).certified)
from pathlib import Path
import re
masked = layers.OrthogonalRNN(3)
last = array(masked(np.ones((1, 2, 4), "float32"), mask=np.zeros((1, 2), bool)))
found["a masked sequence keeps the first state"] = bool(np.allclose(last[0], array(masked.cell.initial_state)))
inputs = keras.Input((4,))
tied = layers.FactoredReflection()
autoencoder = keras.Model(inputs, tied.inverse(tied(inputs)))
tied.exponents.assign([0.1, -0.2, 0.3, 0.4])
found["a tied inverse follows its weights"] = bool(np.abs(array(autoencoder(x)) - x).max() < 1e-4)
for block in re.findall(r"```python\n(.+?)```", Path("docs/getting-started.md").read_text(), re.S):
    exec(block, {})
network = keras.Sequential([keras.Input((3, 4)), layers.OrthogonalRNN(5), layers.SVDDense(2, map="cayley")])
network.compile("sgd", "mse")
found["networks train"] = bool(np.isfinite(network.fit(np.ones((8, 3, 4)), np.ones((8, 2)), verbose=0).history["loss"][0]))

for units, name in ((3, "wide"), (7, "tall")):
    for map in ("householder", "cayley"):
        layer = layers.OrthogonalDense(map, units=units, kernel_initializer="orthogonal", activation="tanh", use_bias=True)
        y, u = array(layer(x)), array(layer.matrix)
        gram = u @ u.T if units < 4 else u.T @ u
        found[f"{name} {map} is orthonormal"] = bool(np.abs(gram - np.eye(len(gram))).max() < 1e-5)
        found[f"{name} {map} computes"] = bool(np.abs(y - np.tanh(x @ u.T)).max() < 1e-5)
        found[f"{name} {map} applies to few"] = bool(np.abs(array(layer(x[:1])) - y[:1]).max() < 1e-5)
model = keras.Sequential([keras.Input((4,)), layers.OrthogonalDense(units=7), layers.SVDDense(2, map="householder", rank=2)])
model.compile("sgd", "mse")
before = [array(w) for w in model.weights]
model.fit(x, x[:, :2], verbose=0)
found["thin maps train"] = all(np.abs(array(w) - b).max() > 0 for w, b in zip(model.weights, before))

stream, plain = (layers.OrthogonalRNN(5, stateful=stateful) for stateful in (True, False))
sequences = np.random.default_rng(1).normal(size=(2, 6, 4)).astype("float32")
stream.build(sequences.shape)
plain.build(sequences.shape)
stream.set_weights(plain.get_weights())
stream(sequences[:, :3])
found["streams"] = bool(np.abs(array(stream(sequences[:, 3:])) - array(plain(sequences))).max() < 1e-5)

adam = keras.optimizers.Adam
network = keras.Sequential([keras.Input((6, 4)), layers.OrthogonalRNN(5)])
rates = keras.optimizers.OptimizerMap(adam(1e-2), {".*/transition/.*": adam(1e-3)})
network.compile(keras.optimizers.MultiOptimizer(rates), "mse")
before = [array(w) for w in network.trainable_weights]
network.fit(sequences, np.ones((2, 5)), verbose=0)
# The first step of Adam is as long as its rate, whatever the gradient.
for w, b in zip(network.trainable_weights, before):
    rate = 1e-3 if "transition" in w.path else 1e-2
    found[f"{w.path} has its rate"] = bool(np.isclose(np.abs(array(w) - b).max(), rate, rtol=0.02))
print("\n" + json.dumps(found))
"""


@pytest.mark.slow
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
