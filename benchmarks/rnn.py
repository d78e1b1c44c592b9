"""What a training step of a recurrent network costs, by its transition, against SimpleRNN and LSTM.

    python -m benchmarks.rnn            # about ten minutes on two CPU cores
    python -m benchmarks.rnn --quick    # a smoke run

Forward, backward and update of a network that reads 784 pixels one by one, as in experiments/rnn.py: hidden size 170, batch 128,
one plain optimizer for all. With and without XLA. Everything is a ratio of times measured in one run, in rounds over all
candidates. Writes a JSON file and prints a table.
"""

import argparse
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks import report
from benchmarks.timing import interleaved
from keras_auxref import OrthogonalRNN

CLASSES = 10


def layers(units: int) -> dict[str, Callable[[], keras.layers.Layer]]:
    """A constructor of every candidate, by the name in the results."""
    return {
        "aux": lambda: OrthogonalRNN(units, "aux"),
        "householder-1": lambda: OrthogonalRNN(units, "householder", reflections=1),
        f"householder-{units}": lambda: OrthogonalRNN(units, "householder"),
        "cayley": lambda: OrthogonalRNN(units, "cayley"),
        "exp": lambda: OrthogonalRNN(units, "exp"),
        "SimpleRNN": lambda: keras.layers.SimpleRNN(units),
        "LSTM": lambda: keras.layers.LSTM(units),
    }


def training_step(layer: keras.layers.Layer, steps: int, batch: int, jit: bool) -> Callable[[], Any]:
    """One step of Keras' own training loop on one batch."""
    generator = np.random.default_rng(0)
    x = tf.constant(generator.uniform(size=(batch, steps, 1)), tf.float32)
    y = tf.constant(generator.integers(0, CLASSES, batch))
    model = keras.Sequential([keras.Input((steps, 1)), layer, keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.RMSprop(1e-4), loss, jit_compile=jit)
    return lambda: model.train_on_batch(x, y)


def measure(units: int, steps: int, batch: int, rounds: int, jits: tuple[bool, ...]) -> dict[str, Any]:
    candidates = {}
    for jit in jits:
        for name, make in layers(units).items():
            keras.utils.set_random_seed(0)
            candidates[f"{name}{' (XLA)' if jit else ''}"] = training_step(make(), steps, batch, jit)
    times = interleaved(candidates, rounds)
    ratios = {}
    for label in (" (XLA)" if jit else "" for jit in jits):
        for other in ("SimpleRNN", "LSTM", f"householder-{units}"):
            above, below = f"aux{label}", f"{other}{label}"
            if above in times and below in times:
                key = f"aux / {other}{label}"
                ratios[key] = {k: times[above][f"{k}_seconds"] / times[below][f"{k}_seconds"] for k in ("median", "min")}
    return {"units": units, "steps": steps, "batch": batch, "times": times, "ratios": ratios}


def show(results: dict[str, Any]) -> None:
    print(f"\n{'training step':<24} {'median s':>9} {'min s':>9}")
    for name, time in results["times"].items():
        print(f"{name:<24} {time['median_seconds']:>9.3f} {time['min_seconds']:>9.3f}")
    print()
    for name, ratio in results["ratios"].items():
        print(f"{name:<32} median {ratio['median']:.2f}, ratio of minima {ratio['min']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_arguments(parser, "rnn", quick="small sizes and few rounds")
    parser.add_argument("--rounds", type=int, default=15, help="rounds over all candidates")
    parser.add_argument("--units", type=int, default=170)
    parser.add_argument("--steps", type=int, default=784)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--xla", action=argparse.BooleanOptionalAction, help="only with XLA, or only without (default: both)")
    arguments = parser.parse_args()
    units, steps, batch, rounds = arguments.units, arguments.steps, arguments.batch, arguments.rounds
    if arguments.quick:
        units, steps, batch, rounds = 8, 5, 4, 2
    results = measure(units, steps, batch, rounds, (False, True) if arguments.xla is None else (arguments.xla,))
    show(results)
    report.write(arguments, results)


if __name__ == "__main__":
    main()
