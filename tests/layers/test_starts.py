"""Every layer takes every orthogonal start, and refuses a start that never trains."""

import keras
import numpy as np
import pytest

from keras_auxref import initializers
from keras_auxref.flows import InvertibleDense
from keras_auxref.layers import AuxReflection, OrthogonalDense, OrthogonalRNNCell, SVDDense
from tests.support import orthogonal, pairwise, relative

D = 6
LAYERS = {
    "free": lambda start, dtype: AuxReflection(kernel_initializer=start, dtype=dtype),
    "relaxed_cayley": lambda start, dtype: AuxReflection("relaxed_cayley", kernel_initializer=start, dtype=dtype),
    "householder": lambda start, dtype: OrthogonalDense(kernel_initializer=start, dtype=dtype),
    "cayley": lambda start, dtype: OrthogonalDense("cayley", kernel_initializer=start, dtype=dtype),
    "exp": lambda start, dtype: OrthogonalDense("exp", kernel_initializer=start, dtype=dtype),
    "dense": lambda start, dtype: InvertibleDense(kernel_initializer=start, dtype=dtype),
    "cell": lambda start, dtype: OrthogonalRNNCell(D, recurrent_initializer=start, dtype=dtype),
}
Q = orthogonal(D, np.random.default_rng(3), determinant=1)  # of even dimension: no eigenvalue 1 or −1
STARTS = {
    "base class": initializers.FixedPointFree(seed=1),
    "rotations": initializers.Henaff(seed=1),
    "reflection of": initializers.ReflectionOf(initializers.FixedPointFree(seed=1)),
    "keras": keras.initializers.Orthogonal(seed=1),
    "name": "fixed_point_free",
    "array": Q,
    "tensor": keras.ops.convert_to_tensor(Q),
}


def _matrix(layer):
    """The map of a layer that is linear at its start."""
    if isinstance(layer, OrthogonalRNNCell):
        layer = layer.transition_map
    return np.asarray(layer(np.eye(D, dtype="float32")), np.float64).T


def _expected(start):
    """The orthogonal matrix that a start means, where it is not random."""
    if isinstance(start, initializers.ReflectionOf):
        start = start.orthogonal
    return np.asarray(start((D, D)) if callable(start) else start, np.float64)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", LAYERS)
def test_starts_there(name, start):
    layer = LAYERS[name](STARTS[start], "float32")
    layer.build((None, D))
    matrix = _matrix(layer)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(D), atol=2e-5)
    if "name" not in start:
        assert relative(matrix, _expected(STARTS[start])) < 2e-5
    again = type(layer).from_config(layer.get_config())
    again.build((None, D))
    if "name" not in start:
        np.testing.assert_allclose(_matrix(again), matrix, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "dtype", "start"),
    pairwise(LAYERS, ["float16", "bfloat16", "mixed_float16", "mixed_bfloat16", "float64"], ["base class", "array"]),
)
def test_starts_there_in_every_precision(name, start, dtype):
    layer = LAYERS[name](STARTS[start], dtype)
    layer.build((None, D))
    accuracy = {"float16": 0.02, "bfloat16": 0.15, "float64": 1e-6}[dtype.removeprefix("mixed_")]
    assert np.abs(_matrix(layer) - _expected(STARTS[start])).max() < accuracy


def test_svd_starts_both_of_its_maps_there():
    layer = SVDDense(kernel_initializer=initializers.FixedPointFree(seed=1))
    layer.build((None, D))
    for part in (layer.u, layer.v):
        assert relative(_matrix(part), _expected(STARTS["base class"])) < 1e-5


@pytest.mark.parametrize("start", [initializers.FixedPointFree(), initializers.ReflectionOf("orthogonal"), Q])
def test_a_symmetric_kernel_refuses_what_it_cannot_be(start):
    with pytest.raises(ValueError, match=r"Expected an initializer for V. Received: "):
        AuxReflection("spectral", kernel_initializer=start).build((None, D))


@pytest.mark.parametrize(
    "layer",
    [
        AuxReflection(kernel_initializer="zeros"),
        AuxReflection("spectral", kernel_initializer="zeros"),
        AuxReflection(kernel_initializer=initializers.ReflectionOf("identity")),
        OrthogonalDense(kernel_initializer="zeros"),
        OrthogonalDense(reflections=2, kernel_initializer=lambda shape, dtype=None: keras.ops.eye(*shape, k=-5, dtype=dtype)),
        SVDDense(kernel_initializer="zeros"),
        SVDDense(map="householder", kernel_initializer="zeros"),
        OrthogonalRNNCell(D, recurrent_initializer="zeros"),
        OrthogonalRNNCell(D, recurrent_initializer="identity"),
        OrthogonalRNNCell(D, "householder", recurrent_initializer="zeros"),
    ],
)
def test_zeros_that_never_train_are_refused(layer):
    with pytest.raises(ValueError, match=r"never train.*Received: .*zero"):
        layer.build((None, D))


@pytest.mark.parametrize("map", ["cayley", "exp"])
def test_zeros_that_train_are_a_start_at_the_identity(map):
    layer = OrthogonalDense(map, kernel_initializer="zeros")
    layer.build((None, D))
    np.testing.assert_allclose(layer.matrix, np.eye(D), atol=1e-6)


def test_in_one_dimension_there_is_nothing_to_train():
    AuxReflection(kernel_initializer="zeros").build((None, 1))
    OrthogonalRNNCell(1).build((None, 3))
