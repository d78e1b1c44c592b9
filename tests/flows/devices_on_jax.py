"""A process on JAX with two devices: prints by how much training on both differs from training on one, as JSON.

Also prints how many sums over devices are inside the loops of the compiled gradient, with and without `on_each_device`.

KERAS_BACKEND=jax JAX_ENABLE_X64=1 JAX_NUM_CPU_DEVICES=2 python devices_on_jax.py
"""

import json
import re

import jax
import keras
import numpy as np

from keras_auxref import AuxReflection, Glow
from keras_auxref.flows import repeat
from tests.flows.support import disturb

IMAGES = np.random.default_rng(0).integers(0, 256, (8, 4, 4, 3), dtype="uint8")
LABELS = np.arange(8) % 3
DISTRIBUTIONS = {"one": None, "two": keras.distribution.DataParallel(auto_shard_dataset=False)}
SETTINGS = {
    "written out": {"mixing": "conv", "unroll": True, "classes": 3},
    "inverse": {"mixing": "aux_factored", "remat": "inverse", "classes": 3},
    "branch": {
        "mixing": AuxReflection(track_branch=True, strict=False, kernel_initializer="identity", dtype="float64"),
        "remat": True,
    },
}


def model_of(settings):
    keras.utils.set_random_seed(0)
    model = Glow((4, 4, 3), levels=1, steps=3, hidden=4, seed=1, dtype="float64", **settings)
    context = [LABELS] if "classes" in settings else []
    model.initialize(IMAGES, *context)
    model.compile(keras.optimizers.SGD(1e-2))
    return disturb(model), context


def trained(settings):
    """After two training steps: the trained weights, and what has float32, the losses and the branch."""
    model, context = model_of(settings)
    losses = [model.train_on_batch(IMAGES, *context, return_dict=True)["bits_per_dim"] for _ in range(2)]
    weights, rest = ([np.asarray(w, "float64") for w in kind] for kind in (model.trainable_weights, model.non_trainable_weights))
    return weights, [np.asarray(losses), *rest]


def largest(found, expected):
    return max(float(np.abs(a - b).max() / (1e-3 + np.abs(b).max())) for a, b in zip(found, expected, strict=True))


def sums_in_loops():
    """The number of sums over devices in computations that are bodies of loops, of the gradient of all weights."""
    model, _ = model_of({"mixing": "aux_factored"})
    variables = model.trainable_variables

    def loss(values, images):
        with keras.StatelessScope(list(zip(variables, values, strict=True))):
            return model.bits_per_dim(images).mean()

    rows = jax.sharding.NamedSharding(
        keras.distribution.distribution().device_mesh.backend_mesh, jax.sharding.PartitionSpec("batch")
    )
    images = jax.device_put(IMAGES, rows)
    text = jax.jit(jax.grad(loss)).lower([variable.value for variable in variables], images).compile().as_text()
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    blocks = re.findall(r"^%?([\w.\-]+) \(.*?\{\n(.*?)^\}", text, re.M | re.S)
    assert bodies <= {name for name, _ in blocks}
    return sum(len(re.findall(r" all-reduce(?:-start)?\(", block)) for name, block in blocks if name in bodies)


if __name__ == "__main__":
    found = {}
    for name, settings in SETTINGS.items():
        results = []
        for distribution in DISTRIBUTIONS.values():
            keras.distribution.set_distribution(distribution)
            results.append(trained(settings))
        found[name] = [largest(*pair) for pair in zip(*results, strict=True)]
    sums = [sums_in_loops()]
    repeat._keeps_rows_apart = lambda layer: False
    sums.append(sums_in_loops())
    print(json.dumps({**found, "sums": sums}))
