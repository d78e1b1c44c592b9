"""A training step on TensorFlow, on TensorFlow with XLA, and on JAX: the flow of the paper's size, and the recurrent network.

    python -m benchmarks.backends            # about six minutes on two CPU cores
    python -m benchmarks.backends --quick    # a smoke run

* Glow on 32×32×3, L = 3, K = 8, C = 64, batch 64, with factored reflections and with Glow's own 1×1 convolutions;
* a recurrent network over 784 pixels, hidden size 170, batch 128, with an auxiliary reflection and with 170 Householder
  reflections. On JAX also as `keras.layers.RNN` runs the same cell, which is what `OrthogonalRNN` does better.

Every backend has a process of its own; they take turns, in a new order in every round.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import report, workers
from experiments.harness import cli

MODULE = "benchmarks.backends"
WAYS = {"tensorflow": ("tensorflow", False), "tensorflow, XLA": ("tensorflow", True), "jax": ("jax", True)}
FULL = {"flow": (32, 3, 8, 64, 64), "rnn": (784, 170, 128)}
QUICK = {"flow": (8, 1, 1, 8, 8), "rnn": (5, 8, 4)}
MIXINGS, TRANSITIONS = ("conv", "aux_factored"), ("aux", "householder")
KERAS_LOOP = "aux, by keras.layers.RNN"


def flows(jit: bool, size: int, levels: int, steps: int, hidden: int, batch: int) -> dict[str, Callable[[], Any]]:
    import keras

    from keras_auxref.flows import Glow

    images = np.random.default_rng(0).integers(0, 256, (256, size, size, 3), dtype="uint8")
    found = {}
    for mixing in MIXINGS:
        keras.utils.set_random_seed(0)
        model = Glow((size, size, 3), levels=levels, steps=steps, hidden=hidden, mixing=mixing, seed=0)
        model.compile(Glow.optimizer(warmup_steps=10), jit_compile=jit)
        model.initialize(images)
        found[mixing] = stepping(model, images[:batch])
    return found


def networks(backend: str, jit: bool, steps: int, units: int, batch: int) -> dict[str, Callable[[], Any]]:
    import keras

    from keras_auxref import OrthogonalRNN, OrthogonalRNNCell

    rng = np.random.default_rng(0)
    x, y = rng.random((batch, steps, 1), dtype="float32"), rng.integers(0, 10, batch)
    layers: dict[str, Any] = {name: OrthogonalRNN(units, name) for name in TRANSITIONS}
    if backend == "jax":
        layers[KERAS_LOOP] = keras.layers.RNN(OrthogonalRNNCell(units, "aux"))
    found = {}
    for name, layer in layers.items():
        model = keras.Sequential([keras.Input((steps, 1)), layer, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.RMSprop(1e-4), loss, jit_compile=jit)
        found[name] = stepping(model, x, y)
    return found


def stepping(model: Any, *data: Any) -> Callable[[], Any]:
    """A training step of Keras on one batch, which has ended when its loss is known."""
    return lambda: [float(value) for value in np.atleast_1d(model.train_on_batch(*data))]


def worker(way: str, quick: bool) -> None:
    backend, jit = WAYS[way]
    sizes = QUICK if quick else FULL
    of_flows, of_networks = flows(jit, *sizes["flow"]), networks(backend, jit, *sizes["rnn"])
    named = {"flow": of_flows, "rnn": of_networks}
    workers.serve({f"{part}: {name}": step for part, steps in named.items() for name, step in steps.items()})


def measure(quick: bool, number: int) -> dict[str, Any]:
    candidates, first, started = {}, {}, []
    for way, (backend, _) in WAYS.items():
        arguments = ["--worker", way, *(["--quick"] if quick else [])]
        process = workers.Worker(MODULE, arguments, {"KERAS_BACKEND": backend})
        started.append(process)
        for step, seconds in process.ready()[workers.READY].items():
            candidates[f"{step} ({way})"] = ([process], step)
            first[f"{step} ({way})"] = seconds
        print(f"{way}: ready", flush=True)
    times = workers.rounds(candidates, number)
    workers.close(started)
    for name, entry in times.items():
        entry["first_call_seconds"] = first[name]
    return {name: {key: float(f"{value:.4g}") for key, value in entry.items()} for name, entry in times.items()}


def ratios(times: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """What is compared: mixings and transitions on one backend, and backends for one of them."""
    pairs = [(f"flow: aux_factored ({way})", f"flow: conv ({way})") for way in WAYS]
    pairs += [(f"rnn: aux ({way})", f"rnn: householder ({way})") for way in WAYS]
    pairs += [(f"rnn: {KERAS_LOOP} (jax)", "rnn: aux (jax)")]
    pairs += [
        (f"{step} ({way})", f"{step} (tensorflow)")
        for step in ("flow: conv", "flow: aux_factored", "rnn: aux")
        for way in list(WAYS)[1:]
    ]
    keys = ("median", "min")
    return {
        f"{a} / {b}": {key: float(f"{times[a][f'{key}_seconds'] / times[b][f'{key}_seconds']:.4g}") for key in keys}
        for a, b in pairs
    }


def show(times: dict[str, dict[str, float]], compared: dict[str, dict[str, float]]) -> None:
    keys = ("median_seconds", "min_seconds", "first_call_seconds")
    print(
        cli.table(
            ("training step", "median s", "min s", "first call s"),
            [[n, *(f"{t[k]:.3g}" for k in keys)] for n, t in times.items()],
        )
    )
    print(
        "\n"
        + cli.table(
            ("ratio", "of medians", "of minima"), [[n, f"{r['median']:.2f}", f"{r['min']:.2f}"] for n, r in compared.items()]
        )
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_arguments(p, "backends", quick="small models and few rounds, to see that everything runs")
    p.add_argument("--rounds", type=cli.positive, metavar="N", help="default: 9, with --quick 2")
    p.add_argument("--worker", choices=tuple(WAYS), help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.worker:
        os.environ["KERAS_BACKEND"] = WAYS[args.worker][0]
        worker(args.worker, args.quick)
        return
    times = measure(args.quick, args.rounds or (2 if args.quick else 9))
    compared = ratios(times)
    show(times, compared)
    settings = {"flow": "size, levels, steps, hidden, batch", "rnn": "steps, units, batch"}
    sizes = {key: {"of": of, "are": list((QUICK if args.quick else FULL)[key])} for key, of in settings.items()}
    report.write(args, {"settings": sizes, "training_step": times, "ratios": compared})


if __name__ == "__main__":
    cli.main(main)
