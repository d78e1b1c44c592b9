"""Every function of `ops` on the backend named by KERAS_BACKEND, without TensorFlow, against NumPy. Prints name → error."""

import functools
import json
import os
import sys

if os.environ["KERAS_BACKEND"] != "tensorflow":
    sys.modules["tensorflow"] = None  # type: ignore[assignment]

import keras
import numpy as np

from keras_auxref import kernels, ops

BACKEND = keras.backend.backend()
rng = np.random.default_rng(0)
D = 5


def compiled(function):
    if BACKEND != "jax":
        return function
    import jax

    return jax.jit(function)


def total(function):
    return lambda *arguments: keras.ops.sum(keras.ops.cos(function(*arguments)))


@functools.cache  # one compilation for all matrices
def compiled_gradient(function, count):
    import jax

    return jax.jit(jax.grad(total(function), tuple(range(count))))


def gradient(function, *arguments):
    """The gradients of Σ cos(function)."""
    if BACKEND == "jax":
        return compiled_gradient(function, len(arguments))(*arguments)
    if BACKEND == "torch":
        import torch

        arguments = [argument.detach().clone().requires_grad_() for argument in arguments]
        return torch.autograd.grad(total(function)(*arguments), arguments)
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(arguments)
        value = total(function)(*arguments)
    return tape.gradient(value, arguments)


def array(tensor):
    return np.asarray(keras.ops.convert_to_numpy(tensor), "float64")


def reflect(x, w):
    u = x @ w.T
    return x - 2 * u * np.sum(u * x, -1, keepdims=True) / np.sum(u * u, -1, keepdims=True)


def log_det(x, w):
    u, v = x @ w.T, x @ w
    beta = 2 / np.sum(u * u, -1)[:, None, None]
    n = np.eye(D) - beta * np.sum(u * x, -1)[:, None, None] * w + beta * u[:, :, None] * v[:, None, :]
    return np.linalg.slogdet(n)[1]


def differences(function, *arguments, step=1e-6):
    found = []
    for position, argument in enumerate(arguments):
        total = np.zeros_like(argument)
        for index in np.ndindex(argument.shape):
            sides = []
            for sign in (1, -1):
                moved = [a.copy() for a in arguments]
                moved[position][index] += sign * step
                sides.append(np.sum(np.cos(function(*moved))))
            total[index] = (sides[0] - sides[1]) / (2 * step)
        found.append(total)
    return found


def inverse(y, w):
    """By Newton's method on all unknowns, from the answer of the package."""
    x = array(invert(tensor(y), tensor(w)))
    for _ in range(8):
        u, v = x @ w.T, x @ w
        beta = 2 / np.sum(u * u, -1)[:, None, None]
        a = np.eye(D) - beta * np.sum(u * x, -1)[:, None, None] * w
        j = a - beta * u[:, :, None] * (np.einsum("ni,nij->nj", u, a) + v)[:, None, :]
        x = x - np.linalg.solve(j, (reflect(x, w) - y)[..., None])[..., 0]
    return x


def tensor(value):
    return keras.ops.convert_to_tensor(value, "float32")


def worst(computed, expected):
    return float(np.abs(array(computed) - expected).max() / (1 + np.abs(expected).max()))


invert = compiled(ops.inverse)
q = np.linalg.qr(rng.normal(size=(D, D)))[0]
k = rng.normal(size=(D, D))
MATRICES = {
    "symmetric": q * np.linspace(1, 1.8, D) @ q.T,
    "certified": np.linalg.inv(q * np.linspace(1, 1.8, D) @ q.T + 0.3 * (k - k.T)),
    "defective": 2 * np.eye(D) + np.eye(D, k=1),
}
x = rng.normal(size=(6, D))
found = {}
for name, w in MATRICES.items():
    w = w.astype("float32").astype("float64")
    x = x.astype("float32").astype("float64")
    y, value, _ = compiled(ops.reflect_and_log_det)(tensor(x), tensor(w))
    found[f"reflect_and_log_det {name}"] = max(worst(y, reflect(x, w)), worst(value, log_det(x, w)))
    back = array(invert(tensor(x), tensor(w)))
    found[f"inverse {name}"] = worst(reflect(back, w), x)
    if name == "defective":
        continue
    for label, function, reference in (
        ("reflect", ops.reflect, reflect),
        ("log_det_jacobian", ops.log_det_jacobian, log_det),
        ("inverse", ops.inverse, inverse),
    ):
        pairs = zip(gradient(function, tensor(x), tensor(w)), differences(reference, x, w), strict=True)
        found[f"gradient of {label} {name}"] = max(worst(a, b) for a, b in pairs)
w = MATRICES["certified"]
found["certified"] = 1.0 - float(kernels.certify(tensor(w)).invertible and bool(ops.is_certified(tensor(w))))
orthogonal = array(ops.cayley(tensor(k)))
found["cayley"] = worst(orthogonal.T @ orthogonal, np.eye(D))
orthogonal = array(ops.matrix_exp(tensor(k)))
found["matrix_exp"] = worst(orthogonal.T @ orthogonal, np.eye(D))


def householder(v, x):
    for column in v.T[::-1]:
        x = x - 2 * np.outer(x @ column, column) / (column @ column)
    return x


found["householder_product"] = worst(ops.householder_product(tensor(k), tensor(x)), householder(k, x))
pairs = zip(gradient(ops.householder_product, tensor(k), tensor(x)), differences(householder, k, x), strict=True)
found["gradient of householder_product"] = max(worst(a, b) for a, b in pairs)
found["preimages"] = worst(ops.preimages(tensor(x[0]), tensor(w))[0], array(invert(tensor(x), tensor(w)))[0])
v, scales = rng.normal(size=(6, 2, D)), rng.uniform(1, 1.8, size=(6, 2, D))
y, _ = compiled(ops.factored_flow_and_log_det)(tensor(x), tensor(v), tensor(scales))
found["factored_flow"] = worst(compiled(ops.factored_flow_inverse)(y, tensor(v), tensor(scales)), x)
triangles, shift = np.tanh(rng.normal(size=(2, 6, 3, 3))), rng.normal(size=(6, 3))
columns = compiled(ops.orthonormal_columns)(tensor(rng.normal(size=(6, D, 3))))
of = tensor(triangles[0]), tensor(triangles[1]), tensor(shift), columns
y, _ = compiled(ops.sylvester_and_log_det)(tensor(x), *of)
back = compiled(lambda y: ops.sylvester_inverse(y, *of))
found["sylvester"] = worst(back(y), x)
(slope,) = gradient(back, y)
both = np.asarray([array(t) for t in (y, slope)])
found["gradient of sylvester_inverse"] = worst(slope, differences(lambda y: array(back(tensor(y))), both[0], step=1e-2)[0])
if BACKEND == "jax":
    import jax

    jax.config.update("jax_enable_x64", True)
    first, second = keras.ops.convert_to_tensor(x[:1], "float64"), keras.ops.convert_to_tensor(w, "float64")

    def reflected(x):
        u = second @ x[0]
        return x[0] - 2 * u * (u @ x[0]) / (u @ u)

    def log_det(x):
        return jax.numpy.linalg.slogdet(jax.jacobian(reflected)(x)[:, 0])[1]

    for label, function, plain in (("log_det_jacobian", ops.log_det_jacobian, log_det), ("reflect", ops.reflect, reflected)):
        ours = lambda x: keras.ops.sum(keras.ops.sin(function(x, second)))  # noqa: B023, E731
        slopes = np.asarray(jax.jit(jax.hessian(lambda x: keras.ops.sum(keras.ops.sin(plain(x)))))(first))[0, :, 0]  # noqa: B023
        for how, hessian in (("forward", jax.hessian(ours)), ("reverse", jax.jacrev(jax.grad(ours)))):
            found[f"{how} hessian of {label}"] = worst(jax.jit(hessian)(first)[0, :, 0], slopes)
r, r_tilde = np.triu(triangles)
exact = x[:, :3] + np.einsum("nij,nj->ni", r, np.tanh(np.einsum("nij,nj->ni", r_tilde, x[:, :3]) + shift))
double = [keras.ops.convert_to_tensor(t, "float64") for t in (x[:, :3], r, r_tilde, shift)]
found["sylvester in float64"] = 1e9 * worst(ops.sylvester(*double), exact)  # below 2e-13 is below what the test allows
print(json.dumps(found))
