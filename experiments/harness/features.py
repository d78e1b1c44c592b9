"""How near samples are to images, by the features of a small classifier: kernel distance, precision and recall."""

from typing import Any

import numpy as np

FEATURES = 64


def classifier(image_shape: tuple[int, ...], classes: int) -> Any:
    """A small convolutional classifier of images in [0, 1]; its last hidden layer, `features`, has 64 entries."""
    import keras

    layers = keras.layers
    inputs = outputs = keras.Input(image_shape)
    for channels in (16, 32):
        outputs = layers.Conv2D(channels, 3, padding="same", activation="relu")(outputs)
        outputs = layers.MaxPooling2D()(outputs)
    outputs = layers.Dense(FEATURES, activation="relu", name="features")(layers.Flatten()(outputs))
    model = keras.Model(inputs, layers.Dense(classes)(outputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def features_of(model: Any, images: np.ndarray) -> np.ndarray:
    """The features of images in [0, 1], of shape (n, 64)."""
    import keras

    inner = keras.Model(model.inputs, model.get_layer("features").output)
    return np.asarray(inner.predict(images.astype("float32"), batch_size=250, verbose=0), "float64")


def kernel_distance(x: np.ndarray, y: np.ndarray) -> float:
    """The unbiased estimate of the squared maximum mean discrepancy with the kernel k(a, b) = (aᵀb/d + 1)³.

        Σ_{i≠j} k(xᵢ, xⱼ)/(n(n − 1)) + Σ_{i≠j} k(yᵢ, yⱼ)/(m(m − 1)) − 2 Σ k(xᵢ, yⱼ)/(nm)

    0 on average for samples of one distribution, and then as often negative. Reference: Bińkowski, Sutherland, Arbel & Gretton,
    "Demystifying MMD GANs", ICLR 2018.
    """
    d = x.shape[1]

    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a @ b.T / d + 1) ** 3

    def within(a: np.ndarray) -> float:
        values = kernel(a, a)
        return (values.sum() - np.trace(values)) / (len(a) * (len(a) - 1))

    return float(within(x) + within(y) - 2 * kernel(x, y).mean())


def precision_and_recall(real: np.ndarray, made: np.ndarray, neighbours: int = 3) -> tuple[float, float]:
    """The share of samples among the real points, and of real points among the samples.

    A point is among others where it lies in a ball about one of them, whose radius is the distance of that one to its third
    neighbour. Reference: Kynkäänniemi, Karras, Laine, Lehtinen & Aila, "Improved Precision and Recall Metric for Assessing
    Generative Models", NeurIPS 2019.
    """

    def among(points: np.ndarray, others: np.ndarray) -> float:
        radii = np.sort(_distances(others, others), axis=1)[:, neighbours]  # the nearest is the point itself
        return float((_distances(points, others) <= radii).any(axis=1).mean())

    return among(made, real), among(real, made)


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    squares = np.square(a).sum(1)[:, None] + np.square(b).sum(1) - 2 * a @ b.T
    return np.sqrt(np.maximum(squares, 0))
