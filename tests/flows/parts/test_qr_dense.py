"""QRDense: y = Q R x, or R f(x) with a factored reflection f."""

import keras
import numpy as np
import pytest

from keras_auxref.flows import QRDense
from tests.support import orthogonal, relative


def _moved(rng, rotation="householder", dtype="float64"):
    layer = QRDense(rotation, dtype=dtype)
    layer.build((None, 4))
    for weight in layer.trainable_weights:
        weight.assign_add(0.4 * rng.normal(size=weight.shape))
    return layer


def test_is_the_product_of_an_orthogonal_and_a_triangular_matrix(rng):
    layer = _moved(rng)
    w = np.asarray(layer(np.eye(4))).T
    q, r = np.linalg.qr(w)
    q, r = q * np.sign(np.diag(r)), r * np.sign(np.diag(r))[:, None]  # the one with a positive diagonal
    np.testing.assert_allclose(layer.rotate.matrix, q, atol=1e-10)
    np.testing.assert_allclose(layer.triangle, r, atol=1e-10)
    np.testing.assert_allclose(layer.log_det_jacobian(np.ones((1, 4))), [np.linalg.slogdet(w)[1]], rtol=1e-10)
    assert layer.certificate().condition == pytest.approx(np.linalg.cond(w))


@pytest.mark.parametrize("rotation", ["householder", "factored"])
def test_starts_as_the_orthogonal_map(rng, rotation):
    q = orthogonal(4, rng, determinant=1)
    layer, x = QRDense(rotation, kernel_initializer=q, dtype="float64"), rng.normal(size=(5, 4))
    assert relative(layer(x), x @ q.T) < 1e-6


def test_the_reflection_comes_before_the_triangle(rng):
    layer, x = _moved(rng, "factored"), rng.normal(size=(5, 4))
    np.testing.assert_allclose(layer(x), np.asarray(layer.rotate(x)) @ np.asarray(layer.triangle).T, atol=1e-12)


@pytest.mark.parametrize("rotation", ["householder", "factored"])
def test_half_precision_works_in_float32(rng, rotation):
    layer, x = QRDense(rotation, dtype="mixed_bfloat16"), rng.normal(size=(5, 4)).astype("float32")
    y = layer(x)
    assert keras.backend.standardize_dtype(y.dtype) == "bfloat16"
    assert np.abs(np.asarray(layer.inverse(y), np.float64) - x).max() < 0.1
    assert layer.certificate().invertible


@pytest.mark.parametrize("value", [np.nan, 1e4, -1e4])
def test_a_diagonal_that_is_no_number_is_not_certified(rng, value):
    layer = _moved(rng)
    layer.log_diagonal.assign([0, 0, value, 0])
    assert not layer.certificate().invertible


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rotation": "givens"}, r"Expected one of \['householder', 'factored'\]. Received: 'givens'"),
        ({"rotation": "factored", "reflections": 2}, 'Expected rotation="householder"'),
        ({"dtype": "int32"}, "floating-point"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        QRDense(**arguments)


def test_in_one_dimension_it_is_a_scale():
    layer = QRDense(dtype="float64")
    layer.build((None, 1))
    layer.log_diagonal.assign([np.log(3.0)])
    np.testing.assert_allclose(np.abs(layer(np.array([[2.0]]))), [[6.0]])
    np.testing.assert_allclose(layer.inverse(layer(np.array([[2.0]]))), [[2.0]])
    assert layer.certificate().invertible


def test_has_as_many_weights_as_a_matrix_beside_its_rotation(rng):
    layer = _moved(rng)
    assert layer.count_params() - layer.rotate.count_params() == 4 * 5 // 2
