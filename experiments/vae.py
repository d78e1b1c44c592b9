"""Variational autoencoders whose posterior is a flow: Householder, Sylvester and auxiliary reflections, and none.

What section "Similar Ideas" of "One Reflection Suffice" (Mathiasen & Hvilshøj, 2020) leaves open: a Householder flow reflects z
in directions that the encoder gives; an auxiliary reflection takes a direction that depends on z too. The model of
examples/vae.py on binary digits, with the same encoder and decoder for all; everything but the flow starts the same.

    python -m experiments.vae                                       scikit-learn's digits, all posteriors
    python -m experiments.vae --posterior none --posterior aux-8    only these two
    python -m experiments.vae --dataset mnist --resume              28×28 pixels; goes on where it was interrupted

Writes a JSON file with every run, a figure, and a table: the negative ELBO of the test images, and the bound on −log p(x) that 64
weighted samples of z give, both in nats. Their difference tells how far a posterior is from the true one.
"""

# Keras and TensorFlow are imported where they are used: they take seconds, and a wrong argument or missing data should not.
from pathlib import Path
from typing import Any

from experiments.harness import cli, data
from experiments.harness.results import Results, environment, hardware, mean_and_deviation

STEPS = (1, 4, 8)
FORMS = ("orthogonal", "householder", "triangular")
POSTERIORS = (
    "none",
    *(f"householder-{t}" for t in STEPS),
    *(f"sylvester-{form}" for form in FORMS),
    *(f"aux-{t}" for t in STEPS),
)
SYLVESTER_STEPS = 4
SAMPLES = 64
DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"epochs": 20, "batch_size": 64, "runs": 3, "latent": 8, "hidden": 128},
    "mnist": {"epochs": 50, "batch_size": 128, "runs": 3, "latent": 32, "hidden": 256},
}
STEPS_PER_EPOCH = 100


def build_model(posterior: str, pixels: int, latent: int, hidden: int) -> Any:
    """The autoencoder with a posterior of `POSTERIORS`."""
    from examples.vae import VAE
    from keras_auxref.posteriors import FactoredFlow, HouseholderFlow, SylvesterFlow

    kind, _, setting = posterior.partition("-")
    if kind == "sylvester":
        flow: Any = SylvesterFlow(SYLVESTER_STEPS, form=setting)
    elif kind == "aux":
        flow = FactoredFlow(int(setting))
    else:
        flow = HouseholderFlow(int(setting or 0))
    return VAE(pixels, latent, hidden, flow)


def losses(logs: dict[str, float]) -> dict[str, float]:
    """What is recorded after every epoch: negative ELBOs with one sample of z."""
    return {"training_loss": logs["loss"], "validation_loss": logs["val_loss"]}


def arguments() -> Any:
    p = cli.parser(__doc__, tuple(DEFAULTS), DEFAULTS)
    p.add_argument(
        "--posterior", action="append", dest="posteriors", choices=POSTERIORS, help="repeat for several (default: all)"
    )
    for key, meaning in (("latent", "size of z"), ("hidden", "units of the hidden layers")):
        shown = ", ".join(f"{name}: {values[key]}" for name, values in DEFAULTS.items())
        p.add_argument(f"--{key}", type=cli.positive, metavar="N", help=f"{meaning} (default: {shown})")
    args = cli.parse(p)
    args.posteriors = list(dict.fromkeys(args.posteriors or POSTERIORS))
    return args


def rows(results: Results) -> list[list[str]]:
    """The closing table."""

    def text(name: str, key: str) -> str:
        mean, deviation = mean_and_deviation([run.measurements[key] for run in results.runs(name)])
        return f"{mean:.2f}" + (f" ± {deviation:.2f}" if deviation is not None else "")

    table = []
    for name, runs, _, seconds, ratio in cli.comparison(results, "none", "validation_loss", 1.0, STEPS_PER_EPOCH):
        weights = results.runs(name)[0].measurements["flow_weights"]
        bounds = (text(name, key) for key in ("negative_elbo", "importance_weighted"))
        table.append([name, runs, *bounds, f"{weights}", f"{1e3 * float(seconds):.2g}", ratio])
    return table


def draw(results: Results, path: Path, title: str) -> None:
    """A line for each posterior: every run as a dot, the mean as a bar; filled for the ELBO, hollow for weighted samples."""
    from experiments.harness import plotting

    names = list(dict.fromkeys(run.map for run in results.runs()))
    with plotting.plt.rc_context(plotting.RC):
        figure, axis = plotting.plt.subplots(figsize=(8, 1.6 + 0.36 * len(names)), layout="constrained")
        for line, name in enumerate(names):
            color = plotting.SPARE_COLORS[("none", "householder", "sylvester", "aux").index(name.partition("-")[0])]
            for key, fill, word in (
                ("negative_elbo", color, "negative ELBO"),
                ("importance_weighted", "white", f"−log p(x), bound by {SAMPLES} weighted samples"),
            ):
                values = [run.measurements[key] for run in results.runs(name)]
                label = word if line == 0 else None
                axis.plot(values, [line] * len(values), "o", color=color, markerfacecolor=fill, markersize=6, label=label)
                axis.plot([mean_and_deviation(values)[0]] * 2, [line - 0.3, line + 0.3], color=color, linewidth=2)
        axis.set(xlabel="nats per test image", yticks=range(len(names)), yticklabels=names)
        axis.invert_yaxis()
        figure.suptitle(title, fontsize=12)
        figure.legend(loc="outside lower center", ncols=2)
        plotting.save(figure, path)


def main() -> None:
    args = arguments()
    dataset = data.load(args.dataset, download=args.download).limit(args.train_size)
    stem = f"vae-{args.dataset}"
    output = args.output or Path("runs", stem)
    kept = ("epochs", "batch_size", "latent", "hidden", "seed", "strategy", "jit")
    settings = {key: getattr(args, key) for key in kept}
    results = Results(output / f"{stem}.json", "vae", dataset.describe(), settings, resume=args.resume)

    import keras
    import numpy as np

    from examples.vae import bounds
    from experiments.harness import training
    from experiments.harness.attempts import attempts

    here = environment()
    print(f"{args.dataset}: {len(dataset.train_images)} training images, on {hardware(here)}")
    train, test = (
        (images.reshape(len(images), -1) > dataset.peak / 2).astype("float32")
        for images in (dataset.train_images, dataset.validation_images)
    )
    for attempt in attempts(args, args.posteriors, results, here):
        with cli.scope(args):
            model = build_model(attempt.run.map, dataset.dimension, args.latent, args.hidden)
            model.compile(optimizer=keras.optimizers.Adam(), jit_compile=cli.jit_compile(args))

        def afterwards(model: Any) -> dict[str, Any]:
            weights = sum(int(np.prod(weight.shape)) for weight in model.flow.trainable_weights)
            return {**bounds(model, test, SAMPLES), "flow_weights": weights}

        training.train(
            model,
            (train,),
            (test,),
            attempt.run,
            results,
            epochs=args.epochs,
            batch_size=args.batch_size,
            checkpoints=attempt.checkpoints,
            measures=losses,
            verbose=args.verbose,
            steps_per_epoch=STEPS_PER_EPOCH,
            save=attempt.model if args.save else None,
            afterwards=afterwards,
        )

    figure = output / f"{stem}.png"
    steps = args.epochs * STEPS_PER_EPOCH
    draw(results, figure, f"Posteriors of a VAE on {args.dataset}, d = {args.latent}, {steps} steps, every run and the mean")
    header = ("posterior", "runs", "negative ELBO", "−log p(x) ≤", "weights of the flow", "ms/step", "ratio to none")
    print(f"\nAfter {steps} steps, in nats per test image:\n")
    print(cli.table(header, rows(results)))
    print(f"\n{results.path}\n{figure}")


if __name__ == "__main__":
    cli.main(main)
