"""Image data sets as NumPy arrays: two that ship with scikit-learn and need no download, and TensorFlow Datasets.

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

from experiments.harness.notices import silenced

DIGITS_VALIDATION = 500
PATCH, PATCH_TILE = 32, 64
# One file of each download, asked for before TensorFlow Datasets is: on a machine without a way out its retries last minutes.
TFDS_SOURCES = {
    "mnist": "https://storage.googleapis.com/cvdf-datasets/mnist/train-labels-idx1-ubyte.gz",
    "cifar10": "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
}
NAMES = ("digits", "patches", *TFDS_SOURCES)


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

    def resized(self, size: int | None) -> "Dataset":
        """The same data with images of size × size: means over squares of pixels, rounded back to whole values."""
        height, width, _ = self.image_shape
        if size in (None, height) and height == width:
            return self
        if size is None or height != width or size < 1 or height % size:
            raise ValueError(f"Cannot average squares of pixels. Expected a divisor of {height} and {width}. Received: {size}")
        images = (_averaged(part, height // size) for part in (self.train_images, self.validation_images))
        return replace(self, **dict(zip(("train_images", "validation_images"), images, strict=True)))

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


def _averaged(images: np.ndarray, factor: int) -> np.ndarray:
    total = sum(images[:, i::factor, j::factor].astype("uint32") for i in range(factor) for j in range(factor))
    # Halves go up and not to the even value, as `np.round` has it: then even values would be more frequent than odd ones.
    return ((2 * total + factor**2) // (2 * factor**2)).astype(images.dtype)


def load(name: str, download: bool = True, instead: str = "digits") -> Dataset:
    """Load a data set by name.

    Args:
        name: `"digits"` (1,297 training and 500 validation images of 8×8) or `"patches"` (32×32 in colour, see `_patches`), or
            `"mnist"` or `"cifar10"` through TensorFlow Datasets, with the official test split as validation data.
        download: Whether a data set that is not on this machine may be downloaded.
        instead: The data set without download that an error message recommends.

    Raises:
        DataUnavailableError: Within seconds, with one sentence, when the data can be neither found nor downloaded.
    """
    if name == "digits":
        return _digits()
    if name == "patches":
        return _patches()
    if name in TFDS_SOURCES:
        return _from_tfds(name, download, instead)
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


def _patches() -> Dataset:
    """Patches of 32×32 pixels of scikit-learn's two photographs, in a fixed random order, labelled by their photograph.

    The photographs are cut into squares of 64×64 pixels, of which every fifth is kept for validation. Training patches lie at
    every fourth pixel and touch none of these squares, so that no pixel is in both parts.
    """
    parts: dict[bool, list[tuple[np.ndarray, int]]] = {True: [], False: []}
    for label, photograph in enumerate(_photographs()):
        rows, columns = (np.arange(n) // PATCH_TILE for n in photograph.shape[:2])
        held_out = (3 * rows[:, None] + columns[None, :] + label) % 5 == 0
        for training, stride in ((True, 4), (False, 16)):
            allowed = ~held_out if training else held_out
            for top in range(0, photograph.shape[0] - PATCH + 1, stride):
                for left in range(0, photograph.shape[1] - PATCH + 1, stride):
                    window = slice(top, top + PATCH), slice(left, left + PATCH)
                    if allowed[window].all():
                        parts[training].append((photograph[window], label))
    arrays = []
    for chosen in parts.values():
        order = np.random.default_rng(0).permutation(len(chosen))
        arrays += [np.stack([chosen[i][0] for i in order]), np.array([chosen[i][1] for i in order], "int32")]
    return Dataset("patches", *arrays)


def _photographs() -> list[np.ndarray]:
    try:
        from sklearn.datasets import load_sample_images

        return list(load_sample_images().images)
    except ImportError:
        raise DataUnavailableError(
            "The photographs come with scikit-learn, and Pillow reads them: pip install scikit-learn Pillow matplotlib."
        ) from None


def _from_tfds(name: str, download: bool, instead: str) -> Dataset:
    advice = f"use --dataset {instead}, which needs no download"
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
            with silenced():
                import tensorflow  # noqa: F401
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
