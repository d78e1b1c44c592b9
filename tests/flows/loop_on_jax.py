"""A process on JAX: prints by how much flows run as a loop differ from the same steps written out, as JSON.

Under "convolution" it prints by how much derivatives of `backend.convolve` differ from those of JAX' own convolution.

KERAS_BACKEND=jax JAX_ENABLE_X64=1 python loop_on_jax.py
"""

import json

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_auxref import Flow, Glow
from keras_auxref.ops import backend
from tests.flows.support import disturb

X = np.random.default_rng(0).normal(size=(8, 3))
IMAGES = np.random.default_rng(0).integers(0, 256, (4, 4, 4, 2), dtype="uint8")


def answers(dtype, images, unroll):
    """z, log-determinants and samples; and after a training step all weights."""
    keras.utils.set_random_seed(0)
    settings = {"steps": 3, "hidden": 4, "mixing": "aux_factored", "coupling": "affine", "seed": 1, "dtype": dtype}
    model = Glow((4, 4, 2), levels=1, unroll=unroll, **settings) if images else Flow(3, unroll=unroll, **settings)
    x = IMAGES if images else X.astype(dtype)
    model.initialize(x)
    z, log_det = disturb(model).encode(x)
    found = [z, log_det, model.sample(2, seed=1)]
    model.compile(keras.optimizers.SGD(1e-3))
    model.train_on_batch(x)
    return [np.asarray(value, "float64") for value in (*found, *model.trainable_variables)]


def largest(found, expected):
    """The largest difference, in units of the largest entry."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(np.asarray(a) - b).max() / np.abs(b).max()) for a, b in pairs)


def difference(dtype, images=False):
    # For images the default is a loop.
    return largest(*(answers(dtype, images, unroll) for unroll in (None if images else False, True)))


def convolution(padding, size, kernel):
    """Values, gradients, second derivatives, forward mode and batches of kernels, in a loop."""
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(2, *size, 3)), rng.normal(size=(2, *kernel, 3, 3))
    dx, dw = rng.normal(size=x.shape), rng.normal(size=w.shape)

    def plain(x, w):
        order = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), padding.upper(), dimension_numbers=order)

    def derivatives(convolve):
        def loss(x, w):
            if padding == "same":
                x = jax.lax.scan(lambda x, w: (jnp.tanh(convolve(x, w)), None), x, w)[0]
            return jnp.sum(convolve(x, w[0]) ** 3)

        gradient = jax.grad(loss, (0, 1))
        return jax.jit(
            lambda x, w: (
                jax.vmap(convolve, (None, 0))(x, w),
                gradient(x, w),
                jax.jvp(gradient, (x, w), (dx, dw)),
                jax.grad(lambda x, w: sum(jnp.sum(g**2) for g in gradient(x, w)), (0, 1))(x, w),
            )
        )(x, w)

    return largest(derivatives(lambda x, w: backend.convolve(x, w, padding)), derivatives(plain))


if __name__ == "__main__":
    found = {"float32": difference("float32"), "float64": difference("float64", images=True)}
    sizes = (("same", (4, 5), (3, 2)), ("valid", (4, 5), (3, 2)), ("same", (1, 1), (3, 3)))
    print(json.dumps({**found, "convolution": max(convolution(*case) for case in sizes)}))
