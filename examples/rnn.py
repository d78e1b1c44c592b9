"""A recurrent network that reads an image one pixel at a time: h' = modrelu(T(h) + V x + b) with ‖T(h)‖ = ‖h‖.

    python examples/rnn.py                              scikit-learn's digits, 64 pixels: half a minute on two CPU cores
    python examples/rnn.py --transition householder     T an orthogonal matrix, a product of Householder reflections
    python examples/rnn.py --transition lstm            Keras' LSTM of the same size in its place
    python examples/rnn.py --dataset mnist --epochs 6   784 pixels, which Keras downloads: hours without a GPU

Trains with `fit`, prints the validation error and saves the model. A transition that keeps norms neither forgets the first pixels
nor lets gradients explode.
"""

import argparse
from pathlib import Path

import quiet  # noqa: F401  Keras without TensorFlow's start-up notices

import keras
import numpy as np

from keras_auxref import OrthogonalRNN

HIDDEN = 170
Part = tuple[np.ndarray, np.ndarray]


def load(name: str) -> tuple[Part, Part]:
    """(sequences, labels) for training and for validation; a sequence has one number in [0, 1] per step."""
    if name == "mnist":
        train, validation = keras.datasets.mnist.load_data()
    else:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images, labels = digits.images * (255 / 16), digits.target
        train, validation = (images[:-500], labels[:-500]), (images[-500:], labels[-500:])
    return sequences(*train), sequences(*validation)


def sequences(images: np.ndarray, labels: np.ndarray) -> Part:
    return images.reshape(len(images), -1, 1).astype("float32") / 255, labels.astype("int32")


def build(transition: str, steps: int) -> keras.Sequential:
    """The class is read off the last state."""
    layer = keras.layers.LSTM(HIDDEN) if transition == "lstm" else OrthogonalRNN(HIDDEN, transition)
    return keras.Sequential([keras.Input((steps, 1)), layer, keras.layers.Dense(10)])


def optimizer() -> keras.optimizers.Optimizer:
    """A smaller learning rate for the transition than for the rest: every step goes through it."""
    rest, transition = keras.optimizers.RMSprop(1e-3), keras.optimizers.Adam(2e-4)
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(rest, {".*/transition/.*": transition}))


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dataset", choices=("digits", "mnist"), default="digits")
    p.add_argument("--transition", choices=("aux", "householder", "cayley", "exp", "lstm"), default="aux")
    p.add_argument("--epochs", type=int, default=15)
    args = p.parse_args(arguments)

    keras.utils.set_random_seed(0)
    (x, labels), validation = load(args.dataset)
    model = build(args.transition, x.shape[1])
    model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.fit(x, labels, batch_size=32, epochs=args.epochs, validation_data=validation)

    accuracy = model.evaluate(*validation, verbose=0, return_dict=True)["accuracy"]
    path = Path("runs", f"rnn-{args.dataset}-{args.transition}.keras")
    path.parent.mkdir(exist_ok=True)
    model.save(path)
    print(f"\nValidation error after {args.epochs} epochs: {100 * (1 - accuracy):.2f} %\n{path}")


if __name__ == "__main__":
    main()
