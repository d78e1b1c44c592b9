"""Initial values: orthogonal matrices, and the W for which the auxiliary reflection starts as one of them."""

import math
import random
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_auxref.ops._checks import check_orthogonal

PACKAGE = "keras_auxref"


def _square(shape: Any, name: str) -> int:
    shape = tuple(shape)
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"{name} makes a square matrix. Expected a shape (d, d). Received: {shape}")
    return int(shape[0])


def _floating(dtype: Any) -> str:
    return keras.backend.standardize_dtype(dtype or keras.config.floatx())


def outside_graphs() -> AbstractContextManager[Any]:
    """The scope in which initial values are numbers and not nodes of the graph being traced."""
    if keras.backend.backend() != "tensorflow":
        return nullcontext()
    import tensorflow as tf

    return tf.init_scope()


@keras.saving.register_keras_serializable(PACKAGE)
class UniformFanIn(keras.initializers.RandomUniform):
    """The paper's start: W_ij ~ U(−1/√d, 1/√d), d the size of the last axis.

    Args:
        seed: Integer, `keras.random.SeedGenerator` or None.
    """

    def __init__(self, seed: Any = None) -> None:
        super().__init__(seed=seed)

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        limit = 1 / math.sqrt(shape[-1])
        return keras.random.uniform(shape, -limit, limit, dtype=_floating(dtype), seed=self.seed)

    def get_config(self) -> dict[str, Any]:
        return {"seed": super().get_config()["seed"]}


class _RotationBlocks(keras.initializers.Initializer):
    """A block-diagonal orthogonal matrix of ⌊d/2⌋ random planar rotations, and a 1 where d is odd."""

    def __init__(self, seed: int | None = None) -> None:
        # Python's generator, as in Keras, so that `keras.utils.set_random_seed` governs it.
        self.seed = random.randint(1, 2**31 - 1) if seed is None else seed

    def angles(self, generator: np.random.Generator, count: int) -> np.ndarray:
        raise NotImplementedError

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        d = _square(shape, type(self).__name__)
        angles = self.angles(np.random.default_rng(self.seed), d // 2)
        matrix = np.eye(d)
        even, odd = np.arange(0, d - 1, 2), np.arange(1, d, 2)
        matrix[even, even] = matrix[odd, odd] = np.cos(angles)
        matrix[odd, even], matrix[even, odd] = np.sin(angles), -np.sin(angles)
        return ops.convert_to_tensor(matrix, dtype=_floating(dtype))

    def get_config(self) -> dict[str, Any]:
        return {"seed": self.seed}


@keras.saving.register_keras_serializable(PACKAGE)
class Cayley(_RotationBlocks):
    """The orthogonal start of expRNN: Cayley transforms of 2×2 skew blocks with entries s = √((1 − cos t)/(1 + cos t)).

    With t ~ U(0, π/2), s = tan(t/2) and (I − sJ)(I + sJ)⁻¹ turns its plane by −2 atan(s) = −t.

    Args:
        seed: Integer or None. The same seed gives the same matrix, in every dtype.

    Reference: Lezcano-Casado & Martínez-Rubio, "Cheap Orthogonal Constraints in Neural Networks", ICML 2019.
    """

    def angles(self, generator: np.random.Generator, count: int) -> np.ndarray:
        return -generator.uniform(0, math.pi / 2, count)


@keras.saving.register_keras_serializable(PACKAGE)
class Henaff(_RotationBlocks):
    """The orthogonal start of Henaff et al.: exp of 2×2 skew blocks with entries U(−π, π), that is uniform rotations.

    Args:
        seed: Integer or None. The same seed gives the same matrix, in every dtype.

    Reference: Henaff, Szlam & LeCun, "Recurrent Orthogonal Networks and Long-Memory Tasks", ICML 2016.
    """

    def angles(self, generator: np.random.Generator, count: int) -> np.ndarray:
        return generator.uniform(-math.pi, math.pi, count)


@keras.saving.register_keras_serializable(PACKAGE)
class FixedPointFree(keras.initializers.Initializer):
    """A random orthogonal matrix Q that moves every vector: uniform among those with det Q = (−1)ᵈ.

    With the other determinant every orthogonal matrix has the eigenvalue 1. Without it W = I − Q is invertible, f(x) = Q x has
    one preimage for every vector, and keeps one for every W nearby.

    Args:
        seed: Integer or None. The same seed gives the same matrix, in every dtype.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = random.randint(1, 2**31 - 1) if seed is None else seed

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        d = _square(shape, "FixedPointFree")
        q, r = np.linalg.qr(np.random.default_rng(self.seed).normal(size=(d, d)))
        q = q * np.sign(np.diag(r))
        if np.linalg.slogdet(q)[0] != (-1) ** d:
            q[:, 0] = -q[:, 0]
        return ops.convert_to_tensor(q, dtype=_floating(dtype))

    def get_config(self) -> dict[str, Any]:
        return {"seed": self.seed}


@keras.saving.register_keras_serializable(PACKAGE)
class ReflectionOf(keras.initializers.Initializer):
    """W = I − U: the auxiliary reflection starts as x ↦ U x (Theorem 1 of the paper).

    Args:
        orthogonal: An orthogonal matrix as an array, or an initializer that makes one (an instance, or a Keras name such as
            `"orthogonal"`).

    Example:
    >>> import keras_auxref
    >>> start = ReflectionOf(keras_auxref.initializers.Cayley(seed=0))
    >>> layer = keras_auxref.AuxReflection(kernel_initializer=start)
    """

    def __init__(self, orthogonal: Any = "orthogonal") -> None:
        if isinstance(orthogonal, dict | str) or callable(orthogonal):
            self.orthogonal = keras.initializers.get(orthogonal)
        else:
            self.orthogonal = np.asarray(ops.convert_to_numpy(orthogonal))
            check_orthogonal(self.orthogonal)

    def matrix(self, shape: Any, dtype: Any = None) -> Any:
        """U."""
        return orthogonal_matrix(self.orthogonal, _square(shape, "ReflectionOf"), _floating(dtype))

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        matrix = self.matrix(shape, dtype)
        return ops.eye(matrix.shape[0], dtype=matrix.dtype) - matrix

    def get_config(self) -> dict[str, Any]:
        is_array = isinstance(self.orthogonal, np.ndarray)
        return {"orthogonal": self.orthogonal.tolist() if is_array else keras.initializers.serialize(self.orthogonal)}


def orthogonal_matrix(source: Any, d: int, dtype: str) -> Any:
    """An orthogonal d×d matrix from an array or an initializer, checked."""
    matrix = source if isinstance(source, np.ndarray) else source((d, d), dtype=dtype)
    if tuple(matrix.shape) != (d, d):
        raise ValueError(
            f"The orthogonal matrix does not fit the layer. Expected shape {(d, d)}. Received: {tuple(matrix.shape)}"
        )
    check_orthogonal(ops.convert_to_numpy(matrix))
    return ops.convert_to_tensor(matrix, dtype=dtype)
