"""The registry of bijectors: a new one is tested by adding one line to CASES."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_auxref import bijectors, flows, layers
from tests.support import certified, orthogonal


class Case(NamedTuple):
    """A constructor from a random generator and a dtype, and the shape of an event."""

    name: str
    make: Callable[[np.random.Generator, str], Any]
    event: tuple[int, ...]


def variable(rng: np.random.Generator, dtype: str, *shape: int) -> tf.Variable:
    return tf.Variable(rng.normal(size=shape), dtype=dtype)


def _aux(rng: np.random.Generator, dtype: str) -> Any:
    return bijectors.AuxReflection(tf.Variable(certified(4, 1.4, 1.0, rng), dtype=dtype))


def _relaxed_cayley(rng: np.random.Generator, dtype: str) -> Any:
    weights = {"symmetric": variable(rng, dtype, 4, 4), "skew": variable(rng, dtype, 4, 4)}
    return bijectors.AuxReflection(weights, kernel="relaxed_cayley")


def _factored(rng: np.random.Generator, dtype: str) -> Any:
    u, v = (tf.constant(orthogonal(4, rng), dtype) for _ in range(2))
    return bijectors.FactoredReflection(u, v, tf.Variable(rng.uniform(1, 1.7, 4), dtype=dtype))


def _sylvester(rng: np.random.Generator, dtype: str) -> Any:
    r, r_tilde = (tf.Variable(np.triu(np.tanh(rng.normal(size=(3, 3)))), dtype=dtype) for _ in range(2))
    return bijectors.Sylvester(r, r_tilde, variable(rng, dtype, 3), tf.constant(orthogonal(4, rng)[:, :3], dtype))


def _act_norm(rng: np.random.Generator, dtype: str) -> Any:
    return bijectors.ActNorm(variable(rng, dtype, 3), variable(rng, dtype, 3))


def _dense_coupling(rng: np.random.Generator, dtype: str) -> Any:
    network = keras.layers.Dense(6, activation="tanh", dtype=dtype)
    network.build((None, 2))
    return bijectors.AffineCoupling(network)


def _image_coupling(rng: np.random.Generator, dtype: str) -> Any:
    inputs = keras.Input((3, 2, 1), dtype=dtype)
    return bijectors.AffineCoupling(keras.Model(inputs, keras.layers.Conv2D(4, 3, padding="same", dtype=dtype)(inputs)))


def _view(layer: type, shape: tuple[int, ...], *args: Any) -> Callable[[np.random.Generator, str], Any]:
    def make(rng: np.random.Generator, dtype: str) -> Any:
        instance = layer(*args, dtype=dtype)
        instance.build((None, *shape))
        for weight in instance.trainable_weights:
            weight.assign_add(0.1 * rng.normal(size=weight.shape))
        return instance.bijector()

    return make


CASES = [
    Case("aux", _aux, (4,)),
    Case("aux_spectral", lambda rng, dtype: bijectors.AuxReflection(variable(rng, dtype, 4, 4), "spectral"), (4,)),
    Case("aux_relaxed_cayley", _relaxed_cayley, (4,)),
    Case("factored", _factored, (4,)),
    Case("householder", lambda rng, dtype: bijectors.Householder(variable(rng, dtype, 5, 3)), (5,)),
    Case("sylvester", _sylvester, (4,)),
    Case("act_norm", _act_norm, (3,)),
    Case("squeeze", lambda rng, dtype: bijectors.Squeeze(), (2, 4, 1)),
    Case("squeeze_3", lambda rng, dtype: bijectors.Squeeze(3), (3, 3, 2)),
    Case("coupling", _dense_coupling, (5,)),
    Case("coupling_image", _image_coupling, (3, 2, 3)),
    # All views are of one class: a vector, an image, and a shape that changes. tests/layers/test_invertible.py has every layer.
    Case("view_factored", _view(layers.FactoredReflection, (4,)), (4,)),
    Case("view_coupling_image", _view(flows.AffineCoupling, (2, 3, 2)), (2, 3, 2)),
    Case("view_squeeze", _view(flows.Squeeze, (2, 2, 3)), (2, 2, 3)),
]


class Batch(NamedTuple):
    """A constructor from parameters by name; the shape of each, and the size of a vector."""

    name: str
    make: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]
    d: int

    def parameters(self, rng: np.random.Generator, batch: tuple[int, ...], dtype: str = "float64") -> dict[str, np.ndarray]:
        """Random ones of any batch shape: W not far from the identity, orthogonal matrices and positive eigenvalues."""

        def value(name: str, noise: np.ndarray) -> np.ndarray:
            if name == "w":
                return np.eye(self.d) + noise
            if name in ("u", "v"):
                return np.linalg.qr(noise)[0]
            return 1.3 + noise if name == "eigenvalues" else noise

        values = {name: value(name, 0.1 * rng.normal(size=(*batch, *shape))) for name, shape in self.shapes.items()}
        return {name: value.astype(dtype) for name, value in values.items()}


def _relaxed_cayley_of(symmetric: Any, skew: Any) -> Any:
    return bijectors.AuxReflection({"symmetric": symmetric, "skew": skew}, "relaxed_cayley")


BATCHES = [
    Batch("aux", bijectors.AuxReflection, {"w": (3, 3)}, 3),
    Batch("aux_spectral", lambda w: bijectors.AuxReflection(w, "spectral"), {"w": (3, 3)}, 3),
    Batch("aux_relaxed_cayley", _relaxed_cayley_of, {"symmetric": (3, 3), "skew": (3, 3)}, 3),
    Batch("factored", bijectors.FactoredReflection, {"u": (3, 3), "v": (3, 3), "eigenvalues": (3,)}, 3),
    Batch("householder", bijectors.Householder, {"v": (3, 2)}, 3),
    Batch("sylvester", bijectors.Sylvester, {"r": (3, 3), "r_tilde": (3, 3), "b": (3,)}, 3),
    Batch("act_norm", bijectors.ActNorm, {"shift": (3,), "log_scale": (3,)}, 3),
]
TRAINABLE = [case for case in CASES if "squeeze" not in case.name]


# What "aux" traces, the inverse of any W, its twins would only trace again: seconds each time.
TRACED = [case for case in CASES if case.name not in ("aux_relaxed_cayley", "aux_spectral")]
