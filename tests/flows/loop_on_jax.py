"""A process on JAX: prints by how much a flow run as a loop differs from the same steps written out, as JSON.

KERAS_BACKEND=jax JAX_ENABLE_X64=1 python loop_on_jax.py
"""

import json

import keras
import numpy as np

from keras_auxref import Flow
from tests.flows.support import disturb

X = np.random.default_rng(0).normal(size=(8, 3))


def answers(dtype, unroll):
    """z, log-determinants and samples; and after a training step all weights."""
    keras.utils.set_random_seed(0)
    model = Flow(3, steps=3, hidden=4, mixing="aux_factored", coupling="affine", seed=1, dtype=dtype, unroll=unroll)
    x = X.astype(dtype)
    model.initialize(x)
    z, log_det = disturb(model).encode(x)
    found = [z, log_det, model.sample(2, seed=1)]
    model.compile(keras.optimizers.SGD(1e-3))
    model.train_on_batch(x)
    return [np.asarray(value) for value in (*found, *model.trainable_variables)]


def difference(dtype):
    """The largest one, in units of the largest entry."""
    found, expected = (answers(dtype, unroll) for unroll in (False, True))
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, expected, strict=True))


if __name__ == "__main__":
    print(json.dumps({dtype: difference(dtype) for dtype in ("float32", "float64")}))
