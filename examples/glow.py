"""Glow, a normalizing flow of images, with factored reflections in the place of its 1×1 convolutions.

    python examples/glow.py                        patches of two photographs that scikit-learn has: a minute on two CPU cores
    python examples/glow.py --mixing conv          Glow's own 1×1 convolutions
    python examples/glow.py --dataset mnist        or cifar10, which Keras downloads: better with a GPU

Trains by maximum likelihood with `fit`, prints bits per dimension and how well the inverse returns validation images, draws
samples, and saves the model.
"""

import argparse
from pathlib import Path

import quiet  # noqa: F401  Keras without TensorFlow's start-up notices

import keras
import numpy as np

from keras_auxref import Glow

MIXINGS = ("aux_factored", "aux", "aux_relaxed_cayley", "householder", "conv")


def load(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Images for training and for validation, (n, height, width, channels) with whole values 0 … 255."""
    if name != "patches":
        (train, _), (validation, _) = getattr(keras.datasets, name).load_data()
        return train.reshape(*train.shape[:3], -1), validation.reshape(*validation.shape[:3], -1)
    from sklearn.datasets import load_sample_images
    from sklearn.feature_extraction.image import extract_patches_2d

    # The right quarter of each photograph is kept for validation.
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for photograph in load_sample_images().images:
        edge = 3 * photograph.shape[1] // 4
        for part, region, count in zip(parts, (photograph[:, :edge], photograph[:, edge:]), (2000, 128), strict=True):
            part.append(extract_patches_2d(region, (32, 32), max_patches=count, random_state=0))
    return np.concatenate(parts[0]), np.concatenate(parts[1])


def side_by_side(images: np.ndarray, across: int) -> np.ndarray:
    """One picture of all images, `across` in a row."""
    n, height, width, channels = images.shape
    rows = images.reshape(n // across, across, height, width, channels).swapaxes(1, 2)
    return rows.reshape(n // across * height, across * width, channels)


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dataset", choices=("patches", "mnist", "cifar10"), default="patches")
    p.add_argument("--mixing", choices=MIXINGS, default="aux_factored", help="of the channels (default: aux_factored)")
    p.add_argument("--epochs", type=int, default=4)
    args = p.parse_args(arguments)

    keras.utils.set_random_seed(0)
    images, validation = load(args.dataset)
    model = Glow(images.shape[1:], levels=2, steps=2, hidden=32, mixing=args.mixing)
    model.compile(Glow.optimizer(1e-3, warmup_steps=100))
    model.initialize(images[:256])  # ActNorm starts at the mean and the deviation of data
    model.fit(images, batch_size=32, epochs=args.epochs, validation_data=(validation,), validation_batch_size=128)

    bits = model.evaluate(validation, batch_size=128, verbose=0, return_dict=True)["bits_per_dim"]
    some = validation[:32]
    z, _ = model.encode(some)
    error = np.abs(keras.ops.convert_to_numpy(model.decode(z)) - some / 255).max()
    samples = np.clip(keras.ops.convert_to_numpy(model.sample(32, seed=1, temperature=0.7)), 0, 1)
    path = Path("runs", f"glow-{args.dataset}-{args.mixing}.keras")
    path.parent.mkdir(exist_ok=True)
    model.save(path)
    keras.utils.save_img(path.with_suffix(".png"), 255 * side_by_side(samples, 8), scale=False)
    print(f"\nValidation bits per dimension after {args.epochs} epochs: {bits:.3f}")
    print(f"Largest error of the inverse in {len(some)} validation images: {error:.1e}\n{path}\n{path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
