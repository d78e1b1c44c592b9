"""Sequences for recurrent networks: images read pixel by pixel, and the two standard tests of long memory.

The memory tests are after Hochreiter & Schmidhuber (1997), in the form of Arjovsky et al. (2016).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.harness.data import Dataset

SYMBOLS = 8
COPIED = 10
BLANK, DELIMITER = 0, SYMBOLS + 1


@dataclass(frozen=True)
class Sequences:
    """Inputs of shape (n, time, features), or whole numbers of shape (n, time), and what to answer.

    `baseline` is the loss of the best answer without any memory, where that is known.
    """

    description: dict[str, Any]
    train: tuple[np.ndarray, np.ndarray]
    validation: tuple[np.ndarray, np.ndarray]
    baseline: float | None = None

    @property
    def steps(self) -> int:
        return self.train[0].shape[1]


def pixels(dataset: Dataset, permute: bool = False) -> Sequences:
    """One pixel in [0, 1] per time step, row by row, or in a fixed random order that is the same for all images."""
    order = np.arange(dataset.dimension)
    if permute:
        # Never by --seed: the permuted task is one task.
        order = np.random.default_rng(0).permutation(dataset.dimension)
    train, validation = ((x[:, order, None], labels) for x, labels in dataset.vectors())
    return Sequences({**dataset.describe(), "permuted": permute}, train, validation)


def copying(length: int, train: int, validation: int, seed: int = 0) -> Sequences:
    """Repeat ten symbols after a pause: the standard test of memory without noise.

    Ten symbols out of eight, `length` − 1 blanks, a delimiter, and ten blanks, during which the ten symbols are to be repeated;
    before that the answer is blank. In all `length` + 20 steps. Without memory the best is blank, then any symbol: a
    cross-entropy of 10 ln 8 / (length + 20).
    """

    def sample(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        symbols = rng.integers(1, SYMBOLS + 1, (count, COPIED), dtype="uint8")
        x, y = np.full((2, count, length + 2 * COPIED), BLANK, "uint8")
        x[:, :COPIED], y[:, -COPIED:] = symbols, symbols
        x[:, COPIED + length - 1] = DELIMITER
        return x, y

    rng = np.random.default_rng([seed, length])
    description = {"name": "copying", "length": length, "train": train, "validation": validation}
    baseline = COPIED * math.log(SYMBOLS) / (length + 2 * COPIED)
    return Sequences(description, sample(train, rng), sample(validation, rng), baseline)


def adding(length: int, train: int, validation: int, seed: int = 0) -> Sequences:
    """Add the two marked of `length` numbers.

    Two features per step: a number from U(0, 1), and a mark, which is 1 for one step of each half and 0 otherwise. Without memory
    the best is to answer 1, with a mean squared error of 1/6.
    """

    def sample(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        x = np.zeros((count, length, 2), "float32")
        x[..., 0] = rng.random((count, length), dtype="float32")
        half = length // 2
        for low, high in ((0, half), (half, length)):
            x[np.arange(count), rng.integers(low, high, count), 1] = 1
        return x, np.sum(x[..., 0] * x[..., 1], axis=1, keepdims=True)

    rng = np.random.default_rng([seed, length])
    description = {"name": "adding", "length": length, "train": train, "validation": validation}
    return Sequences(description, sample(train, rng), sample(validation, rng), 1 / 6)
