"""One flow in a process of its own, for `benchmarks.depth`: its seconds, or the memory of a training step, as JSON.

It imports nothing of this folder, so that it also runs against a checkout of another version.
"""

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np


def megabytes() -> float:
    """The largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    np.asarray(function())
    return time.perf_counter() - started


def main(task: dict[str, Any]) -> dict[str, Any]:
    import keras

    from keras_auxref.flows import Glow

    keras.utils.set_random_seed(0)
    size, batch, rounds = task["size"], task["batch"], task["rounds"]
    images = np.random.default_rng(0).integers(0, 256, (batch, size, size, 3), dtype="uint8")
    started = time.perf_counter()
    sizes = {key: task[key] for key in ("levels", "steps", "hidden", "mixing")}
    model = Glow((size, size, 3), seed=0, **sizes, **task["arguments"])
    model.compile(Glow.optimizer(warmup_steps=10), jit_compile=task["compiled"])
    model.initialize(images)
    built, before = time.perf_counter() - started, megabytes()
    weights = model.trainable_variables
    found: dict[str, Any] = {"arrays": len(weights)}
    first = timed(lambda: model.train_on_batch(images))
    if task["part"] == "memory":
        timed(lambda: model.train_on_batch(images))
        bytes_of_weights = sum(int(np.prod(weight.shape)) * 4 for weight in weights)
        return {**found, "peak_megabytes": megabytes() - before, "weights_megabytes": bytes_of_weights / 2**20}
    later = [timed(lambda: model.train_on_batch(images)) for _ in range(rounds)]
    z = np.random.default_rng(1).normal(size=(batch, model.dimension)).astype("float32")
    decoding = [timed(lambda: keras.ops.convert_to_numpy(model.decode(z))) for _ in range(rounds + 1)]
    return {
        **found,
        "build_seconds": built,
        "first_step_seconds": first,
        "step_seconds": statistics.median(later),
        "first_decoding_seconds": decoding[0],
        "decoding_seconds": statistics.median(decoding[1:]),
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
