"""Is an unconstrained auxiliary reflection one-to-one where the data are? The paper's conjecture, measured on trained flows.

    python -m benchmarks.branches MODEL.keras [MODEL.keras …]

For every auxiliary reflection of every flow that `python -m experiments.glow --dataset cifar10` saved: how many preimages f(x)
has, counted exactly for some vectors x, and for how many of all vectors the inverse returns x; then how many whole images come
back.
Writes benchmarks/results/branches.json.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from experiments.harness import data

RESTORED_WITHIN = 1e-4
BATCH = 250


def measure(path: Path, count: int, counted: int) -> dict[str, Any]:
    """What one flow does to the first validation images."""
    import keras
    import tensorflow as tf

    import keras_auxref.flows  # noqa: F401  registers Glow

    model = keras.models.load_model(path)
    images = data.load("cifar10").resized(model.image_shape[0]).validation_images[:count]
    layers = model.branches(images, counted=counted)
    errors = []
    for start in range(0, len(images), BATCH):
        batch = images[start : start + BATCH]
        z, _ = model.encode(batch)
        # A NaN counts as an error of any size.
        error = np.abs(np.nan_to_num(model.decode(tf.identity(z)), nan=np.inf) - batch / 255)
        errors += list(error.max(axis=(1, 2, 3)))
    vectors = sum(layer.vectors for layer in layers)
    lost = sum(round((1 - layer.returned) * layer.vectors) for layer in layers)
    restored = int(np.sum(np.array(errors) <= RESTORED_WITHIN))
    print(f"{path.name}: {vectors - lost} of {vectors} vectors returned, {restored} of {len(images)} images restored")
    return {
        "model": path.name,
        "mixing": str(model.mixing),
        "images": len(images),
        "images_restored": restored,
        "vectors": vectors,
        "vectors_not_returned": lost,
        "mean_preimages": float(np.mean([layer.preimages for layer in layers])) if layers else None,
        "layers": [dataclasses.asdict(layer) for layer in layers],
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("models", nargs="+", type=Path, metavar="MODEL.keras")
    p.add_argument("--images", type=int, default=1000, help="validation images (default: %(default)s)")
    p.add_argument("--counted", type=int, default=64, help="vectors per layer whose preimages are counted (default: %(default)s)")
    report.add_arguments(p, "branches", quick=None)
    args = p.parse_args()
    missing = [str(path) for path in args.models if not path.exists()]
    if missing:
        p.error(f"no such file: {', '.join(missing)}")
    flows = [measure(path, args.images, args.counted) for path in args.models]
    report.write(args, {"flows": flows})


if __name__ == "__main__":
    main()
