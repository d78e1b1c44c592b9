"""`Flow` against other packages: test log-likelihood, and with `--time` seconds of a training step and time to the first one.

    python -m pip install -r benchmarks/requirements-peers.txt    # zuko and normflows, on torch
    python -m benchmarks.peers --quick                             # a smoke run
    python -m benchmarks.peers --resume --minutes 5                # likelihoods; goes on where it was stopped
    python -m benchmarks.peers --time                              # seconds, in a file of their own: needs a quiet machine

* `flow` is `Flow(d)` as it is by default, with splines and `conv`; `flow, aux_factored`, … has another mixing, and with
  `flow, none` x_a never changes places with x_b;
* `zuko` is zuko's `NSF`, autoregressive;
* `normflows` is its coupled rational-quadratic spline with the LU permutation of its examples.

All of them have 4 steps, networks with two hidden layers of 64 units, 8 bins, Adam with a rate that falls from 1e-3 to 0 along
a cosine, gradients clipped at the same norm, and the same batches of 256 in the same order. Data are standardised before. The
weights after the last step count. Log-likelihoods are in nats per vector, of the data as they were.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import densities, report
from experiments.harness import cli

STEPS, HIDDEN, BINS, BATCH, RATE, MAX_NORM = 4, 64, 8, 256, 1e-3, 50.0
MIXINGS = ("none", "permutation", "aux_factored", "aux_conv")
MODELS = ("flow", "zuko", "normflows", *(f"flow, {mixing}" for mixing in MIXINGS))
TRAINING_STEPS = {**dict.fromkeys(densities.PLANE, 1000), "digits": 500}
TIMED = {"flow, JAX": "jax", "flow, TensorFlow": "tensorflow", "flow, XLA": "tensorflow", "zuko": "torch", "normflows": "torch"}


def rows_of_batches(count: int, steps: int, seed: int) -> np.ndarray:
    """Which rows of `count` are in each of `steps` batches, of shape (steps, BATCH): epochs without their last, smaller batch."""
    rng, whole = np.random.default_rng(seed), count // BATCH * BATCH
    epochs = [rng.permutation(count)[:whole] for _ in range(-(-steps * BATCH // whole))]
    return np.concatenate(epochs)[: steps * BATCH].reshape(steps, BATCH)


# Each trains a model on batches, calls after_step(), and returns the number of weights and the log-density.
Trained = tuple[int, Callable[[np.ndarray], np.ndarray]]


def flow(name: str, batches: np.ndarray, seed: int, after_step: Callable[[], None], xla: bool = False) -> Trained:
    """`Flow`, by Keras' own `fit`."""
    import keras

    from keras_auxref import Flow
    from keras_auxref.flows import Permutation

    steps, _, d = batches.shape
    mixing: Any = name.split(", ")[1] if name.split(", ")[-1] in MIXINGS else "conv"
    mixing = Permutation(list(range(d))) if mixing == "none" else mixing
    keras.utils.set_random_seed(seed)
    model = Flow(d, STEPS, HIDDEN, mixing=mixing, seed=seed)
    rate = keras.optimizers.schedules.CosineDecay(RATE, steps)
    model.compile(keras.optimizers.Adam(rate, global_clipnorm=MAX_NORM), **({"jit_compile": True} if xla else {}))
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: after_step())
    model.fit(batches.reshape(-1, d), batch_size=BATCH, shuffle=False, verbose=0, callbacks=[watch])
    return sum(int(np.prod(weight.shape)) for weight in model.trainable_weights), lambda x: np.asarray(model.log_prob(x))


def on_torch(name: str, batches: np.ndarray, seed: int, after_step: Callable[[], None], xla: bool = False) -> Trained:
    """A peer, by the training loop of its documentation."""
    import torch

    torch.manual_seed(seed)
    model, density = {"normflows": _normflows, "zuko": _zuko}[name](batches.shape[-1])
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    for batch in torch.from_numpy(batches):
        optimizer.zero_grad()
        loss = -density(batch).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        loss.item()
        after_step()

    def log_prob(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return np.concatenate([density(torch.from_numpy(part)).numpy() for part in np.array_split(x, -(-len(x) // 2500))])

    return sum(weights.numel() for weights in model.parameters()), log_prob


def _zuko(d: int) -> tuple[Any, Any]:
    import zuko

    model = zuko.flows.NSF(d, transforms=STEPS, bins=BINS, hidden_features=(HIDDEN, HIDDEN))
    return model, lambda x: model().log_prob(x)


def _normflows(d: int) -> tuple[Any, Any]:
    import normflows

    layers: list[Any] = []
    for _ in range(STEPS):
        # One residual block is two hidden layers.
        layers.append(normflows.flows.CoupledRationalQuadraticSpline(d, 1, HIDDEN, num_bins=BINS))
        layers.append(normflows.flows.LULinearPermute(d))
    model = normflows.NormalizingFlow(normflows.distributions.DiagGaussian(d, trainable=False), layers)
    return model, model.log_prob


def trained(name: str, *args: Any, **kwargs: Any) -> Trained:
    return (flow if name.startswith("flow") else on_torch)(name, *args, **kwargs)


def likelihood(name: str, density: str, seed: int, quick: bool) -> dict[str, Any]:
    """One run: what the model says of test data after training."""
    data = densities.load(density, *([512] if quick else []))
    rows = rows_of_batches(len(data.train), 4 if quick else TRAINING_STEPS[density], seed)
    weights, log_prob = trained(name, data.train[rows], seed, lambda: None)
    value = float(np.mean(log_prob(data.test))) + data.log_det
    return {"density": density, "model": name, "seed": seed, "test_log_likelihood": round(value, 4), "weights": weights}


def seconds(name: str, d: int, quick: bool) -> dict[str, Any]:
    """The first step, from before the model is made, and the median of later ones. Imports do not count."""
    batches = np.random.default_rng(0).normal(size=(4 if quick else 104, BATCH, d)).astype("float32")
    xla, stamps = name.endswith("XLA"), []
    _import(name, batches)
    started = time.perf_counter()
    trained(name, batches, 0, lambda: stamps.append(time.perf_counter()), xla=xla)
    step = statistics.median(np.diff(stamps)[2:].tolist())
    return {"model": name, "d": d, "first_step_seconds": round(stamps[0] - started, 2), "step_milliseconds": round(1e3 * step, 2)}


def _import(name: str, batches: np.ndarray) -> None:
    """Imports what a model needs. torch also starts its threads; a second `Flow` would find compiled functions of the first."""
    if name.startswith("flow"):
        import keras

        import keras_auxref  # noqa: F401

        keras.utils.set_random_seed(0)  # which imports TensorFlow, on every backend
    else:
        trained(name, batches[:2, :, :1].repeat(3, axis=-1), 0, lambda: None)


def in_a_process(
    backend: str, jobs: list[list[Any]], args: argparse.Namespace, until: float = math.inf
) -> Iterator[dict[str, Any]]:
    """The results of jobs, one after the other in one process on this backend. None begins after `until` (`time.time`)."""
    environment = {**os.environ, "KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "benchmarks.peers", "--jobs", json.dumps(jobs), "--until", str(until)]
    command += ["--quick"] if args.quick else []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        print(f"failed with {process.returncode}: {jobs}", flush=True)


def compare(args: argparse.Namespace, path: Path) -> None:
    """All likelihoods that the file does not have: those of packages, then those of mixings, one process for each model."""
    runs = json.loads(path.read_text())["runs"] if args.resume and path.exists() else []
    done = {(run["density"], run["model"], run["seed"]) for run in runs}
    until = time.time() + 60 * args.minutes
    for model in sorted(args.models, key=MODELS.index):
        pairs = itertools.product(range(args.seeds), args.densities)
        jobs = [["likelihood", model, name, seed] for seed, name in pairs if (name, model, seed) not in done]
        if not jobs or time.time() > until:
            continue
        for run in in_a_process("jax" if model.startswith("flow") else "torch", jobs, args, until):
            runs.append(run)
            print(f"{run['density']}, {model}, seed {run['seed']}: {run['test_log_likelihood']:.3f}", flush=True)
            report.write(args, {"settings": settings(), "runs": runs, "summary": summary(runs)})
    rows = summary(runs)
    heads = ("density", "model", "seeds", "test log-likelihood", "weights")
    print(cli.table(heads, [[row["density"], row["model"], str(row["seeds"]), spread(row), str(row["weights"])] for row in rows]))


def measure(args: argparse.Namespace) -> None:
    """Seconds, every model and size in a process of its own."""
    sizes = (2,) if args.quick else (2, 64)
    runs = [run for d in sizes for name in TIMED for run in in_a_process(TIMED[name], [["seconds", name, d]], args)]
    report.write(args, {"settings": settings(), "runs": runs})
    heads = ("d", "model", "first step s", "later steps ms")
    rows = [[str(run["d"]), run["model"], f"{run['first_step_seconds']:.1f}", f"{run['step_milliseconds']:.1f}"] for run in runs]
    print(cli.table(heads, rows))


def settings() -> dict[str, Any]:
    names = {"steps": STEPS, "hidden": HIDDEN, "bins": BINS, "batch": BATCH, "learning_rate": RATE, "max_norm": MAX_NORM}
    return {**names, "training_steps": TRAINING_STEPS}


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and deviation over seeds, for every density and model."""
    found = []
    for density in densities.DENSITIES:
        for model in MODELS:
            chosen = [run for run in runs if (run["density"], run["model"]) == (density, model)]
            values = [run["test_log_likelihood"] for run in chosen]
            if chosen:
                deviation = round(statistics.stdev(values), 4) if len(values) > 1 else None
                mean = {"test_log_likelihood": round(statistics.fmean(values), 4), "deviation": deviation}
                found.append({"density": density, "model": model, "seeds": len(chosen), **mean, "weights": chosen[0]["weights"]})
    return found


def spread(row: dict[str, Any]) -> str:
    return f"{row['test_log_likelihood']:.3f}" + ("" if row["deviation"] is None else f" ± {row['deviation']:.3f}")


def main() -> None:
    args = arguments()
    if args.jobs:
        work: dict[str, Callable[..., dict[str, Any]]] = {"likelihood": likelihood, "seconds": seconds}
        for what, *rest in json.loads(args.jobs):
            if time.time() < args.until:
                print(json.dumps(work[what](*rest, args.quick)), flush=True)
        return
    name = "peers-time" if args.time else "peers"
    args.output = args.output or (report.QUICK if args.quick else report.RESULTS) / f"{name}.json"
    measure(args) if args.time else compare(args, args.output)


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_arguments(p, "peers", quick="small data and four steps of each, to see that everything runs")
    p.add_argument("--time", action="store_true", help="measure seconds instead of likelihoods, into peers-time.json")
    p.add_argument("--seeds", type=cli.positive, default=3, metavar="N", help="runs of each (default: %(default)s)")
    p.add_argument("--densities", nargs="+", choices=densities.DENSITIES, default=densities.DENSITIES, metavar="NAME")
    p.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="NAME", help=", ".join(map(repr, MODELS)))
    p.add_argument("--resume", action="store_true", help="keep the runs of the results file, and run what is missing")
    p.add_argument("--minutes", type=float, default=math.inf, metavar="N", help="begin no run after so long")
    p.add_argument("--jobs", help=argparse.SUPPRESS)
    p.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    return p.parse_args()


if __name__ == "__main__":
    cli.main(main)
