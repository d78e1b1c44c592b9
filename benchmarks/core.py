"""What the three functions behind everything cost, against what a user would write or pick instead.

    python -m benchmarks.core            # about two minutes on two CPU cores
    python -m benchmarks.core --quick    # a smoke run

* `AuxReflection`, forward and backward, against a bias-free Dense layer, with and without XLA;
* `ops.log_det_jacobian`, value and gradients, against Lemma 4 of the paper with one LU factorisation per vector;
* `ops.inverse` against ten steps of the paper's d-dimensional Newton method.

Everything is a ratio of times measured in one run, in rounds over all candidates. Writes a JSON file and prints tables.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks import report
from benchmarks.timing import interleaved
from keras_auxref import AuxReflection, ops

SHAPES = [(16384, 12), (4096, 24), (1024, 48)]


def gradients_of(
    function: Callable[..., tf.Tensor], arguments: list[tf.Tensor], cotangent: tf.Tensor, jit: bool
) -> Callable[[], Any]:
    """A compiled function of value and gradients. The value is returned too: TensorFlow prunes a forward pass that is not."""

    @tf.function(jit_compile=jit, autograph=False)
    def compiled(*arguments: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            value = function(*arguments)
            loss = tf.reduce_sum(value * cotangent)
        return [value, *tape.gradient(loss, arguments)]

    return lambda: compiled(*arguments)[0].numpy()


def training_step(module: Any, weights: list[Any], x: tf.Tensor, g: tf.Tensor, jit: bool) -> Callable[[], Any]:
    """Forward and backward of a layer, for the input and the weights."""

    @tf.function(jit_compile=jit, autograph=False)
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = module(x)
            loss = tf.reduce_sum(y * g)
        return [y, *tape.gradient(loss, [x, *weights])]

    return lambda: step(x)[0].numpy()


def layer(rounds: int, d: int, batch: int) -> dict[str, Any]:
    """AuxReflection against Dense: the same three matrix products, and whatever comes on top."""
    generator = np.random.default_rng(0)
    x, g = (tf.constant(generator.normal(size=(batch, d)), tf.float32) for _ in range(2))
    functions = {}
    for jit in (False, True):
        for name, module in (("dense", keras.layers.Dense(d, use_bias=False)), ("aux", AuxReflection())):
            module.build((None, d))
            weights = [weight.value for weight in module.trainable_weights]
            functions[f"{name}{' (XLA)' if jit else ''}"] = training_step(module, weights, x, g, jit)
    times = interleaved(functions, rounds)
    ratios = {label: _ratio(times, f"aux{label}", f"dense{label}") for label in ("", " (XLA)")}
    return {"d": d, "batch": batch, "times": times, "ratio": ratios[""], "ratio_xla": ratios[" (XLA)"]}


def _ratio(times: dict[str, dict[str, float]], above: str, below: str) -> dict[str, float]:
    return {kind: times[above][f"{kind}_seconds"] / times[below][f"{kind}_seconds"] for kind in ("median", "min")}


def lemma_with_lu(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """Lemma 4 as it stands: one d×d matrix A per vector, its determinant and one solve."""
    u, v = x @ tf.transpose(w), x @ w
    squared = tf.reduce_sum(u * u, -1)
    c = 2 * tf.reduce_sum(u * x, -1) / squared
    a = tf.eye(w.shape[0], dtype=x.dtype) - c[:, None, None] * w
    solved = tf.linalg.solve(a, u[..., None])[..., 0]
    return tf.linalg.slogdet(a)[1] + tf.math.log(tf.abs(1 + 2 * tf.reduce_sum(v * solved, -1) / squared))


def matrices(d: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """One W of each kind that a flow has: symmetric as in the paper, and relaxed Cayley, both certified."""
    v = generator.normal(size=(d, d))
    gram = v @ v.T
    rotation = np.linalg.qr(generator.normal(size=(d, d)))[0]
    s = rotation * generator.uniform(1, 1.9, d) @ rotation.T
    k = generator.normal(size=(d, d)) / np.sqrt(d)
    return {"symmetric": np.eye(d) + 0.5 * gram / np.linalg.norm(gram, 2), "general": np.linalg.inv(s + k - k.T)}


def log_det(rounds: int, shapes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    rows = []
    for n, d in shapes:
        generator = np.random.default_rng(d)
        x, g = tf.constant(generator.normal(size=(n, d)), tf.float32), tf.constant(generator.normal(size=n), tf.float32)
        for kind, matrix in matrices(d, generator).items():
            w = tf.constant(matrix, tf.float32)
            times = interleaved(
                {
                    "one factorisation": gradients_of(ops.log_det_jacobian, [x, w], g, jit=False),
                    "one LU per vector": gradients_of(lemma_with_lu, [x, w], g, jit=False),
                },
                rounds,
            )
            exact = lemma_with_lu(tf.cast(x, tf.float64), tf.cast(w, tf.float64))
            error = {name: float(tf.reduce_max(tf.abs(tf.cast(f(x, w), tf.float64) - exact))) for name, f in _LOG_DETS.items()}
            rows.append(_row(n, d, kind, times, "one LU per vector", "one factorisation", error))
    return rows


_LOG_DETS = {"one factorisation": ops.log_det_jacobian, "one LU per vector": lemma_with_lu}


_INVERSES = {"secular equation": ops.inverse, "ten d-dimensional Newton steps": ops.newton_inverse}


def inverse(rounds: int, shapes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    rows = []
    for n, d in shapes:
        generator = np.random.default_rng(d)
        y = tf.constant(generator.normal(size=(n, d)), tf.float32)
        for kind, matrix in matrices(d, generator).items():
            w = tf.constant(matrix, tf.float32)
            compiled = {name: tf.function(function) for name, function in _INVERSES.items()}
            times = interleaved({name: functools.partial(_read, f, y, w) for name, f in compiled.items()}, rounds)
            error = {name: residual(function(y, w), y, w) for name, function in compiled.items()}
            rows.append(_row(n, d, kind, times, "ten d-dimensional Newton steps", "secular equation", error))
    return rows


def _read(function: Callable[..., tf.Tensor], *arguments: tf.Tensor) -> np.ndarray:
    return function(*arguments).numpy()


def residual(x: tf.Tensor, y: tf.Tensor, w: tf.Tensor) -> float:
    """The largest ‖f(x) − y‖/‖y‖, evaluated in float64."""
    x, y, w = (tf.cast(t, tf.float64) for t in (x, y, w))
    return float(tf.reduce_max(tf.norm(ops.reflect(x, w) - y, axis=-1) / tf.norm(y, axis=-1)))


def _row(n: int, d: int, kind: str, times: dict, slow: str, fast: str, error: dict[str, float]) -> dict[str, Any]:
    return {"n": n, "d": d, "w": kind, "times": times, "speedup": _ratio(times, slow, fast), "largest_error": error}


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}\n{'n':>6} {'d':>4} {'W':<10} {'ms':>9} {'ms before':>10} {'speed-up':>9} {'error':>9} {'before':>9}")
    for row in rows:
        (fast, slow), (error, before) = row["times"].values(), row["largest_error"].values()
        now, then = 1e3 * fast["median_seconds"], 1e3 * slow["median_seconds"]
        print(
            f"{row['n']:>6} {row['d']:>4} {row['w']:<10} {now:>9.2f} {then:>10.1f} "
            f"{row['speedup']['median']:>8.1f}x {error:>9.1e} {before:>9.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_arguments(parser, "core", quick="small shapes and few rounds")
    parser.add_argument("--rounds", type=int, default=15, help="rounds over all candidates (the layer gets ten times as many)")
    arguments = parser.parse_args()
    rounds, shapes = (2, [(64, 6)]) if arguments.quick else (arguments.rounds, SHAPES)
    results: dict[str, Any] = {
        "layer": layer(2 if arguments.quick else 10 * rounds, 32 if arguments.quick else 784, 128),
    }
    measured = results["layer"]
    print(f"AuxReflection / Dense, forward and backward, d = {measured['d']}, batch {measured['batch']}")
    for label, key in (("without XLA", "ratio"), ("with XLA", "ratio_xla")):
        print(f"  {label:<12} median {measured[key]['median']:.2f}, ratio of minima {measured[key]['min']:.2f}")
    results["log_det_jacobian"] = log_det(rounds, shapes)
    show("log_det_jacobian, value and gradients, float32", results["log_det_jacobian"])
    results["inverse"] = inverse(rounds, shapes)
    show("inverse, float32 (error: largest ‖f(x) − y‖/‖y‖)", results["inverse"])
    report.write(arguments, results)


if __name__ == "__main__":
    main()
