"""Initial values: orthogonal matrices, and the W for which the auxiliary reflection starts as one of them."""

import math
import random
from typing import Any, TypeAlias

import keras
import numpy as np
from keras import ops

from keras_auxref.ops.backend import outside_graphs
from keras_auxref.ops.checks import HALF, check_orthogonal, check_orthonormal
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, DType, Initializer, Seed, Shape, Tensor

__all__ = ["Cayley", "FixedPointFree", "Henaff", "OrthogonalMatrix", "ReflectionOf", "SignedPermutation", "UniformFanIn", "get"]


def _square(shape: tuple[int, ...], name: str) -> int:
    shape = tuple(shape)
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"{name} makes a square matrix. Expected a shape (d, d). Received: {shape}")
    return int(shape[0])


def _floating(dtype: DType | None) -> str:
    return keras.backend.standardize_dtype(dtype or keras.config.floatx())


@keras.saving.register_keras_serializable(PACKAGE)
class UniformFanIn(keras.initializers.RandomUniform):
    """The paper's start: W_ij ~ U(−1/√d, 1/√d), d the size of the last axis.

    Args:
        seed: Integer, `keras.random.SeedGenerator` or None.

    Example:
    >>> from keras_auxref.initializers import UniformFanIn
    >>> bool(abs(UniformFanIn(seed=0)((4, 4))).numpy().max() < 0.5)
    True
    """

    def __init__(self, seed: Seed | None = None) -> None:
        super().__init__(seed=seed)

    def __call__(self, shape: tuple[int, ...], dtype: DType | None = None) -> Tensor:
        limit = 1 / math.sqrt(shape[-1])
        return keras.random.uniform(shape, -limit, limit, dtype=_floating(dtype), seed=self.seed)

    def get_config(self) -> Config:
        return {"seed": super().get_config()["seed"]}


class OrthogonalMatrix(keras.initializers.Initializer):
    """An orthogonal matrix Q: the start of every layer that is, or can be, an orthogonal map.

    A layer of this package that gets one as its initializer starts as x ↦ Q x, however its weights are parametrised. Subclasses
    override `draw`.

    Args:
        seed: Integer or None. The same seed gives the same matrix, in every dtype.

    Example:
    >>> from keras_auxref.initializers import Cayley, OrthogonalMatrix
    >>> isinstance(Cayley(), OrthogonalMatrix)
    True
    """

    def __init__(self, seed: int | None = None) -> None:
        # Python's generator, as in Keras, so that `keras.utils.set_random_seed` governs it.
        self.seed = random.randint(1, 2**31 - 1) if seed is None else seed

    def draw(self, generator: np.random.Generator, d: int) -> np.ndarray:
        """Q, of shape (d, d), in float64."""
        raise NotImplementedError

    def __call__(self, shape: tuple[int, ...], dtype: DType | None = None) -> Tensor:
        d = _square(shape, type(self).__name__)
        return ops.convert_to_tensor(self.draw(np.random.default_rng(self.seed), d), dtype=_floating(dtype))

    def get_config(self) -> Config:
        return {"seed": self.seed}


class _RotationBlocks(OrthogonalMatrix):
    """A block-diagonal orthogonal matrix of ⌊d/2⌋ random planar rotations, and a 1 where d is odd."""

    def angles(self, generator: np.random.Generator, count: int) -> np.ndarray:
        raise NotImplementedError

    def draw(self, generator: np.random.Generator, d: int) -> np.ndarray:
        angles, matrix = self.angles(generator, d // 2), np.eye(d)
        even, odd = np.arange(0, d - 1, 2), np.arange(1, d, 2)
        matrix[even, even] = matrix[odd, odd] = np.cos(angles)
        matrix[odd, even], matrix[even, odd] = np.sin(angles), -np.sin(angles)
        return matrix


@keras.saving.register_keras_serializable(PACKAGE)
class Cayley(_RotationBlocks):
    """The orthogonal start of expRNN: Cayley transforms of 2×2 skew blocks with entries s = √((1 − cos t)/(1 + cos t)).

    With t ~ U(0, π/2), s = tan(t/2) and (I − sJ)(I + sJ)⁻¹ turns its plane by −2 atan(s) = −t.

    Args:
        seed: Integer or None. The same seed gives the same matrix, in every dtype.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.initializers import Cayley
    >>> q = Cayley(seed=0)((4, 4)).numpy()
    >>> np.allclose(q @ q.T, np.eye(4), atol=1e-6)
    True

    Reference: Lezcano-Casado & Martínez-Rubio, "Cheap Orthogonal Constraints in Neural Networks", ICML 2019.
    """

    def angles(self, generator: np.random.Generator, count: int) -> np.ndarray:
        return -generator.uniform(0, math.pi / 2, count)


@keras.saving.register_keras_serializable(PACKAGE)
class Henaff(_RotationBlocks):
    """The orthogonal start of Henaff et al.: exp of 2×2 skew blocks with entries U(−π, π), that is uniform rotations.

    Args:
        seed: Integer or None. The same seed gives the same matrix, in every dtype.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.initializers import Henaff
    >>> q = Henaff(seed=0)((4, 4)).numpy()
    >>> np.allclose(q @ q.T, np.eye(4), atol=1e-6)
    True

    Reference: Henaff, Szlam & LeCun, "Recurrent Orthogonal Networks and Long-Memory Tasks", ICML 2016.
    """

    def angles(self, generator: np.random.Generator, count: int) -> np.ndarray:
        return generator.uniform(-math.pi, math.pi, count)


@keras.saving.register_keras_serializable(PACKAGE)
class FixedPointFree(OrthogonalMatrix):
    """A random orthogonal matrix Q that moves every vector: uniform among those with det Q = (−1)ᵈ.

    With the other determinant every orthogonal matrix has the eigenvalue 1. Without this eigenvalue W = I − Q is invertible, and
    f has exactly one preimage for every vector, also for every W nearby.

    Args:
        seed: Integer or None. The same seed gives the same matrix, in every dtype.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.initializers import FixedPointFree
    >>> q = FixedPointFree(seed=0)((4, 4)).numpy()
    >>> np.allclose(q @ q.T, np.eye(4), atol=1e-6)
    True
    """

    def draw(self, generator: np.random.Generator, d: int) -> np.ndarray:
        q, r = np.linalg.qr(generator.normal(size=(d, d)))
        q = q * np.sign(np.diag(r))
        if np.linalg.slogdet(q)[0] != (-1) ** d:
            q[:, 0] = -q[:, 0]
        return q


@keras.saving.register_keras_serializable(PACKAGE)
class SignedPermutation(OrthogonalMatrix):
    """A random permutation with signs that exchanges the halves of the axis and moves every vector: Q has no eigenvalue 1.

    Each entry of the first half goes to a random place in the second, and vice versa. One sign of every cycle is −1: Q to the
    power of the cycle length is −I there, so 1 is not an eigenvalue. It does not mix axes, which suits vectors whose
    entries have a meaning of their own, such as the columns of a table.

    Args:
        seed: Integer or None. The same seed gives the same matrix, in every dtype.

    Example:
    >>> from keras_auxref.initializers import SignedPermutation
    >>> print(abs(SignedPermutation(seed=0)((2, 2)).numpy()))
    [[0. 1.]
     [1. 0.]]
    """

    def draw(self, generator: np.random.Generator, d: int) -> np.ndarray:
        half = d // 2
        source = np.concatenate([half + generator.permutation(d - half), generator.permutation(half)])
        signs, seen = np.ones(d), np.zeros(d, bool)
        for first in range(d):
            signs[first] = 1 if seen[first] else -1
            while not seen[first]:
                seen[first], first = True, source[first]
        return signs[:, None] * np.eye(d)[source]


@keras.saving.register_keras_serializable(PACKAGE)
class ReflectionOf(keras.initializers.Initializer):
    """W = I − U: the auxiliary reflection starts as x ↦ U x (Theorem 1 of the paper).

    Args:
        orthogonal: An orthogonal matrix as an array, or an initializer that makes one: an instance, or a name such as
            `"orthogonal"` or `"cayley"`.

    Example:
    >>> import keras_auxref
    >>> from keras_auxref.initializers import ReflectionOf
    >>> start = ReflectionOf(keras_auxref.initializers.Cayley(seed=0))
    >>> layer = keras_auxref.AuxReflection(kernel_initializer=start)
    """

    def __init__(self, orthogonal: Initializer | np.ndarray = "orthogonal") -> None:
        if isinstance(orthogonal, dict | str) or callable(orthogonal):
            self.orthogonal = get(orthogonal)
        else:
            self.orthogonal = np.asarray(ops.convert_to_numpy(orthogonal))
            check_orthogonal(self.orthogonal)

    def __call__(self, shape: tuple[int, ...], dtype: DType | None = None) -> Tensor:
        d, dtype = _square(shape, "ReflectionOf"), _floating(dtype)
        return ops.convert_to_tensor(np.eye(d) - orthogonal_matrix(self.orthogonal, d, dtype), dtype=dtype)

    def get_config(self) -> Config:
        is_array = isinstance(self.orthogonal, np.ndarray)
        return {"orthogonal": self.orthogonal.tolist() if is_array else keras.initializers.serialize(self.orthogonal)}


@keras.saving.register_keras_serializable(PACKAGE)
class Orthonormal(keras.initializers.Initializer):
    """A given matrix with orthonormal rows or columns: the start of a rectangular `OrthogonalDense`.

    Args:
        matrix: Array of shape `(units, d)`.

    Example:
    >>> import numpy as np
    >>> import keras_auxref
    >>> start = keras_auxref.initializers.Orthonormal(np.eye(2, 5))
    >>> layer = keras_auxref.OrthogonalDense(units=2, kernel_initializer=start)
    """

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = np.asarray(ops.convert_to_numpy(matrix))
        check_orthonormal(self.matrix)

    def __call__(self, shape: Shape, dtype: DType | None = None) -> Tensor:
        if tuple(shape) != self.matrix.shape:
            raise ValueError(
                f"The orthonormal matrix does not fit the layer. Expected shape {tuple(shape)}. Received: {self.matrix.shape}"
            )
        return ops.convert_to_tensor(self.matrix, dtype=_floating(dtype))

    def get_config(self) -> Config:
        return {"matrix": self.matrix.tolist()}


Source: TypeAlias = np.ndarray | keras.initializers.Initializer
"""The source of an orthogonal matrix: the matrix itself, or an initializer."""
_NAMES: dict[str, type[OrthogonalMatrix]] = {
    "cayley": Cayley,
    "henaff": Henaff,
    "fixed_point_free": FixedPointFree,
    "signed_permutation": SignedPermutation,
}


def get(identifier: Any) -> keras.initializers.Initializer:
    """An initializer from anything that Keras accepts, from a name defined here such as "fixed_point_free", or from an array.

    A square array is an orthogonal start, `ReflectionOf(array)`; any other becomes `Orthonormal(array)`.

    Example:
    >>> from keras_auxref import initializers
    >>> type(initializers.get("cayley")).__name__
    'Cayley'
    """
    if isinstance(identifier, str) and identifier in _NAMES:
        return _NAMES[identifier]()
    if isinstance(identifier, np.ndarray) or ops.is_tensor(identifier):
        square = len(identifier.shape) != 2 or identifier.shape[0] == identifier.shape[1]
        return ReflectionOf(identifier) if square else Orthonormal(identifier)
    return keras.initializers.get(identifier)


def orthogonal_start(initializer: keras.initializers.Initializer | None) -> Source | None:
    """The source of the orthogonal matrix that an initializer stands for, or None if it makes weights.

    Orthogonal starts are an `OrthogonalMatrix`, the one inside a `ReflectionOf`, and Keras' `Orthogonal` and `Identity`; for
    a map that is not square also an `Orthonormal`.
    """
    if isinstance(initializer, ReflectionOf):
        return initializer.orthogonal
    known = (OrthogonalMatrix, Orthonormal, keras.initializers.Orthogonal, keras.initializers.Identity)
    return initializer if isinstance(initializer, known) else None


def orthogonal_matrix(source: Source, d: int, dtype: str) -> np.ndarray:
    """An orthogonal d×d matrix from an array or an initializer, checked, in float64. For half precision it is made in float32."""
    if isinstance(source, np.ndarray):
        matrix = source
    else:
        with outside_graphs():  # a model may be built while its training step is traced
            matrix = ops.convert_to_numpy(source((d, d), dtype="float32" if dtype in HALF else dtype))
    if matrix.shape != (d, d):
        raise ValueError(f"The orthogonal matrix does not fit the layer. Expected shape {(d, d)}. Received: {matrix.shape}")
    check_orthogonal(matrix)
    return matrix.astype(np.float64)


def orthonormal_matrix(source: Source, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """A matrix with orthonormal rows or columns from an array or an initializer, checked, in float64.

    If the initializer makes square matrices, the first rows or columns.
    """
    if isinstance(source, OrthogonalMatrix):
        return orthogonal_matrix(source, max(shape), dtype)[: shape[0], : shape[1]]
    maker = Orthonormal(source) if isinstance(source, np.ndarray) else source
    with outside_graphs():
        matrix = np.asarray(ops.convert_to_numpy(maker(shape, dtype="float32" if dtype in HALF else dtype)))
    check_orthonormal(matrix)
    return matrix.astype(np.float64)
