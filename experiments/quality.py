"""How near the samples of trained flows are to images, by the features of a small classifier that is trained here.

    python -m experiments.quality --dataset mnist a.keras b.keras       two flows, as `experiments.glow` saves them

The usual distance needs a network that was trained on other pictures for weeks. This takes a small convolutional classifier of
the data set itself (harness/features.py), trained on its training images, and compares the features of samples with those of as
many test images: the kernel distance, less is better; precision, the share of samples that look like images; and recall, the
share of images that samples look like. Numbers of one run are comparable with each other, and not with any of a paper. "images",
training images in the place of samples, is what can be reached at best.

Writes a JSON file.
"""

# Keras and TensorFlow are imported where they are used: they take seconds, and a wrong argument or missing data should not.
import argparse
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness import cli, data, features
from experiments.harness.results import command, environment, write_json

BATCH = 250
HEADER = ("samples of", "kernel distance", "precision", "recall")


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("flows", nargs="+", type=Path, metavar="FLOW", help="a .keras file of a flow of images")
    p.add_argument("--dataset", choices=data.NAMES, default="mnist", help="the images (default: %(default)s)")
    p.add_argument("--samples", type=cli.positive, default=2000, metavar="N", help="of each flow (default: %(default)s)")
    p.add_argument("--temperature", type=cli.positive_number, default=1.0, metavar="X", help="of samples (default: %(default)s)")
    p.add_argument("--epochs", type=cli.positive, default=2, metavar="N", help="of the classifier (default: %(default)s)")
    p.add_argument("--seed", type=cli.natural, default=0, metavar="N", help="of classifier and samples (default: %(default)s)")
    p.add_argument("--output", type=Path, default=Path("runs/quality"), metavar="DIR", help="(default: %(default)s)")
    p.add_argument("--download", action=argparse.BooleanOptionalAction, default=True, help="allow a download of the data")
    args = p.parse_args()
    missing = [path for path in args.flows if not path.is_file()]
    if missing:
        p.error(f"argument FLOW: expected a file, received {missing[0]}")
    return args


def compared(model: Any, real: np.ndarray, made: np.ndarray) -> dict[str, float]:
    """What is measured of samples; one with NaN, of which there is no picture, counts as unlike every image."""
    found = np.isfinite(made).all(axis=(1, 2, 3))
    x, y = features.features_of(model, real), features.features_of(model, made[found])
    precision, recall = features.precision_and_recall(x, y)
    distance = features.kernel_distance(x, y)
    return {"kernel_distance": distance, "precision": precision * found.mean(), "recall": recall}


def samples(flow: Any, count: int, seed: int, temperature: float) -> np.ndarray:
    """Samples in [0, 1], rounded to whole values as images are."""
    import keras

    parts = [flow.sample(BATCH, seed=seed + start, temperature=temperature) for start in range(0, count, BATCH)]
    found = np.concatenate([keras.ops.convert_to_numpy(part) for part in parts])[:count]
    return np.round(255 * found) / 255


def main() -> None:
    args = arguments()
    dataset = data.load(args.dataset, args.download)
    cli.import_keras()
    import keras

    from experiments.harness import flows

    loaded = {path.stem: flows.load_model(path) for path in args.flows}
    size = next(iter(loaded.values())).image_shape[0]
    dataset = dataset.resized(size)
    count = min(args.samples, len(dataset.validation_images))
    train, real = (dataset.train_images / dataset.peak, dataset.validation_images / dataset.peak)
    keras.utils.set_random_seed(args.seed)
    model = features.classifier(dataset.image_shape, dataset.classes)
    model.fit(train, dataset.train_labels, batch_size=64, epochs=args.epochs, verbose=0)
    accuracy = model.evaluate(real, dataset.validation_labels, batch_size=BATCH, verbose=0, return_dict=True)["accuracy"]

    measured = {"images": compared(model, real[:count], train[:count])}
    for name, flow in loaded.items():
        measured[name] = compared(model, real[:count], samples(flow, count, args.seed + 1, args.temperature))
    found = {
        "experiment": "quality",
        "dataset": dataset.describe(),
        "settings": {key: getattr(args, key) for key in ("temperature", "epochs", "seed")} | {"samples": count},
        "command": command(),
        "environment": environment(),
        "classifier": {"features": features.FEATURES, "accuracy": float(accuracy)},
        "measurements": measured,
    }
    path = args.output / f"quality-{args.dataset}.json"
    write_json(path, found)
    print(f"{count} samples each, temperature {args.temperature:g}; the classifier is right on {accuracy:.1%} of test images\n")
    print(cli.table(HEADER, [[name, *(f"{value:.4f}" for value in row.values())] for name, row in measured.items()]))
    print(f"\n{path}")


if __name__ == "__main__":
    cli.main(main)
