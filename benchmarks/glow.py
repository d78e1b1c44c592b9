"""What the mixing of channels costs in a whole Glow: a training step and decoding, for every mixing, as ratios to Glow's own.

    python -m benchmarks.glow --quick    a smoke run of a minute
    python -m benchmarks.glow            the paper's size on CIFAR-10: 32×32×3, L = 3, K = 8, C = 64, batch 64

All flows have the same couplings, ActNorm and optimizer and differ in the mixing only. Beside those of `Glow` stand

* `…, XLA`: the whole training step, and the whole decoding, in one function with `jit_compile=True`;
* `none`: no mixing at all, which is what everything else in a step costs;
* `aux, as in the paper`: the same weights as `aux`, but the log-determinant by Lemma 4 with one LU factorisation per pixel, and
  the inverse by ten steps of Newton's method in d dimensions.

The flows are trained for some steps before they decode, because at the orthogonal start the inverse is easier than in a trained
flow. Candidates take turns, in a new order in every round; a ratio is one of medians, and of minima, in one run. The time of the
first call, which traces the model, stands beside them.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

from benchmarks import report
from benchmarks.timing import interleaved
from experiments.harness import cli, data
from experiments.harness.results import environment, hardware

MIXINGS = ("conv", "aux_factored", "aux_factored_right", "aux", "aux_spectral", "aux_relaxed_cayley", "householder", "fixed")
REFERENCE, NONE, PAPER = "conv", "none", "aux, as in the paper"
COMPILED = {f"{name}, XLA": name for name in ("conv", "aux_factored")}
EVERYTHING = (*MIXINGS, *COMPILED, NONE, PAPER)
FULL = {"size": 32, "levels": 3, "steps": 8, "hidden": 64, "batch": 64, "rounds": 9, "trained": 40}
QUICK = {"size": 16, "levels": 2, "steps": 2, "hidden": 16, "batch": 16, "rounds": 3, "trained": 10}
NEWTON_STEPS = 10
IMAGES = 1024


def build(name: str, args: argparse.Namespace, images: Any) -> Any:
    """A compiled flow that has seen data."""
    import keras

    from keras_auxref.flows import Glow

    keras.utils.set_random_seed(0)
    mixing = variants().get(name) or COMPILED.get(name, name)
    shape = (args.size, args.size, 3)
    model = Glow(shape, levels=args.levels, steps=args.steps, hidden=args.hidden, mixing=mixing, seed=0)
    model.compile(Glow.optimizer(warmup_steps=10), jit_compile=name in COMPILED)
    model.initialize(images)
    return model


def variants() -> dict[str, Any]:
    """Templates of mixings that the package does not have."""
    import keras
    import tensorflow as tf

    from benchmarks.core import lemma_with_lu
    from keras_auxref import AuxReflection, ops
    from keras_auxref.flows import InvertibleDense
    from keras_auxref.initializers import FixedPointFree, ReflectionOf

    class NoMixing(InvertibleDense):
        def forward_and_log_det(self, x: Any, training: bool | None = None) -> Any:
            return x, keras.ops.zeros_like(x[..., 0])

        def inverse(self, y: Any) -> Any:
            return y

    class PaperReflection(AuxReflection):
        def forward_and_log_det(self, x: Any, training: bool | None = None) -> Any:
            w = self.kernel
            log_det = lemma_with_lu(tf.reshape(x, (-1, x.shape[-1])), w)
            return ops.reflect(x, w), tf.reshape(log_det, tf.shape(x)[:-1])

        def inverse(self, y: Any) -> Any:
            return ops.newton_inverse(y, self.kernel, steps=NEWTON_STEPS)

    start = ReflectionOf(FixedPointFree(0))
    return {NONE: NoMixing(trainable=False), PAPER: PaperReflection(kernel_initializer=start, track_branch=True)}


def training_step(model: Any, images: Any, batch: int) -> Callable[[], None]:
    """The step that `fit` runs, without its progress bar and callbacks: likelihood, gradients, clipping and Adam."""
    import tensorflow as tf

    shuffled = tf.data.Dataset.from_tensor_slices((images,)).shuffle(len(images), seed=0).repeat()
    batches = iter(shuffled.batch(batch, drop_remainder=True))
    model.optimizer.build(model.trainable_variables)
    model.make_train_function()

    def run() -> None:
        model.train_function(batches)
        tf.test.experimental.sync_devices()

    return run


def decoding(model: Any, images: Any, compiled: bool) -> tuple[Callable[[], None], Callable[[], float]]:
    """n⁻¹ of n(images) with its largest error; the model must not be trained any more, or z is not its z."""
    import numpy as np
    import tensorflow as tf

    expected = images.astype("float32") / 255
    z = model.encode(images)[0]
    decode = tf.function(model.decode, jit_compile=True) if compiled else model.decode

    def error() -> float:
        # NaN for a vector without preimage counts as lost.
        return float(np.nan_to_num(np.abs(decode(z).numpy() - expected), nan=np.inf).max())

    return lambda: decode(z).numpy(), error


def train(models: dict[str, Any], steps: dict[str, Callable[[], None]], count: int) -> None:
    """Trains every flow; other ways to compute the same get the weights of the flow that they equal."""
    for name, step in steps.items():
        source = "aux" if name == PAPER else COMPILED.get(name)
        if source in models:
            models[name].set_weights(models[source].get_weights())
        else:
            for _ in range(count):
                step()


def timed(functions: dict[str, Callable[[], Any]], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Seconds of the first call and of the others, and their ratios to the reference."""
    first = {}
    for name, function in functions.items():
        started = time.perf_counter()
        function()
        first[name] = time.perf_counter() - started
        print(f"  {name}: first call {first[name]:.1f} s", flush=True)
    times = interleaved(functions, args.rounds)
    for name, entry in times.items():
        entry["first_call_seconds"] = first[name]
        for kind in ("median", "min"):
            entry[f"ratio_of_{kind}"] = entry[f"{kind}_seconds"] / times[REFERENCE][f"{kind}_seconds"]
    return {name: {key: float(f"{value:.4g}") for key, value in entry.items()} for name, entry in times.items()}


def show(title: str, times: dict[str, dict[str, float]], **more: dict[str, float]) -> None:
    keys = ("median_seconds", "min_seconds", "ratio_of_median", "ratio_of_min", "first_call_seconds")
    header = ("mixing", "median s", "min s", f"× {REFERENCE}", "× of minima", "first call s", *more)
    rows = [
        [name, *(f"{entry[key]:.3g}" for key in keys), *(f"{column[name]:.1e}" for column in more.values())]
        for name, entry in times.items()
    ]
    print(f"\n{title}\n\n{cli.table(header, rows)}\n", flush=True)


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_arguments(p, "glow", quick="a small flow and few rounds, to see that everything runs")
    for key, value in FULL.items():
        p.add_argument(f"--{key}", type=cli.positive, metavar="N", help=f"default: {value}, with --quick {QUICK[key]}")
    p.add_argument("--mixing", action="append", choices=EVERYTHING, help="time only these, and conv; repeat for several")
    p.add_argument("--part", action="append", choices=("decode", "training"), help="time only this part (default: both)")
    args = p.parse_args()
    for key, value in (QUICK if args.quick else FULL).items():
        setattr(args, key, getattr(args, key) or value)
    args.part = args.part or ["decode", "training"]
    args.mixing = list(dict.fromkeys([REFERENCE, *(args.mixing or EVERYTHING)]))
    return args


def main() -> None:
    args = arguments()
    images = data.load("patches").resized(args.size).train_images[:IMAGES]
    here = environment()
    flow = f"Glow on {args.size}×{args.size}×3, L = {args.levels}, K = {args.steps}, C = {args.hidden}, batch {args.batch}"
    print(f"{flow}, on {hardware(here)}\n")
    models = {name: build(name, args, images) for name in args.mixing}
    measured: dict[str, Any] = {}
    steps = {name: training_step(model, images, args.batch) for name, model in models.items()}
    if "training" in args.part:
        measured["training_step"] = timed(steps, args)
        show("A training step", measured["training_step"])
    if "decode" in args.part:
        train(models, steps, args.trained)
        decoders = {name: decoding(model, images[: args.batch], name in COMPILED) for name, model in models.items()}
        times = timed({name: run for name, (run, _) in decoders.items()}, args)
        errors = {name: error() for name, (_, error) in decoders.items()}
        show("Decoding a batch", times, **{"largest error": errors})
        lost = {name: None if value == float("inf") else value for name, value in errors.items()}
        measured["decode"] = {name: {**entry, "largest_error": lost[name]} for name, entry in times.items()}
    report.write(args, {"settings": {key: getattr(args, key) for key in FULL}, **measured})


if __name__ == "__main__":
    cli.main(main)
