"""A classifier of digits whose linear maps are y = U Σ Vᵀ x, with one auxiliary reflection for each of U and V.

    python examples/fcnn.py                        scikit-learn's digits, without a download: half a minute on two CPU cores
    python examples/fcnn.py --map householder      orthogonal U and V, as products of d Householder reflections
    python examples/fcnn.py --dataset mnist        28×28 pixels, which Keras downloads

Trains with `fit`, prints the validation error and saves the model, for examples/export.py and examples/serve.py.
"""

import argparse
from pathlib import Path

import quiet  # noqa: F401  Keras without TensorFlow's start-up notices

import keras
import numpy as np

from keras_auxref import SVDDense

Part = tuple[np.ndarray, np.ndarray]


def load(name: str) -> tuple[Part, Part]:
    """(images, labels) for training and for validation; an image is a vector with values in [0, 1]."""
    if name == "mnist":
        train, validation = keras.datasets.mnist.load_data()
    else:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images, labels = digits.images * (255 / 16), digits.target
        train, validation = (images[:-500], labels[:-500]), (images[-500:], labels[-500:])
    return flat(*train), flat(*validation)


def flat(images: np.ndarray, labels: np.ndarray) -> Part:
    return images.reshape(len(images), -1).astype("float32") / 255, labels.astype("int32")


def build(orthogonal_map: str, dimension: int) -> keras.Sequential:
    """Three layers of the width of the input and a Dense layer for the ten classes, as in the paper."""
    layers = [SVDDense(map=orthogonal_map, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((dimension,)), *layers, keras.layers.Dense(10)])


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dataset", choices=("digits", "mnist"), default="digits")
    p.add_argument("--map", choices=("aux", "householder", "cayley", "exp"), default="aux", help="of U and V (default: aux)")
    p.add_argument("--epochs", type=int, default=20)
    args = p.parse_args(arguments)

    keras.utils.set_random_seed(0)
    (x, labels), validation = load(args.dataset)
    model = build(args.map, x.shape[-1])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.fit(x, labels, batch_size=32, epochs=args.epochs, validation_data=validation)

    accuracy = model.evaluate(*validation, verbose=0, return_dict=True)["accuracy"]
    path = Path("runs", f"fcnn-{args.dataset}-{args.map}.keras")
    path.parent.mkdir(exist_ok=True)
    model.save(path)
    print(f"\nValidation error after {args.epochs} epochs: {100 * (1 - accuracy):.2f} %\n{path}")


if __name__ == "__main__":
    main()
