"""Which images cost a flow far more bits than others, and where in the flow they grow.

A batch whose loss is many times the usual one comes from single images. The scale of an affine coupling comes from a network of
ReLU layers, which answers a larger input with a larger output. So an image that is unlike the others is scaled up, its channels
are larger in the next step, and the next network scales it up further. This trains a flow for a few steps, finds the training
image that costs the most bits, and follows its size, and that of an image in the middle, through all steps.

    python -m experiments.outliers                                      patches of photographs, minutes on two CPU cores
    python -m experiments.outliers --dataset cifar10                    the paper's size (K = 8, C = 64, L = 3)
    python -m experiments.outliers --coupling plain --coupling bound=1  scales within exp(±2), the default, and within exp(±1)

Writes a JSON file, and a figure of the sizes over the steps of the flow.
"""

# Keras and TensorFlow are imported where they are used: they take seconds, and a wrong argument or missing data should not.
import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.harness import cli, data
from experiments.harness.results import command, environment, hardware, write_json

if TYPE_CHECKING:
    import keras
    import numpy as np

    from keras_auxref import Glow

DEFAULTS = {
    "patches": {"batch_size": 32, "runs": 1, "train_steps": 40, "levels": 2, "steps": 4, "hidden": 32},
    "cifar10": {"batch_size": 64, "runs": 3, "train_steps": 40, "levels": 3, "steps": 8, "hidden": 64},
}
COUPLINGS = ("plain", "norm")
BATCH = 256
"""Images that are measured at a time, and that ActNorm starts from."""


def coupling(name: str, hidden: int) -> "keras.layers.Layer":
    """The template of a coupling: `plain`, `norm`, or `bound=X`."""
    from keras_auxref.flows import AffineCoupling

    if name == "norm":
        return AffineCoupling(hidden=hidden, norm=True)
    return AffineCoupling(hidden=hidden, bound=float(name.removeprefix("bound=")) if name.startswith("bound=") else 2.0)


def coupling_name(text: str) -> str:
    """`plain`, `norm`, or `bound=X` with a number X above 0."""
    if text not in COUPLINGS and not text.startswith("bound="):
        raise argparse.ArgumentTypeError(f"expected plain, norm or bound=X, received {text!r}")
    if text.startswith("bound="):
        cli.positive_number(text.removeprefix("bound="))
    return text


def bits(model: "Glow", images: "np.ndarray") -> "np.ndarray":
    """Bits per dimension of every image."""
    import keras
    import numpy as np

    parts = [model.bits_per_dim(images[start : start + BATCH]) for start in range(0, len(images), BATCH)]
    return np.concatenate([keras.ops.convert_to_numpy(part) for part in parts])


def sizes(model: "Glow", images: "np.ndarray") -> "np.ndarray":
    """The root mean square of the channels of every image after every step of the flow, shape (images, levels · steps)."""
    import keras
    import numpy as np

    flow, found = model.flow, []
    x = flow.logit(keras.ops.convert_to_tensor(images.astype(model.compute_dtype) / 255))
    for level, (squeeze, steps) in enumerate(zip(flow.squeezes, flow.steps_of_levels, strict=True)):
        x = squeeze(x)
        for k in range(steps.times):
            with steps.copy(k) as step:
                x = step(x)
            found.append(np.sqrt(np.square(keras.ops.convert_to_numpy(x)).mean(axis=(1, 2, 3))))
        if level < flow.levels - 1:
            x, _ = keras.ops.split(x, 2, axis=-1)
    return np.stack(found, axis=1)


def follow(model: "Glow", images: "np.ndarray", seed: int, train_steps: int, batch_size: int) -> dict[str, Any]:
    """Trains on the images in random order, and follows the most expensive one and one in the middle."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(seed)
    model.initialize(images[:BATCH])
    random = np.random.default_rng(seed)
    epochs = -(-train_steps * batch_size // len(images))
    order = np.concatenate([random.permutation(len(images)) for _ in range(epochs)])[: train_steps * batch_size]
    model.fit(images[order], batch_size=batch_size, shuffle=False, verbose=0)
    found = bits(model, images)
    ranked = np.argsort(found)
    worst, middle = int(ranked[-1]), int(ranked[len(ranked) // 2])
    after = sizes(model, images[[worst, middle]])
    return {
        "seed": seed,
        "mean_bits": round(float(found.mean()), 4),
        "median_bits": round(float(np.median(found)), 4),
        "largest_bits": [round(float(value), 3) for value in found[ranked[:-6:-1]]],
        "largest_images": [int(i) for i in ranked[:-6:-1]],
        "sizes_of_the_worst": [round(float(value), 3) for value in after[0]],
        "sizes_of_the_middle": [round(float(value), 3) for value in after[1]],
    }


def draw(runs: dict[str, list[dict[str, Any]]], path: Path, title: str) -> None:
    """The sizes over the steps of the flow, of the worst image of every run and of the ones in the middle."""
    from experiments.harness import plotting

    with plotting.plt.rc_context(plotting.RC):
        figure, axis = plotting.plt.subplots(figsize=(7, 5), layout="constrained")
        for color, (name, entries) in zip(plotting.SPARE_COLORS, runs.items(), strict=False):
            for i, entry in enumerate(entries):
                for kind, line in (("worst", "-"), ("middle", ":")):
                    of = {"worst": "most expensive image", "middle": "image in the middle"}[kind]
                    found = entry[f"sizes_of_the_{kind}"]
                    label = f"{name}, {of}" if i == 0 else None
                    axis.plot(range(1, len(found) + 1), found, color=color, linestyle=line, label=label)
        axis.set(xlabel="Steps of the flow", ylabel="Root mean square of the channels", title=title)
        axis.set_ylim(bottom=0)
        figure.legend(loc="outside lower center", ncols=2)
        plotting.save(figure, path)


def arguments() -> Any:
    p = cli.parser(__doc__, tuple(DEFAULTS), DEFAULTS)
    p.add_argument(
        "--coupling",
        action="append",
        dest="couplings",
        type=coupling_name,
        metavar="NAME",
        help="plain, norm (hidden layers of the networks are normalised) or bound=X (scales within exp(±X)); repeat for several "
        f"(default: {' and '.join(COUPLINGS)})",
    )
    p.add_argument("--mixing", default="conv", metavar="NAME", help="the mixing of the flow (default: %(default)s)")
    for name in ("train-steps", "levels", "steps", "hidden"):
        p.add_argument(f"--{name}", type=cli.positive, metavar="N")
    cli.add_backend(p)
    args = cli.parse(p)
    args.couplings = list(dict.fromkeys(args.couplings or COUPLINGS))
    return args


def main() -> None:
    args = arguments()
    dataset = data.load(args.dataset, args.download).limit(args.train_size or args.train_steps * args.batch_size)
    stem = f"outliers-{args.dataset}"
    output = cli.output(args, stem)

    cli.import_keras(args)
    from keras_auxref import Glow

    here = environment()
    print(f"{args.dataset}: {len(dataset.train_images)} images, {args.train_steps} training steps, on {hardware(here)}")
    runs: dict[str, list[dict[str, Any]]] = {}
    for name in args.couplings:
        for seed in range(args.seed, args.seed + args.runs):
            shape = {"levels": args.levels, "steps": args.steps, "mixing": args.mixing, "seed": seed}
            model = Glow(dataset.image_shape, coupling=coupling(name, args.hidden), **shape)
            model.compile(jit_compile=cli.jit_compile(args))
            entry = follow(model, dataset.train_images, seed, args.train_steps, args.batch_size)
            runs.setdefault(name, []).append(entry)
            print(f"{name}, seed {seed}: {entry['mean_bits']:.3f} bits, at most {entry['largest_bits'][0]:.2f}", flush=True)
    settings = {key: getattr(args, key) for key in ("mixing", "levels", "steps", "hidden", "train_steps", "batch_size")}
    path = output / f"{stem}.json"
    header = {"experiment": "outliers", "dataset": dataset.describe(), "settings": settings, "commands": [command()]}
    write_json(path, {**header, "environment": here, "couplings": runs})
    figure = path.with_suffix(".png")
    draw(runs, figure, f"{args.dataset}: images in a flow after {args.train_steps} training steps")
    columns = ("coupling", "seed", "mean bits", "median", "largest", "growth of the worst", "of the middle")
    rows = [
        [
            name,
            str(entry["seed"]),
            f"{entry['mean_bits']:.3f}",
            f"{entry['median_bits']:.3f}",
            f"{entry['largest_bits'][0]:.2f}",
            *(f"{entry[key][-1] / entry[key][0]:.2f}" for key in ("sizes_of_the_worst", "sizes_of_the_middle")),
        ]
        for name, entries in runs.items()
        for entry in entries
    ]
    print(f"\n{cli.table(columns, rows)}\n\n{path}\n{figure}")


if __name__ == "__main__":
    cli.main(main)
