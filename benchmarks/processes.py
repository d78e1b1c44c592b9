"""What a second process brings: the flow of the paper's size on JAX, data-parallel over two processes of one core each.

    python -m benchmarks.processes            # about five minutes on two CPU cores
    python -m benchmarks.processes --quick    # a smoke run

Timed in turns, with one global batch:

* one process on one core, the whole batch, and half of it: what a process computes in the time of the other's half;
* two processes of one core each over loopback, the whole batch: on two cores together, and each bound to its own;
* the same processes, only summing arrays of the shapes of all gradients: the exchange by itself.

From these follows, on paper, the batch per device above which many machines stay above 80 % of linear scaling: a ring sends and
receives 2 (N − 1)/N times the bytes of the gradients in every step, which is to take at most a quarter of the time of computing.
"""

import argparse
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import report, workers
from experiments.harness import cli, distribution

MODULE = "benchmarks.processes"
FULL = {"size": 32, "levels": 3, "steps": 8, "hidden": 64, "batch": 64, "rounds": 7, "count": 4}
QUICK = {"size": 8, "levels": 1, "steps": 1, "hidden": 8, "batch": 8, "rounds": 2, "count": 2}
MIXING = "aux_factored"
GIGABITS, SHARE = 10.0, 0.8
"""The network of the estimate, and the share of linear scaling that it asks for."""


def flow(settings: dict[str, int], images: Any) -> Any:
    import keras

    from keras_auxref.flows import Glow

    keras.utils.set_random_seed(0)
    shape, sizes = images.shape[1:], {key: settings[key] for key in ("levels", "steps", "hidden")}
    model = Glow(shape, mixing=MIXING, seed=0, **sizes)
    model.compile(Glow.optimizer(warmup_steps=10))
    model.initialize(images)
    return model


def training(model: Any, images: Any, batch: int, count: int) -> Callable[[], Any]:
    """`count` steps of `fit` on full batches, of which this process takes its share."""
    return lambda: model.fit(distribution.batches((images,), batch, seed=0, repeat=count), verbose=0)


def exchange(shapes: list[tuple[int, ...]]) -> Callable[[], Any]:
    """The sum over processes of arrays of these shapes, and nothing else."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.asarray(jax.devices()), ("batch",))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("batch",), ()))
    parts = [jax.make_array_from_process_local_data(split, np.ones((1, *shape), "float32")) for shape in shapes]
    summed = jax.jit(lambda parts: [part.sum(0) for part in parts], out_shardings=whole)
    return lambda: jax.block_until_ready(summed(parts))


def worker(settings: dict[str, int]) -> None:
    import numpy as np

    together = distribution.processes()[1] > 1
    distribution.start(0)
    images = np.random.default_rng(0).integers(0, 256, (4 * settings["batch"], settings["size"], settings["size"], 3), "uint8")
    model = flow(settings, images)
    shapes = [tuple(weight.shape) for weight in model.trainable_weights]
    steps = {"whole": training(model, images, settings["batch"], settings["count"])}
    if together:
        steps["exchange"] = exchange(shapes)
    else:
        steps["half"] = training(model, images, settings["batch"] // 2, settings["count"])
    workers.serve(steps, tensors=len(shapes), parameters=sum(int(np.prod(shape)) for shape in shapes))


def start_pair(arguments: list[str], common: dict[str, str], cores: Sequence[set[int]]) -> list[workers.Worker]:
    """Two processes that train together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    names = (distribution.ADDRESSES, distribution.NUMBER, distribution.IDENTITY)
    pair = [
        workers.Worker(MODULE, arguments, {**common, **dict(zip(names, (address, "2", str(i)), strict=True))}, cores[i])
        for i in range(2)
    ]
    for process in pair:
        process.ready()
    return pair


def measure(args: argparse.Namespace, settings: dict[str, int]) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit(f"Two processes of one core each need two cores. Received: {len(cores)}.")
    arguments = ["--worker", "--batch", str(settings["batch"]), *(["--quick"] if args.quick else [])]
    # XLA computes with one thread in each process, wherever that runs.
    common = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "NPROC": "1"}
    alone = workers.Worker(MODULE, arguments, common, {cores[0]})
    told = alone.ready()
    pinned = start_pair(arguments, common, [{core} for core in cores])
    pair = start_pair(arguments, common, [set(cores)] * 2)
    print("ready", flush=True)
    candidates = {
        "one process": ([alone], "whole"),
        "one process, half of the batch": ([alone], "half"),
        "two processes": (pair, "whole"),
        "two processes, exchange only": (pair, "exchange"),
        "two processes, each bound to a core": (pinned, "whole"),
        "two processes, each bound to a core, exchange only": (pinned, "exchange"),
    }
    times = workers.rounds(candidates, settings["rounds"])
    workers.close([alone, *pair, *pinned])
    for name, entry in times.items():
        # An answer is that of `count` steps of training, or of one exchange.
        steps = 1 if "exchange" in name else settings["count"]
        for key in ("median_seconds", "min_seconds"):
            entry[key] = float(f"{entry[key] / steps:.4g}")
    return {"step": times, "parameters": told["parameters"], "tensors": told["tensors"]}


def conclusions(measured: dict[str, Any], batch: int) -> dict[str, float]:
    """Throughput against one process, where the rest of the time goes, and the estimate for many machines."""
    seconds = {name: entry["median_seconds"] for name, entry in measured["step"].items()}
    one, half, two = (seconds[name] for name in ("one process", "one process, half of the batch", "two processes"))
    lowest = {name: entry["min_seconds"] for name, entry in measured["step"].items()}
    gradients = 4 * measured["parameters"]
    per_image = 2 * (one - half) / batch
    ring = 2 * gradients / (GIGABITS * 1e9 / 8)
    computing = SHARE / (1 - SHARE) * ring
    found = {
        "throughput": one / two,
        "throughput_of_minima": lowest["one process"] / lowest["two processes"],
        "throughput_bound_to_cores": one / seconds["two processes, each bound to a core"],
        "throughput_without_exchange": one / half,
        "seconds_of_exchange": seconds["two processes, exchange only"],
        "bytes_of_gradients": gradients,
        "bytes_sent_per_step_by_each_of_many": 2 * gradients,
        "seconds_of_ring_at_10_gigabit": ring,
        "seconds_of_computing_for_80_percent": computing,
        "seconds_per_image_of_one_core": per_image,
        "images_per_device_for_80_percent_on_one_core": computing / per_image,
    }
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_arguments(p, "processes", quick="a small flow and few rounds, to see that everything runs")
    p.add_argument("--batch", type=cli.positive, metavar="N", help=f"default: {FULL['batch']}, with --quick {QUICK['batch']}")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    settings = dict(QUICK if args.quick else FULL)
    settings["batch"] = args.batch or settings["batch"]
    if args.worker:
        worker(settings)
        return
    measured = measure(args, settings)
    concluded = conclusions(measured, settings["batch"])
    rows = [[name, f"{entry['median_seconds']:.3g}", f"{entry['min_seconds']:.3g}"] for name, entry in measured["step"].items()]
    print(cli.table(("a step", "median s", "min s"), rows) + "\n")
    print(cli.table(("conclusion", "value"), [[name.replace("_", " "), f"{value:.4g}"] for name, value in concluded.items()]))
    report.write(args, {"settings": {**settings, "mixing": MIXING}, **measured, "conclusions": concluded})


if __name__ == "__main__":
    cli.main(main)
