"""Glow with auxiliary reflections in place of its 1×1 convolutions, against the other ways to mix channels.

The experiment of section 4.3 of "One Reflection Suffice" (Mathiasen & Hvilshøj, 2020): the same flow, trained by maximum
likelihood for the same number of steps from the same orthogonal start, with each kind of mixing.

    python -m experiments.glow                                      patches of two photographs, a few minutes on two CPU cores
    python -m experiments.glow --mixing aux --mixing conv --runs 3  only these two, with mean and standard deviation
    python -m experiments.glow --dataset mnist --resume             digits of 28×28 pixels
    python -m experiments.glow --dataset cifar10 --resume           the paper's size (K = 8, C = 64, L = 3): better with a GPU
    python -m experiments.glow --mixing aux_factored --coupling affine --coupling logistic_mixture    two couplings, as in Flow++

Afterwards every run measures, on validation images: bits per dimension, how well n⁻¹(n(x)) returns x, and how many preimages
the auxiliary reflections have, since without a certificate nothing proves that there is only one. Writes a JSON file with all
of this, figures of the likelihood over steps and seconds (of training alone: neither validation nor compiling), of samples,
reconstructions and interpolations, and the trained models.
"""

# Keras and TensorFlow are imported where they are used: they take seconds, and a wrong argument or missing data should not.
import argparse
import math
import statistics
from pathlib import Path
from typing import Any

from experiments.harness import cli, data
from experiments.harness.results import Results, environment, hardware, mean_and_deviation

MIXINGS = ("aux_factored", "aux_factored_right", "aux", "aux_spectral", "aux_relaxed_cayley", "householder", "conv", "fixed")
MORE_MIXINGS = ("aux_conv", "qr", "aux_factored_qr", "permutation")
"""Only where they are asked for."""
REFLECTING = ("aux_factored", "aux_factored_right", "aux_conv", "householder", "qr", "aux_factored_qr")
"""Those that learn Householder vectors."""
COUPLINGS, DEQUANTISATIONS = ("affine", "additive", "logistic_mixture", "spline"), ("uniform", "variational")
RECIPE = ("ema", "cosine", "cooldown", "prior", "flips", "adamax", "clip", "norm")
"""What may be added to the flow or its training, alone or together: `--recipe ema+prior`."""
REFERENCE = "conv"
DEFAULTS: dict[str, dict[str, Any]] = {
    "patches": {
        "size": 32,
        "mixings": ("aux_factored", "aux", "conv"),
        "levels": 2,
        "steps": 2,
        "hidden": 32,
        "train_steps": 400,
        "batch_size": 32,
        "runs": 1,
        "validation_size": 228,
    },
    "mnist": {
        "size": 28,
        "mixings": ("aux_factored", "aux", "conv"),
        "levels": 2,
        "steps": 4,
        "hidden": 32,
        "train_steps": 2000,
        "batch_size": 64,
        "runs": 1,
        "validation_size": 1000,
    },
    "cifar10": {
        "size": 32,
        "mixings": MIXINGS,
        "levels": 3,
        "steps": 8,
        "hidden": 64,
        "train_steps": 10000,
        "batch_size": 64,
        "runs": 3,
        "validation_size": 1000,
    },
}
PAPER = 3.66
"""Bits per dimension of the paper's flow on CIFAR-10 after 80 epochs, with the settings above (its appendix on Glow)."""
STEPS_PER_EPOCH = 50
AVERAGE = 0.999
COOLDOWN = 5
"""A cooldown is the last one of so many parts of a training."""
VALIDATION_BATCH = 250
INITIAL_IMAGES = 256


def as_in_the_paper(args: Any) -> bool:
    """Whether flow and data have the paper's size."""
    keys = ("size", "levels", "steps", "hidden")
    return args.dataset == "cifar10" and all(getattr(args, key) == DEFAULTS["cifar10"][key] for key in keys)


def bits_per_dim(logs: dict[str, float]) -> dict[str, float]:
    """What is recorded after every epoch."""
    return {"training_bits": logs["bits_per_dim"], "validation_bits": logs["val_bits_per_dim"]}


def arguments() -> Any:
    p = cli.parser(__doc__, tuple(DEFAULTS), DEFAULTS)

    def by_dataset(key: str) -> str:
        return "default: " + ", ".join(f"{name}: {values[key]}" for name, values in DEFAULTS.items())

    p.add_argument(
        "--mixing",
        action="append",
        dest="mixings",
        choices=(*MIXINGS, *MORE_MIXINGS),
        help="a map between channels to train; repeat for several (default: aux_factored, aux and conv; cifar10: "
        f"all but {', '.join(MORE_MIXINGS)})",
    )
    p.add_argument(
        "--coupling",
        action="append",
        dest="couplings",
        choices=COUPLINGS,
        help=f"a coupling to train, with every mixing; repeat for several (default: {COUPLINGS[0]})",
    )
    p.add_argument(
        "--dequantisation",
        choices=DEQUANTISATIONS,
        default=DEQUANTISATIONS[0],
        help="the noise within every value of a pixel (default: %(default)s)",
    )
    p.add_argument(
        "--recipe",
        action="append",
        dest="recipes",
        type=recipe,
        metavar="X+Y",
        help="parts of a recipe to train with, repeat for several: ema (the average of weights), cosine (decay of the rate), "
        "cooldown (decay over the last fifth alone), prior (a learned one), flips (of training images), adamax, "
        "clip (gradients at 1, not 50), norm (in coupling networks); "
        "plain: none of them (default: plain)",
    )
    p.add_argument(
        "--vector-length",
        action="append",
        dest="lengths",
        type=cli.positive_number,
        metavar="X",
        help="length of Householder vectors at the start, which changes no map, but how far one step of Adam turns it; repeat "
        f"for several (default: 1; mixings: {', '.join(REFLECTING)})",
    )
    p.add_argument("--levels", type=cli.positive, metavar="L", help=f"levels of the flow ({by_dataset('levels')})")
    p.add_argument("--steps", type=cli.positive, metavar="K", help=f"steps of each level ({by_dataset('steps')})")
    p.add_argument("--hidden", type=cli.positive, metavar="C", help=f"channels of coupling networks ({by_dataset('hidden')})")
    p.add_argument(
        "--size", type=int, choices=(8, 14, 16, 28, 32), help=f"average pixels to images of this size ({by_dataset('size')})"
    )
    p.add_argument(
        "--train-steps", type=cli.positive, metavar="N", help=f"optimizer steps of a run ({by_dataset('train_steps')})"
    )
    p.add_argument(
        "--steps-per-epoch", type=cli.positive, metavar="N", help=f"steps between validations (default: {STEPS_PER_EPOCH})"
    )
    p.add_argument(
        "--validation-size",
        type=cli.positive,
        metavar="N",
        help=f"validation images for the curves; the number at the end is from all ({by_dataset('validation_size')})",
    )
    p.add_argument("--learning-rate", type=cli.positive_number, default=1e-3, metavar="X", help="of Adam (default: %(default)s)")
    p.add_argument(
        "--warmup", type=cli.natural, default=100, metavar="N", help="steps until the full rate (default: %(default)s)"
    )
    p.add_argument("--measure", action="store_true", help="with --resume: measure finished runs again, from their .keras files")
    cli.add_backend(p)
    args = cli.parse(p)
    args.steps_per_epoch = args.steps_per_epoch or min(STEPS_PER_EPOCH, args.train_steps)
    if args.train_steps % args.steps_per_epoch:
        p.error(
            "argument --train-steps: expected a multiple of --steps-per-epoch "
            f"({args.steps_per_epoch}), received {args.train_steps}"
        )
    native = DEFAULTS[args.dataset]["size"]
    if native % args.size:
        p.error(f"argument --size: expected a divisor of {native} for {args.dataset}, received {args.size}")
    if args.size % 2**args.levels:
        most = (args.size & -args.size).bit_length() - 1  # how often it can be halved
        p.error(f"argument --levels: expected at most {most} for images of {args.size}×{args.size}, received {args.levels}")
    couplings = args.couplings or COUPLINGS[:1]
    args.flows = list(
        dict.fromkeys(
            run_name(mixing, coupling, args.dequantisation, length, parts)
            for parts in args.recipes or [()]
            for mixing in args.mixings
            for coupling in couplings
            for length in (args.lengths or [1.0] if mixing in REFLECTING else [1.0])
        )
    )
    return args


def recipe(text: str) -> tuple[str, ...]:
    """The parts of a recipe, in one order."""
    named = [] if text == "plain" else text.split("+")
    unknown = [part for part in named if part not in RECIPE]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected parts out of {', '.join(RECIPE)}, received {unknown[0]!r}")
    if {"cosine", "cooldown"} <= set(named):
        raise argparse.ArgumentTypeError("expected one decay of the rate, received cosine and cooldown")
    return tuple(part for part in RECIPE if part in named)


def run_name(mixing: str, coupling: str, dequantisation: str, length: float = 1.0, parts: tuple[str, ...] = ()) -> str:
    """The name of a run: its mixing, and what is not as in Glow."""
    more = [name for name, usual in ((coupling, COUPLINGS[0]), (dequantisation, DEQUANTISATIONS[0])) if name != usual]
    return "+".join([mixing, *more, *([f"length={length:g}"] if length != 1 else []), *parts])


def parts_of(name: str) -> dict[str, Any]:
    """The mixing, coupling, dequantisation and prior of a run."""
    mixing, *more = name.split("+")
    coupling = next((part for part in more if part in COUPLINGS), COUPLINGS[0])
    dequantisation = next((part for part in more if part in DEQUANTISATIONS), DEQUANTISATIONS[0])
    prior = "learned" if "prior" in more else "standard"
    return {"mixing": mixing, "coupling": coupling, "dequantisation": dequantisation, "prior": prior}


def length_of(name: str) -> float:
    """The length of the Householder vectors of a run."""
    return next((float(part.removeprefix("length=")) for part in name.split("+") if part.startswith("length=")), 1.0)


def lengthen(model: Any, length: float) -> None:
    """Multiplies all Householder vectors by `length`. H(v) ignores it; a step of Adam turns a longer vector less."""
    for weight in model.trainable_variables if length != 1 else ():
        # Not the matrix after the reflection of `aux_conv`, which is no vector of a reflection.
        if weight.name.startswith("mixing") and weight.name.endswith("kernel") and "dense" not in weight.name:
            weight.assign(length * weight)


def build_model(args: Any, name: str, image_shape: tuple[int, ...], seed: int) -> Any:
    """A compiled flow. The same seed gives the same orthogonal start to every mixing."""
    from keras_auxref import flows
    from keras_auxref.flows import Glow

    parts, chosen = parts_of(name), name.split("+")
    if "norm" in chosen:
        layer = parts["coupling"].title().replace("_", "") + "Coupling"
        parts["coupling"] = getattr(flows, layer)(hidden=args.hidden, norm=True)
    model = Glow(image_shape, levels=args.levels, steps=args.steps, hidden=args.hidden, seed=seed, **parts)
    lengthen(model, length_of(name))
    falling = {"cosine": max(args.train_steps - args.warmup, 1), "cooldown": max(args.train_steps // COOLDOWN, 1)}
    decay = next((steps for part, steps in falling.items() if part in chosen), None)
    optimizer = Glow.optimizer(
        args.learning_rate,
        args.warmup,
        max_norm=1.0 if "clip" in chosen else 50.0,
        decay_steps=decay,
        hold_steps=max(args.train_steps - args.warmup - decay, 0) if decay else 0,
        average=AVERAGE if "ema" in chosen else None,
        algorithm="adamax" if "adamax" in chosen else "adam",
    )
    model.compile(optimizer=optimizer, jit_compile=cli.jit_compile(args))
    return model


def measure(model: Any, images: Any, pictures: Path | None) -> dict[str, Any]:
    """What is measured on a trained flow; the images for the figures go to a file of their own."""
    from experiments.harness import flows

    if pictures:
        flows.Pictures.of(model, images).save(pictures)
    parameters = sum(math.prod(weight.shape) for weight in model.trainable_weights)
    return {**flows.measure(model, images, VALIDATION_BATCH), "parameters": parameters}


def rows(results: Results, steps_per_epoch: int) -> list[list[str]]:
    """The closing table."""

    def values(name: str, *keys: str) -> list[float]:
        found: list[Any] = [run.measurements for run in results.runs(name)]
        for key in keys:
            found = [value.get(key) for value in found if value]
        return [value for value in found if value is not None]

    def text(known: list[float], form: str, summary: Any = statistics.fmean) -> str:
        return format(summary(known), form) if known else "–"

    def share(known: list[float]) -> str:
        # All, or less: one vector that is not returned must not be rounded away.
        return "–" if not known else "100%" if min(known) == 1 else f"{min(min(known), 0.9999):.2%}"

    table = []
    for name, runs, _, seconds, ratio in cli.comparison(results, REFERENCE, "validation_bits", 1.0, steps_per_epoch):
        bits, deviation = mean_and_deviation([run.measurements["bits_per_dim"] for run in results.runs(name)])
        table.append(
            [
                name,
                runs,
                f"{bits:.3f}" + (f" ± {deviation:.3f}" if deviation is not None else ""),
                seconds,
                ratio,
                text(values(name, "reconstruction", "max_error"), ".1e", max),
                share(values(name, "reconstruction", "share_of_images_restored")),
                text(values(name, "branches", "mean_preimages"), ".2f"),
                share(values(name, "branches", "min_share_returned")),
                f"{text(values(name, 'certified'), '.0f', min)}/{text(values(name, 'mixings'), '.0f', max)}",
            ]
        )
    return table


RATIO = f"ratio to {REFERENCE}"
HEADER = ("mixing", "runs", "bits/dim", "s/step", RATIO, "error", "restored", "preimages", "returned", "proven")
COLUMNS = (
    "bits/dim: over all validation images. error: the largest in a pixel of n⁻¹(n(x)), and restored: the images in which it is\n"
    "below half of a value, of 64 images, in the worst run. preimages: mean number per vector, over auxiliary reflections.\n"
    "returned: the share of vectors x with f⁻¹(f(x)) = x, in the worst layer. proven: mixings that are certainly invertible.\n"
    "Where one is not, and not all vectors are returned, bits/dim is no bound on a code length."
)


def main() -> None:
    args = arguments()
    dataset = data.load(args.dataset, args.download, instead="patches").limit(args.train_size).resized(args.size)
    stem = f"glow-{args.dataset}" + (f"-{args.size}" if args.size != DEFAULTS[args.dataset]["size"] else "")
    output = cli.output(args, stem)
    kept = ("levels", "steps", "hidden", "train_steps", "steps_per_epoch", "batch_size", "learning_rate", "warmup")
    settings = cli.settings(args, (*kept, "validation_size", "seed", "strategy", "jit"))
    results = Results(output / f"{stem}.json", "glow", dataset.describe(), settings, resume=args.resume)

    cli.import_keras(args)
    import keras

    from experiments.harness import distribution, flows, galleries, plotting, training
    from experiments.harness.attempts import attempts

    here = environment()
    shape = "×".join(map(str, dataset.image_shape))
    print(f"{args.dataset}: {len(dataset.train_images)} training images of {shape}, on {hardware(here)}")
    for attempt in attempts(args, args.flows, results, here, measure=args.measure):
        run = attempt.run
        pictures_of = output / f"{stem}-{run.map}.npz" if run.run == 0 else None
        if run.finished:
            with distribution.alone():
                run.measurements = measure(flows.load_model(attempt.model), dataset.validation_images, pictures_of)
            results.save(run)
            continue
        with cli.scope(args):
            model = build_model(args, run.map, dataset.image_shape, run.seed)

        # ActNorm starts from data; `fit` would take the images of its first batch.
        model.initialize(dataset.train_images[:INITIAL_IMAGES])

        epochs, parts = args.train_steps // args.steps_per_epoch, run.map.split("+")
        shown, callbacks = dataset.validation_images[: args.validation_size], []
        if "ema" in parts and keras.backend.backend() == "tensorflow":
            callbacks = [training.WithoutAverage(run, shown, dataset.validation_images, epochs, VALIDATION_BATCH)]

        def afterwards(model: Any, pictures_of: Path | None = pictures_of, watching: Any = tuple(callbacks)) -> dict[str, Any]:
            found = measure(model, dataset.validation_images, pictures_of)
            return found | (watching[0].result if watching else {})

        training.train(
            model,
            (dataset.train_images,),
            (shown,),
            run,
            results,
            epochs=epochs,
            batch_size=args.batch_size,
            checkpoints=attempt.checkpoints,
            measures=bits_per_dim,
            verbose=args.verbose,
            steps_per_epoch=args.steps_per_epoch,
            validation_batch=VALIDATION_BATCH,
            save=attempt.model if args.save else None,
            afterwards=afterwards,
            flips="flips" in parts,
            callbacks=tuple(callbacks),
        )

    of = f"Glow on {args.dataset}, {shape}, L = {args.levels}, K = {args.steps}, C = {args.hidden}"
    figures = {kind: output / f"{stem}-{kind}.png" for kind in ("likelihood", "samples", "reconstructions", "interpolations")}
    plotting.learning_curves(
        results.runs(),
        figures["likelihood"],
        measure="validation_bits",
        label="Validation bits per dimension",
        scale=1.0,
        title=of,
        steps_per_epoch=args.steps_per_epoch,
        skip=0.1,
        baseline=(PAPER, "the paper's flow after 80 epochs") if as_in_the_paper(args) else None,
    )
    names = dict.fromkeys(run.map for run in results.runs())
    stored_pictures = {name: flows.Pictures.load(output / f"{stem}-{name}.npz") for name in names}
    pictures = {name: found for name, found in stored_pictures.items() if found is not None}
    if pictures:
        after = f"after {args.train_steps} steps"
        galleries.samples(pictures, figures["samples"], f"Samples {after}: {of}")
        galleries.reconstructions(pictures, figures["reconstructions"], f"n⁻¹(n(x)) {after}: {of}")
        galleries.interpolations(pictures, figures["interpolations"], f"Straight lines in z {after}: {of}")
    print(f"\nAfter {args.train_steps} steps; seconds are medians over epochs of training alone:\n")
    print(cli.table(HEADER, rows(results, args.steps_per_epoch)))
    print(f"\n{COLUMNS}\n\n{results.path}")
    print("\n".join(str(path) for path in figures.values() if path.exists()))


if __name__ == "__main__":
    cli.main(main)
