"""Image data sets as NumPy arrays: scikit-learn's digits, which need no download, and TensorFlow Datasets.

Nothing here imports TensorFlow before a prepared data set has been found, so that a missing one is reported at once.
"""

import contextlib
import logging
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

DIGITS_VALIDATION = 500
# One file of each download, asked for before TensorFlow Datasets is: on a machine without a way out its retries last minutes.
TFDS_SOURCES = {
    "mnist": "https://storage.googleapis.com/cvdf-datasets/mnist/train-labels-idx1-ubyte.gz",
    "cifar10": "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
}
NAMES = ("digits", *TFDS_SOURCES)


class DataUnavailableError(Exception):
    """A data set cannot be had on this machine; the message is one sentence that says what to do."""


@dataclass(frozen=True)
class Dataset:
    """Images of shape (n, height, width, channels) with whole values 0 … `peak`, and their labels."""

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    validation_images: np.ndarray
    validation_labels: np.ndarray
    peak: int = 255

    @property
    def image_shape(self) -> tuple[int, ...]:
        return self.train_images.shape[1:]

    @property
    def dimension(self) -> int:
        return int(np.prod(self.image_shape))

    @property
    def classes(self) -> int:
        # Of both parts: a few training images may miss a class.
        return int(max(self.train_labels.max(), self.validation_labels.max())) + 1

    def limit(self, count: int | None) -> "Dataset":
        """The same data with the first `count` training images only."""
        return replace(self, train_images=self.train_images[:count], train_labels=self.train_labels[:count])

    def vectors(self) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """(x, labels) for training and for validation, x of shape (n, height·width·channels) in [0, 1]."""
        return (
            (self._flat(self.train_images), self.train_labels),
            (self._flat(self.validation_images), self.validation_labels),
        )

    def _flat(self, images: np.ndarray) -> np.ndarray:
        return images.reshape(len(images), self.dimension).astype("float32") / self.peak

    def describe(self) -> dict[str, Any]:
        """What a results file says about the data."""
        return {
            "name": self.name,
            "train": len(self.train_images),
            "validation": len(self.validation_images),
            "image_shape": list(self.image_shape),
            "classes": self.classes,
        }


def load(name: str, download: bool = True) -> Dataset:
    """Load a data set by name.

    Args:
        name: `"digits"` (1,297 training and 500 validation images of 8×8), or `"mnist"` or `"cifar10"` through TensorFlow
            Datasets, with the official test split as validation data.
        download: Whether a data set that is not on this machine may be downloaded.

    Raises:
        DataUnavailableError: Within seconds, with one sentence, when the data can be neither found nor downloaded.
    """
    if name == "digits":
        return _digits()
    if name in TFDS_SOURCES:
        return _from_tfds(name, download)
    raise ValueError(f"Unknown data set. Expected one of {', '.join(NAMES)}. Received: {name!r}")


def _digits() -> Dataset:
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise DataUnavailableError(
            "The digits come with scikit-learn, which is not installed: pip install scikit-learn matplotlib."
        ) from None
    digits = load_digits()
    images, labels = digits.images[..., None].astype("uint8"), digits.target.astype("int32")
    # The split never depends on --seed: every run of every model validates on the same images.
    x, x_val, y, y_val = train_test_split(images, labels, test_size=DIGITS_VALIDATION, random_state=0, stratify=labels)
    return Dataset("digits", x, y, x_val, y_val, peak=16)


def _from_tfds(name: str, download: bool) -> Dataset:
    advice = "use --dataset digits, which needs no download"
    try:
        with _quiet_absl():
            import tensorflow_datasets as tfds

            prepared = tfds.builder(name).is_prepared()
    except ImportError as error:
        raise DataUnavailableError(
            f"--dataset {name} needs tensorflow-datasets ({_first_line(error)}): "
            f"pip install tensorflow-datasets importlib_resources, or {advice}."
        ) from None
    except Exception as error:
        raise DataUnavailableError(f"The data set {name} could not be opened ({_first_line(error)}): {advice}.") from None
    prepare = f"python -c \"import tensorflow_datasets as t; t.load('{name}')\""
    if not prepared and not download:
        raise DataUnavailableError(
            f"The data set {name} is not in the TensorFlow Datasets folder and downloads are switched off: prepare it with "
            f"{prepare} (set TFDS_DATA_DIR if it is kept elsewhere), or {advice}."
        )
    if not prepared and not _reachable(TFDS_SOURCES[name]):
        raise DataUnavailableError(
            f"The data set {name} is not in the TensorFlow Datasets folder and its server cannot be reached: run {prepare} "
            f"on a machine with internet access, copy its folder here and set TFDS_DATA_DIR to it, or {advice}."
        )
    splits = ["train", "test"]
    try:
        with _quiet_absl():
            loaded = tfds.load(name, split=splits, batch_size=-1, as_supervised=True, download=not prepared)
            (x, y), (x_val, y_val) = tfds.as_numpy(loaded)
    # Whatever went wrong in a download (network, disk, checksum, a missing package) the user needs the reason, not the stack.
    except Exception as error:
        raise DataUnavailableError(f"The data set {name} could not be prepared ({_first_line(error)}): {advice}.") from None
    return Dataset(name, x, y.astype("int32"), x_val, y_val.astype("int32"))


def _reachable(url: str, seconds: float = 6.0) -> bool:
    """Whether a server answers within a few seconds, asked through the proxy if one is set."""
    answers: list[int] = []

    def ask() -> None:
        request = urllib.request.Request(url, method="HEAD")
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=seconds) as response:
            answers.append(response.status)

    # In a thread, because the time-out of a request does not cover the look-up of its host name.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answers)


@contextlib.contextmanager
def _quiet_absl() -> Iterator[None]:
    """Without TensorFlow Datasets' warning about a folder it has just made."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    # A path in a message is nobody's business but this machine's.
    return lines[0].replace(str(Path.home()), "~").rstrip(".") if lines else type(error).__name__
