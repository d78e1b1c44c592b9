"""The data of `benchmarks.peers`: four densities in the plane, and scikit-learn's digits as 64 numbers."""

from typing import Any, NamedTuple

import numpy as np

PLANE = ("moons", "pinwheel", "checkerboard", "rings")
DENSITIES = (*PLANE, "digits")


class Data(NamedTuple):
    """Standardised vectors, and the log-determinant of that: what a log-density of them has to be given for the original ones."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    log_det: float


def load(name: str, size: int = 51_200, seed: int = 0) -> Data:
    """Points of a density. `size` is that of the training set in the plane; the digits have 11,480 with noise."""
    rng = np.random.default_rng(seed)
    parts = _digits(rng) if name == "digits" else [_draw(name, n, rng) for n in (size, 5000, 10_000)]
    mean, deviation = parts[0].mean(axis=0), parts[0].std(axis=0)
    train, validation, test = (((part - mean) / deviation).astype("float32") for part in parts)
    return Data(train, validation, test, -float(np.log(deviation).sum()))


def _draw(name: str, n: int, rng: np.random.Generator) -> np.ndarray:
    return {"moons": _moons, "pinwheel": _pinwheel, "checkerboard": _checkerboard, "rings": _rings}[name](n, rng)


def _moons(n: int, rng: np.random.Generator) -> np.ndarray:
    angle, lower = np.pi * rng.random(n), rng.integers(0, 2, n)
    x = np.where(lower, 1 - np.cos(angle), np.cos(angle))
    y = np.where(lower, 0.5 - np.sin(angle), np.sin(angle))
    return np.stack([x, y], axis=1) + 0.1 * rng.normal(size=(n, 2))


def _pinwheel(n: int, rng: np.random.Generator) -> np.ndarray:
    radius, across = 1 + 0.3 * rng.normal(size=n), 0.1 * rng.normal(size=n)
    angle = 2 * np.pi / 5 * rng.integers(0, 5, n) + 0.25 * np.exp(radius)
    turned = radius * np.cos(angle) - across * np.sin(angle), radius * np.sin(angle) + across * np.cos(angle)
    return 2 * np.stack(turned, axis=1)


def _checkerboard(n: int, rng: np.random.Generator) -> np.ndarray:
    x = 4 * rng.random(n) - 2
    y = rng.random(n) - 2 * rng.integers(0, 2, n) + np.floor(x) % 2
    return 2 * np.stack([x, y], axis=1)


def _rings(n: int, rng: np.random.Generator) -> np.ndarray:
    radius, angle = rng.integers(1, 5, n) / 4, 2 * np.pi * rng.random(n)
    return 3 * np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1) + 0.08 * rng.normal(size=(n, 2))


def _digits(rng: np.random.Generator) -> list[np.ndarray]:
    """Each of 17 values spread over its share of the line; training images eight times, with other noise."""
    from sklearn.datasets import load_digits

    images: Any = load_digits().data[np.random.default_rng(0).permutation(1797)]
    parts = np.repeat(images[:1435], 8, axis=0), images[1435:1600], images[1600:]
    return [(part + rng.random(part.shape)) / 17 for part in parts]
