"""ReflectedDense: y = B g(Vᵀx), a reflection before a convolution."""

import keras
import numpy as np
import pytest

from keras_auxref import FactoredReflection
from keras_auxref.flows import InvertibleDense, ReflectedDense
from tests.support import orthogonal, reflect


def _moved(rng, map="householder"):
    layer = ReflectedDense(map, dtype="float64")
    layer.build((None, 4))
    for weight in layer.trainable_weights:
        weight.assign_add(0.1 * rng.normal(size=weight.shape))
    return layer


@pytest.mark.parametrize("map", ["cayley", "householder"])
def test_is_a_matrix_after_the_reflection_of_the_paper(rng, map):
    """With W = VΛVᵀ: g(Vᵀx) = −Vᵀ H(Wx) x."""
    layer, x = _moved(rng, map), rng.normal(size=(6, 4))
    b, v, w = (np.asarray(t) for t in (layer.dense.matrix, layer.reflection.right, layer.reflection.kernel))
    np.testing.assert_allclose(layer(x), -reflect(x, w) @ v @ b.T, atol=1e-12)
    values = np.linalg.eigvalsh(w)
    assert 1.05 < values[-1] / values[0] < 2  # the reflection is not a linear map here


@pytest.mark.parametrize("map", ["cayley", "householder"])
def test_an_odd_size_starts_as_it_is_told(rng, map):
    q, x = orthogonal(3, rng), rng.normal(size=(5, 3))
    layer = ReflectedDense(map, kernel_initializer=q, dtype="float64")
    np.testing.assert_allclose(layer(x), x @ q.T, atol=1e-12)
    vectors = np.asarray(layer.reflection.right_map.kernel)
    assert map != "householder" or np.abs(vectors).max(axis=0).min() > 0.1  # none that would never train


def test_starts_as_the_convolution_and_contains_it(rng):
    q, x = orthogonal(4, rng), rng.normal(size=(5, 4))
    layer, dense = (make(kernel_initializer=q, dtype="float64") for make in (ReflectedDense, InvertibleDense))
    for computed, expected in zip(layer.forward_and_log_det(x), dense.forward_and_log_det(x), strict=True):
        np.testing.assert_allclose(computed, expected, atol=1e-12)
    layer.dense.kernel.assign(rng.normal(size=(4, 4)))
    dense.kernel.assign(layer.dense.kernel @ np.asarray(layer.reflection.right).T)
    for computed, expected in zip(layer.forward_and_log_det(x), dense.forward_and_log_det(x), strict=True):
        np.testing.assert_allclose(computed, expected, atol=1e-12)


def test_a_singular_matrix_is_not_certified_and_the_reflection_always_is(rng):
    layer = _moved(rng)
    certificate = layer.certificate()
    assert certificate.invertible
    assert 1 < certificate.condition < 2
    singular = np.linalg.svd(np.asarray(layer.dense.matrix), compute_uv=False)
    assert certificate.lipschitz == pytest.approx((2 * certificate.condition - 1) * singular[0], rel=1e-6)
    assert certificate.inverse_lipschitz == pytest.approx(
        certificate.condition / (2 - certificate.condition) / singular[-1], rel=1e-6
    )
    layer.dense.kernel.assign(np.ones((4, 4)))
    assert not layer.certificate().invertible
    assert layer.reflection.certificate().invertible


def test_an_optimizer_step_moves_the_eigenvalues_as_far_as_it_is_told(rng):
    """One step of Adam at rate r moves ρ by r, so log₂ λ by ½ (1 − margin) tanh(a r)."""
    x = rng.normal(size=(32, 6))
    for rate in (1.0, 10.0):
        layer = FactoredReflection(eigenvalue_rate=rate, dtype="float64")
        model = keras.Sequential([keras.Input((6,), dtype="float64"), layer])
        model.compile(keras.optimizers.Adam(1e-2), "mse")
        model.fit(x, x, verbose=0)
        moved = np.abs(np.log2(np.asarray(layer.eigenvalues))).max()  # a gradient of nearly zero moves less: Adam's epsilon
        assert moved == pytest.approx(0.45 * np.tanh(rate * 1e-2), rel=1e-3)


def test_files_of_0_2_load_with_a_rate_of_1():
    config = FactoredReflection(margin=0.2).get_config()
    assert FactoredReflection.from_config(config).eigenvalue_rate == 10
    del config["eigenvalue_rate"]
    assert FactoredReflection.from_config(config).eigenvalue_rate == 1


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf"), "10", True])
def test_a_rate_that_is_no_positive_number_is_refused(rate):
    with pytest.raises(ValueError, match="eigenvalue_rate"):
        FactoredReflection(eigenvalue_rate=rate)


def test_config_survives():
    layer = ReflectedDense("householder", margin=0.3, eigenvalue_rate=5.0)
    again = ReflectedDense.from_config(layer.get_config())
    assert (again.reflection.map, again.reflection.margin, again.reflection.eigenvalue_rate) == ("householder", 0.3, 5.0)
