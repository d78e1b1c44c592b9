"""The fused recurrence against the same recurrence written step by step."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import ops
from keras_auxref.ops.activations import ACTIVATIONS, modrelu
from keras_auxref.ops.recurrence import recurrence
from tests import support
from tests.support import assert_agree

TRANSITIONS = ["aux", "linear"]
PLAIN = {
    "linear": lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "tanh": np.tanh,
    "modrelu": lambda z, b: np.sign(z) * np.maximum(np.abs(z) + b, 0),
}


def case(activation: str, steps: int = 5, batch: int = 3, n: int = 4, d: int = 2, dtype: str = "float64") -> list[np.ndarray]:
    """x, state, kernel, input kernel, its bias and, for modReLU, the bias of the activation."""
    rng = np.random.default_rng(0)
    shapes = [(steps, batch, d), (batch, n), (n, n), (d, n), (n,)]
    arrays = [rng.normal(size=shape) for shape in shapes]
    arrays += [0.3 * rng.normal(size=n)] if activation == "modrelu" else []
    return [a.astype(dtype) for a in arrays]


def fused(transition: str, activation: str, return_sequences: bool = False) -> Callable[..., Any]:
    return lambda *a: recurrence(*a, transition=transition, activation=activation, return_sequences=return_sequences)


def stepwise(transition: str, activation: str) -> Callable[..., tf.Tensor]:
    """Every state, by `ops.reflect` and TensorFlow's own derivatives."""
    act = {**{name: getattr(tf.nn, name) for name in ("relu", "sigmoid", "tanh")}, "linear": tf.identity, "modrelu": modrelu}

    def run(x: Any, h: Any, kernel: Any, v: Any, b: Any, *bias: Any) -> tf.Tensor:
        x, h, kernel = (tf.convert_to_tensor(t) for t in (x, h, kernel))
        states = []
        for step in tf.unstack(x):
            y = ops.reflect(h, kernel) if transition == "aux" else tf.matmul(h, kernel, transpose_b=True)
            h = act[activation](y + tf.matmul(step, v) + b, *bias)
            states.append(h)
        return tf.stack(states)

    return run


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("transition", TRANSITIONS)
def test_value_by_hand(transition: str, activation: str, dtype: str) -> None:
    x, h, kernel, v, b, *bias = arguments = case(activation, dtype=dtype)
    expected = []
    for step in x:
        y = support.reflect(h, kernel) if transition == "aux" else h @ kernel.T
        h = PLAIN[activation](y + step @ v + b, *bias)
        expected.append(h)
    tolerance = {"float32": 5e-5, "float64": 1e-13}[dtype]
    assert support.relative(fused(transition, activation, True)(*arguments), expected) < tolerance
    last = fused(transition, activation)(*arguments)
    assert last.dtype == dtype
    assert support.relative(last, expected[-1]) < tolerance


@pytest.mark.parametrize("return_sequences", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("transition", TRANSITIONS)
def test_gradients_agree_with_automatic_differentiation(transition: str, activation: str, return_sequences: bool) -> None:
    arguments = case(activation, steps=7)
    step = stepwise(transition, activation)
    plain = step if return_sequences else (lambda *a: step(*a)[-1])
    cotangent = np.random.default_rng(1).normal(size=(7, 3, 4) if return_sequences else (3, 4))
    found = support.gradients(fused(transition, activation, return_sequences), arguments, cotangent)
    expected = support.gradients(plain, arguments, cotangent)
    assert len(found) == len(arguments) + 1
    for a, b in zip(found, expected, strict=True):
        assert support.relative(a, b) < 1e-12


@pytest.mark.parametrize(
    ("inside", "transition", "return_sequences"), support.pairwise(["eager", "graph", "xla"], TRANSITIONS, [False, True])
)
def test_without_the_closed_form(transition: str, return_sequences: bool, inside: str) -> None:
    arguments = case("modrelu", steps=4)
    arguments[1][1] = 0
    cotangent = np.random.default_rng(1).normal(size=(4, 3, 4) if return_sequences else (3, 4))
    options: dict[str, Any] = {"transition": transition, "return_sequences": return_sequences}
    plain: Any = lambda *a: recurrence(*a, **options, closed_form=False)  # noqa: E731
    expected = support.gradients(lambda *a: recurrence(*a, **options), arguments, cotangent)
    if inside == "eager":
        found = support.gradients(plain, arguments, cotangent)
    else:

        @tf.function(jit_compile=inside == "xla", autograph=False)
        def compiled(*tensors: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                y = plain(*tensors)
            return [y, *tape.gradient(y, tensors, cotangent)]

        found = [t.numpy() for t in compiled(*(tf.constant(a) for a in arguments))]
    for a, b in zip(found, expected, strict=True):
        assert support.relative(a, b) < 1e-12


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_gradients_agree_with_differences(transition: str) -> None:
    arguments = case("modrelu", steps=4)
    cotangent = np.random.default_rng(1).normal(size=(3, 4))
    found = support.gradients(fused(transition, "modrelu"), arguments, cotangent)[1:]
    for a, b in zip(found, support.differences(fused(transition, "modrelu"), arguments, cotangent), strict=True):
        assert support.relative(a, b) < 1e-7


@pytest.mark.parametrize("inside", ["eager", "graph", "xla"])
@pytest.mark.parametrize("transition", TRANSITIONS)
def test_second_derivatives(transition: str, inside: str) -> None:
    x, h, kernel, *rest = case("tanh", steps=3)
    rng = np.random.default_rng(1)
    weights, cotangent = [rng.normal(size=h.shape), rng.normal(size=kernel.shape)], rng.normal(size=h.shape)

    def second(run: Callable[..., Any], inside: str) -> list[np.ndarray]:
        first = support.weighted_gradient(lambda h, kernel: run(tf.constant(x), h, kernel, *rest), weights)
        if inside != "eager":
            first = tf.function(first, jit_compile=inside == "xla", autograph=False)
        return support.gradients(first, [h, kernel, cotangent], 1.0)

    step = stepwise(transition, "tanh")
    expected = second(lambda *arguments: step(*arguments)[-1], "eager")
    for a, b in zip(second(fused(transition, "tanh"), inside), expected, strict=True):
        assert support.relative(a, b) < 1e-11


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("transition", TRANSITIONS)
def test_compiled_and_with_unknown_sizes(transition: str, jit: bool) -> None:
    arguments = case("modrelu", steps=6)

    @tf.function(
        jit_compile=jit,
        input_signature=[
            tf.TensorSpec(shape, tf.float64) for shape in ((None, None, 2), (3 if jit else None, 4), (4, 4), (2, 4), (4,), (4,))
        ],
    )
    def compiled(*arguments: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            y = fused(transition, "modrelu", True)(*arguments)
        return [y, *tape.gradient(y, arguments)]

    expected = support.gradients(fused(transition, "modrelu", True), arguments, np.ones((6, 3, 4)))
    for a, b in zip(compiled(*arguments), expected, strict=True):
        assert support.relative(a, b) < 1e-12


@pytest.mark.parametrize(("steps", "batch", "n"), [(1, 1, 1), (1, 3, 5), (2, 1, 7)])
@pytest.mark.parametrize("transition", TRANSITIONS)
def test_small_sizes(transition: str, steps: int, batch: int, n: int) -> None:
    arguments = case("modrelu", steps, batch, n, d=1)
    found = support.gradients(fused(transition, "modrelu", True), arguments, np.ones((steps, batch, n)))
    expected = support.gradients(stepwise(transition, "modrelu"), arguments, np.ones((steps, batch, n)))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


def test_orthogonal_start_is_the_matrix(dtype: str, rng: np.random.Generator) -> None:
    x, h, _, *rest = case("linear", steps=20, n=8, dtype=dtype)
    u = support.orthogonal(8, rng).astype(dtype)
    aux = fused("aux", "linear")(x, h, np.eye(8, dtype=dtype) - u, *rest)
    assert support.relative(aux, fused("linear", "linear")(x, h, u, *rest)) < {"float32": 1e-5, "float64": 1e-13}[dtype]


@pytest.mark.parametrize("kind", ["zero state", "zero kernel", "fixed vector", "zero row"])
def test_where_w_h_is_zero(kind: str, dtype: str) -> None:
    """T(h) = h there, with the identity as gradient for h and zero for W: as in `ops.reflect`."""
    x, h, kernel, v, b = case("linear", steps=3, dtype=dtype)
    x, b = 0 * x, 0 * b
    if kind == "zero state":
        h = 0 * h
    elif kind == "zero kernel":
        kernel = 0 * kernel
    elif kind == "zero row":
        h[1] = 0
    else:  # W h is rounding: h lies in the null space of W
        q = np.linalg.qr(np.random.default_rng(3).normal(size=(4, 4)))[0]
        kernel, h = (q[:, :3] @ q[:, :3].T).astype(dtype), np.outer([1, 2, 3], q[:, 3]).astype(dtype)
    g = np.ones((3, 4), dtype)
    found = support.gradients(fused("aux", "linear"), [x, h, kernel, v, b], g)
    y, gx, gh, gw, *_ = found
    dead = [1] if kind == "zero row" else [0, 1, 2]
    np.testing.assert_array_equal(y[dead], h[dead])
    np.testing.assert_array_equal(gh[dead], g[dead])
    np.testing.assert_allclose(gx[:, dead], np.broadcast_to(v.sum(axis=1), gx[:, dead].shape), rtol=1e-5)
    expected = support.gradients(lambda *a: stepwise("aux", "linear")(*a)[-1], [x, h, kernel, v, b], g)
    for one, other in zip(found, expected, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, atol={"float32": 1e-5, "float64": 1e-12}[dtype])
    if kind != "zero row":
        np.testing.assert_array_equal(gw, np.zeros_like(gw))


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
def test_no_overflow(size: float) -> None:
    """f(αh) = α f(h), and rows of every size in one batch."""
    x, h, kernel, v, b = case("linear", steps=2, dtype="float32")
    scale = np.array([[size], [1.0], [1 / size]], "float32")
    run = fused("aux", "linear")
    y, _, gh, gw, *_ = support.gradients(run, [0 * x, scale * h, kernel, v, 0 * b], np.ones((3, 4), "float32"))
    rows = [support.gradients(run, [0 * x[:, :1], row[None], kernel, v, 0 * b], np.ones((1, 4), "float32")) for row in h]
    np.testing.assert_allclose(y, scale * np.concatenate([row[0] for row in rows]), rtol=1e-5)
    np.testing.assert_allclose(gh, np.concatenate([row[2] for row in rows]), rtol=1e-4, atol=1e-5)
    assert support.relative(gw, sum(s * row[3].astype("float64") for s, row in zip(scale, rows, strict=True))) < 1e-5


def test_a_nan_stays_in_its_row() -> None:
    x, h, kernel, *rest = case("modrelu")
    h[1, 2] = np.nan
    y = recurrence(x, h, kernel, *rest).numpy()
    assert np.isnan(y[1]).any()
    assert np.isfinite(y[[0, 2]]).all()
    # A kernel that is not finite is refused where it can be seen; in a graph it is not hidden.
    kernel[0, 0] = np.nan
    with pytest.raises(ValueError, match="must be finite"):
        recurrence(x, h, kernel, *rest)
    assert np.isnan(tf.function(recurrence)(x, case("modrelu")[1], kernel, *rest)).all()


def test_without_input_bias() -> None:
    x, h, kernel, v, b = case("tanh")
    assert_agree(recurrence(x, h, kernel, v, activation="tanh"), recurrence(x, h, kernel, v, 0 * b, activation="tanh"))


def test_modrelu() -> None:
    x = np.array([-3.0, -0.5, 0.0, 0.5, 3.0])
    np.testing.assert_allclose(modrelu(x, -1.0), [-2, 0, 0, 0, 2])
    np.testing.assert_allclose(modrelu(x, 1.0), [-4, -1.5, 0, 1.5, 4])
    _, gx, gb = support.gradients(modrelu, [x, np.full(5, -1.0)], np.ones(5))
    np.testing.assert_allclose(gx, [1, 0, 0, 0, 1])
    np.testing.assert_allclose(gb, [-1, 0, 0, 0, 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transition": "dense"}, r"Expected one of \['aux', 'linear'\]. Received: 'dense'"),
        ({"activation": "gelu"}, "Unknown activation. Expected one of"),
        ({"activation_bias": None}, "Expected a tensor for activation='modrelu'"),
        ({"activation": "tanh"}, "None for the others. Received: activation='tanh', activation_bias=a tensor"),
        ({"x": np.zeros((3, 2))}, r"Expected shapes \(time, batch, d\)"),
        ({"input_kernel": np.zeros((3, 4))}, r"Received: x \(5, 3, 2\), state \(3, 4\), input_kernel \(3, 4\)"),
        ({"kernel": np.zeros((5, 5))}, "must match `w`"),
        ({"state": np.zeros((3, 4), "float32")}, "must share one dtype"),
        ({"x": np.zeros((5, 3, 2), "float32")}, "Expected one dtype, float32 or float64. Received: x float32, kernel float64"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    names = ("x", "state", "kernel", "input_kernel", "input_bias", "activation_bias")
    with pytest.raises(ValueError, match=message):
        recurrence(**{**dict(zip(names, case("modrelu"), strict=True)), **change})


def test_half_precision_is_refused() -> None:
    with pytest.raises(ValueError, match=r"float32 or float64. Received: x float16"):
        recurrence(*case("modrelu", dtype="float16"))


@pytest.mark.slow
def test_on_jax() -> None:
    """`jax.lax.scan` with the closed form, in a process of its own: values, gradients, second derivatives, the layer."""
    pytest.importorskip("jax")
    script = Path(__file__).with_name("recurrence_on_jax.py")
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = str(script.parents[2])
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["backend"] == "jax"
    assert len(found["errors"]) == 25
    assert max(found["errors"].values()) < 2e-11, found["errors"]
