"""`recurrence` on JAX in float64, against loops in plain `jax.numpy` and their automatic derivatives. Prints name → error.

KERAS_BACKEND=jax JAX_ENABLE_X64=1 python recurrence_on_jax.py
"""

import json
import sys

if True:  # before the imports
    sys.modules["tensorflow"] = None  # type: ignore[assignment]

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_auxref import OrthogonalRNN
from keras_auxref.ops.recurrence import recurrence

STEPS, BATCH, N, D = 5, 3, 4, 2
PLAIN = {
    "linear": lambda z: z,
    "relu": lambda z: jnp.maximum(z, 0),
    "sigmoid": lambda z: 1 / (1 + jnp.exp(-z)),
    "tanh": jnp.tanh,
    "modrelu": lambda z, b: jnp.sign(z) * jnp.maximum(jnp.abs(z) + b, 0),
}
rng = np.random.default_rng(0)
found = {}


def stepwise(transition, activation, sequences):
    """The definition, a step at a time."""

    def run(x, h, kernel, v, b, *bias):
        states = []
        for step in x:
            y = h @ kernel.T
            if transition == "aux":
                y = h - 2 * y * jnp.sum(y * h, -1, keepdims=True) / jnp.sum(y * y, -1, keepdims=True)
            h = PLAIN[activation](y + step @ v + b, *bias)
            states.append(h)
        return jnp.stack(states) if sequences else h

    return run


def fused(transition, activation, sequences, **more):
    return lambda *a: recurrence(*a, transition=transition, activation=activation, return_sequences=sequences, **more)


def case(activation, dtype="float64"):
    arrays = [rng.normal(size=shape) for shape in ((STEPS, BATCH, D), (BATCH, N), (N, N), (D, N), (N,))]
    arrays += [0.3 * rng.normal(size=N)] if activation == "modrelu" else []
    return [jnp.asarray(a, dtype) for a in arrays]


def worst(ours, theirs):
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / (1e-30 + jnp.max(jnp.abs(b)))) for a, b in pairs)


def value_and_gradients(function, arguments, cotangent):
    def run(*arguments):
        y, pull = jax.vjp(function, *arguments)
        return y, pull(cotangent)

    return jax.jit(run)(*arguments)


for index, activation in enumerate(PLAIN):
    for transition in ("aux", "linear"):
        sequences = bool(index % 2) == (transition == "aux")
        arguments = case(activation)
        g = rng.normal(size=(STEPS, BATCH, N) if sequences else (BATCH, N))
        kind = (transition, activation, sequences)
        expected = value_and_gradients(stepwise(*kind), arguments, g)
        found[f"{kind}"] = worst(value_and_gradients(fused(*kind), arguments, g), expected)
    found[f"{kind} without closed form"] = worst(value_and_gradients(fused(*kind, closed_form=False), arguments, g), expected)

for transition in ("aux", "linear"):  # second derivatives
    arguments, kind = case("tanh"), (transition, "tanh", True)
    weights = [rng.normal(size=a.shape) for a in arguments]

    def second(run, arguments=arguments, weights=weights):
        def first(*arguments):
            grads = jax.grad(lambda *each: jnp.sum(jnp.cos(run(*each))), tuple(range(5)))(*arguments)
            return sum(jnp.sum(w * g) for w, g in zip(weights, grads, strict=True))

        return jax.jit(jax.grad(first, tuple(range(5))))(*arguments)

    found[f"second derivatives {transition}"] = worst(second(fused(*kind)), second(stepwise(*kind)))

# Where W h = 0: T(h) = h, the identity as gradient for h, zero for W.
x, h, kernel, v, b = case("linear")
y, (_, gh, gk, *_) = value_and_gradients(fused("aux", "linear", False), [0 * x, h, 0 * kernel, v, 0 * b], jnp.ones((BATCH, N)))
found["null kernel"] = float(jnp.max(jnp.abs(y - h)) + jnp.max(jnp.abs(gh - 1)) + jnp.max(jnp.abs(gk)))
y, gradients = value_and_gradients(fused("aux", "linear", False), [0 * x, h.at[1].set(0), kernel, v, 0 * b], jnp.ones((BATCH, N)))
found["null row"] = float(jnp.max(jnp.abs(y[1])) + jnp.max(jnp.abs(gradients[1][1] - 1)))
found["null row is finite"] = 1.0 - float(all(bool(jnp.isfinite(g).all()) for g in gradients))
# f(αh) = α f(h), in float32 far beyond where ‖h‖² overflows.
x, h, kernel, v, b = case("linear", "float32")
big = fused("aux", "linear", False)(0 * x, 1e30 * h, kernel, v, 0 * b)
found["no overflow"] = worst(1e-30 * big, fused("aux", "linear", False)(0 * x, h, kernel, v, 0 * b)) * 1e-5

# The layer: a mask of ones sends it through the loop of Keras.
inputs = rng.normal(size=(BATCH, STEPS, D))
for transition in ("aux", "cayley"):
    for options in ({}, {"return_sequences": True, "go_backwards": True, "return_state": True}):
        layer = OrthogonalRNN(N, transition, dtype="float64", **options)
        layer.build(inputs.shape)
        values, rest = ([v.value for v in vs] for vs in (layer.trainable_variables, layer.non_trainable_variables))

        def loss(values, mask, layer=layer, rest=rest):
            outputs, _ = layer.stateless_call(values, rest, inputs, mask=mask, training=True)
            return sum(jnp.sum(jnp.sin(out)) for out in jax.tree.leaves(outputs)), outputs

        masks = (None, np.ones((BATCH, STEPS), bool))
        ours, theirs = (jax.jit(jax.value_and_grad(lambda v, m=m: loss(v, m), has_aux=True))(values) for m in masks)
        found[f"layer {transition} {sorted(options)}"] = worst(ours, theirs)
print(json.dumps({"backend": keras.backend.backend(), "errors": found}))
