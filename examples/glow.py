"""Glow, a normalizing flow of images, with factored reflections in place of its 1×1 convolutions.

    python examples/glow.py                        patches of two photographs that scikit-learn has: a minute on two CPU cores
    python examples/glow.py --mixing conv          Glow's own 1×1 convolutions
    python examples/glow.py --dataset mnist        or cifar10, which Keras downloads: better with a GPU
    python examples/glow.py --folder pictures      your own, cut to squares and scaled to 32×32

Trains by maximum likelihood with `fit`, prints bits per dimension and how well the inverse returns validation images, draws
samples, and saves the model, in `runs` or where `--output` says.
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


def load_folder(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The pictures of a folder and of those in it, of 32×32 pixels; every eighth is kept for validation."""
    endings = {".png", ".jpg", ".jpeg", ".bmp", ".gif"}
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in endings)
    if len(paths) < 8:
        raise SystemExit(f"Expected a folder with at least 8 pictures (png, jpg, bmp, gif). Received: {len(paths)} in {folder}")
    try:
        loaded = [keras.utils.load_img(path, target_size=(32, 32), keep_aspect_ratio=True) for path in paths]
    except OSError as error:
        raise SystemExit(f"Expected pictures alone in {folder}. Received: {error}") from None
    images = np.stack([np.asarray(image, "uint8") for image in loaded])
    is_kept = np.arange(len(images)) % 8 == 0
    return images[~is_kept], images[is_kept]


def side_by_side(images: np.ndarray, across: int) -> np.ndarray:
    """One picture of all images, `across` in a row."""
    n, height, width, channels = images.shape
    rows = images.reshape(n // across, across, height, width, channels).swapaxes(1, 2)
    return rows.reshape(n // across * height, across * width, channels)


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dataset", choices=("patches", "mnist", "cifar10"), default="patches")
    p.add_argument("--folder", type=Path, help="of pictures to learn, in place of a dataset")
    p.add_argument("--output", type=Path, default=Path("runs"), help="the folder for model and samples (default: runs)")
    p.add_argument("--mixing", choices=MIXINGS, default="aux_factored", help="of the channels (default: aux_factored)")
    p.add_argument("--epochs", type=int, default=4)
    args = p.parse_args(arguments)

    keras.utils.set_random_seed(0)
    images, validation = load_folder(args.folder) if args.folder else load(args.dataset)
    name = args.folder.resolve().name if args.folder else args.dataset
    model = Glow(images.shape[1:], levels=2, steps=2, hidden=32, mixing=args.mixing)
    model.compile(Glow.optimizer(1e-3, warmup_steps=100))
    model.initialize(images[:256])  # ActNorm starts at the mean and the deviation of data
    model.fit(images, batch_size=32, epochs=args.epochs, validation_data=(validation,), validation_batch_size=128)

    bits = model.evaluate(validation, batch_size=128, verbose=0, return_dict=True)["bits_per_dim"]
    some = validation[:32]
    z, _ = model.encode(some)
    error = np.abs(keras.ops.convert_to_numpy(model.decode(z)) - some / 255).max()
    samples = np.clip(keras.ops.convert_to_numpy(model.sample(32, seed=1, temperature=0.7)), 0, 1)
    path = args.output / f"glow-{name}-{args.mixing}.keras"
    path.parent.mkdir(parents=True, exist_ok=True)
    model.save(path)
    keras.utils.save_img(path.with_suffix(".png"), 255 * side_by_side(samples, 8), scale=False)
    print(f"\nValidation bits per dimension after {args.epochs} epochs: {bits:.3f}")
    print(f"Largest error of the inverse in {len(some)} validation images: {error:.1e}\n{path}\n{path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
