"""SVDDense: y = activation(U Σ Vᵀ x + b), with the singular values in sight."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import AuxReflection, OrthogonalDense, SVDDense, kernels
from keras_auxref.initializers import ReflectionOf
from tests.support import assert_agree, jacobians

MAPS = ["aux", "householder", "cayley", "exp"]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def rotation(d: int, seed: int = 0) -> np.ndarray:
    q = np.linalg.qr(random(d, d, seed=seed).astype("float64"))[0]
    q[:, 0] *= np.linalg.slogdet(q)[0]
    return q


def composed(layer: SVDDense, x: np.ndarray) -> np.ndarray:
    """f_U(σ ⊙ f_V(x)) from the sub-layers, with Σ as a rectangular matrix."""
    units, d = layer.u.input_spec.axes[-1], x.shape[-1]
    sigma = np.zeros((units, d), "float32")
    np.fill_diagonal(sigma, layer.singular_values)
    return layer.u(layer.v(x).numpy() @ sigma.T).numpy()


@pytest.mark.parametrize("units", [None, 1, 4, 6, 9])
@pytest.mark.parametrize("map", MAPS)
def test_computes_the_decomposition_at_any_width(map: str, units: int | None) -> None:
    layer, x = SVDDense(units, map), random(5, 6)
    y = layer(x)
    width = units or 6
    assert tuple(y.shape) == (5, width) == layer.compute_output_shape((5, 6))
    assert layer.singular_values.shape == (min(6, width),)
    np.testing.assert_allclose(y, composed(layer, x), atol=1e-6)


@pytest.mark.parametrize("units", [4, 6, 9])
@pytest.mark.parametrize("map", ["householder", "cayley", "exp"])
def test_singular_values_are_those_of_the_matrix(map: str, units: int) -> None:
    layer = SVDDense(units, map)
    matrix = layer(np.eye(6, dtype="float32")).numpy().T
    np.testing.assert_allclose(np.linalg.svd(matrix)[1], np.sort(layer.singular_values)[::-1], rtol=1e-5)


def test_sub_layers() -> None:
    assert isinstance(SVDDense().u, AuxReflection)
    layer = SVDDense(map="householder", reflections=2)
    layer.build((None, 5))
    assert isinstance(layer.v, OrthogonalDense)
    assert layer.u.kernel.shape == layer.v.kernel.shape == (5, 2)
    assert not np.allclose(layer.u.kernel, layer.v.kernel)


@pytest.mark.parametrize("shape", [(1, 6), (2, 3, 6), (2, 3, 4, 6)])
@pytest.mark.parametrize("map", MAPS)
def test_acts_on_the_last_axis(map: str, shape: tuple[int, ...]) -> None:
    layer, x = SVDDense(4, map, use_bias=True, bias_initializer="ones"), random(*shape)
    y = layer(x)
    assert tuple(y.shape) == (*shape[:-1], 4)
    np.testing.assert_allclose(y, composed(layer, x.reshape(-1, 6)).reshape(*shape[:-1], 4) + 1, atol=1e-6)


@pytest.mark.parametrize("bounds", [None, (0.5, 1.5), (0.0, 100.0), (0.99, 1.01)])
def test_singular_values_start_in_the_papers_interval(bounds: tuple[float, float] | None) -> None:
    layer = SVDDense(map="householder", reflections=1, singular_bounds=bounds)
    layer.build((None, 2000))
    sigma = layer.singular_values.numpy()
    assert 0.98999 <= sigma.min() < 0.9905
    assert 1.0095 < sigma.max() <= 1.01001
    assert abs(sigma.mean() - 1) < 1e-3


@pytest.mark.parametrize("map", ["aux", "householder"])
def test_bounds_hold_during_training(map: str) -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), SVDDense(map=map, singular_bounds=(0.8, 1.2))])
    model.compile(keras.optimizers.Adam(1.0), "mse", jit_compile=False)
    start = model.layers[0].singular_values.numpy()
    model.fit(random(80, 8), 100 * random(80, 8, seed=1), batch_size=8, epochs=5, verbose=0)
    sigma = model.layers[0].singular_values.numpy()
    assert np.abs(sigma - start).max() > 0.1
    assert sigma.min() >= np.float32(0.8)
    assert sigma.max() <= np.float32(1.2)


def test_bounds_hold_for_any_weight() -> None:
    layer = SVDDense(singular_bounds=(0.1, 1.3))
    layer.build((None, 3))
    layer.singular_weight.assign([-1e30, 0.0, 1e30])
    low, middle, high = layer.singular_values.numpy()
    assert (low, high) == (np.float32(0.1), np.float32(1.3))
    assert abs(middle - 0.7) < 1e-6


@pytest.mark.parametrize("map", MAPS)
def test_an_orthogonal_start_is_the_same_function_for_every_map(map: str) -> None:
    start, x = ReflectionOf(rotation(6)), random(5, 6)
    layer = SVDDense(map=map, kernel_initializer=start)
    layer.build((None, 6))
    layer.singular_weight.assign(np.arange(1, 7))
    np.testing.assert_allclose(layer(x), (x @ rotation(6).T * np.arange(1, 7)) @ rotation(6).T, atol=1e-4)


def test_activation_bias_and_regularizers() -> None:
    layer = SVDDense(4, activation="relu", use_bias=True, bias_initializer="ones", kernel_regularizer="l2", bias_regularizer="l1")
    x = random(5, 6)
    np.testing.assert_allclose(layer(x), np.maximum(composed(layer, x) + 1, 0), atol=1e-6)
    assert len(layer.losses) == 3


@pytest.mark.slow
@pytest.mark.parametrize("map", ["aux", "exp"])
def test_trains_under_xla_as_without(map: str) -> None:
    results = []
    for jit in (False, True):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), SVDDense(4, map, singular_bounds=(0.5, 2.0), use_bias=True)])
        model.compile("sgd", "mse", jit_compile=jit)
        model.fit(random(16, 6), random(16, 4, seed=1), batch_size=8, epochs=2, shuffle=False, verbose=0)
        results.append(model.predict(random(3, 6, seed=2), verbose=0))
    np.testing.assert_allclose(*results, atol=1e-5)


@pytest.mark.parametrize("map", MAPS)
def test_save_and_load(map: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "singular_bounds": (0.5, 2.0),
        "use_bias": True,
        "activation": "relu",
        "bias_initializer": "ones",
    }
    if map == "householder":
        arguments["reflections"] = 3
    model = keras.Sequential([keras.Input((6,)), SVDDense(4, map, **arguments), SVDDense(map=map, kernel_regularizer="l2")])
    x = random(5, 6)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert_agree(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    for before, after in zip(model.layers, loaded.layers, strict=True):
        assert after.get_config() == before.get_config()


@pytest.mark.parametrize("map", MAPS)
def test_mixed_precision(map: str) -> None:
    layer, x = SVDDense(4, map, use_bias=True, singular_bounds=(0.5, 2.0), dtype="mixed_bfloat16"), random(5, 6)
    y = layer(x)
    assert y.dtype == "bfloat16"
    assert {w.dtype for w in layer.weights} == {"float32"}
    np.testing.assert_allclose(tf.cast(y, "float32"), tf.cast(composed(layer, x), "float32"), atol=0.1)


def test_float64() -> None:
    layer = SVDDense(4, "exp", dtype="float64")
    assert layer(random(5, 6)).dtype == "float64"
    assert {w.dtype for w in layer.weights} == {"float64"}


def test_masks_and_unknown_axes() -> None:
    inputs = keras.Input((None, 6))
    outputs = SVDDense(4)(keras.layers.Masking()(inputs))
    assert outputs.shape == (None, None, 4)
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(outputs))
    x = random(2, 5, 6)
    x[:, 3:] = 0
    np.testing.assert_allclose(model(x), model(x[:, :3]), atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"units": 0}, "None or a positive integer. Expected None, 1, 2, 3, … Received: 0"),
        ({"map": "svd"}, r"Expected one of \['aux', 'cayley', 'exp', 'householder'\]. Received: 'svd'"),
        ({"reflections": 2}, 'Expected map="householder". Received: map="aux", reflections=2'),
        ({"map": "exp", "reflections": 2}, 'Expected map="householder"'),
        ({"singular_bounds": (1.0, 2.0)}, r"Expected 0 ≤ low ≤ 0.99 and 1.01 ≤ high. Received: \(1.0, 2.0\)"),
        ({"singular_bounds": (0.5, 1.0)}, "must contain the start"),
        ({"singular_bounds": (-1.0, 2.0)}, "must contain the start"),
        ({"singular_bounds": 2.0}, r"Expected \(low, high\). Received: 2.0"),
        ({"singular_bounds": ("a", "b")}, r"two numbers. Expected \(low, high\). Received: \('a', 'b'\)"),
        ({"map": "householder", "rank": 0}, r"Expected an integer 1 ≤ rank ≤ min\(d, units\). Received: 0"),
        ({"map": "householder", "units": 3, "rank": 4}, r"Expected an integer 1 ≤ rank ≤ min\(d, units\). Received: 4"),
        ({"rank": 2}, r"auxiliary reflections.*Expected map=\"householder\" with `rank`. Received: map='aux', rank=2"),
        ({"map": "exp", "rank": 2}, "Received: map='exp', rank=2"),
    ],
)
def test_errors_at_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SVDDense(**arguments)


@pytest.mark.parametrize(("units", "rank"), [(4, 2), (9, 6), (None, 6)])
def test_thin_maps(units: int | None, rank: int, tmp_path: Path) -> None:
    layer = SVDDense(units, "householder", rank=rank, use_bias=True, singular_bounds=(0.5, 2.0))
    model = keras.Sequential([keras.Input((6,)), layer])
    width = units or 6
    assert layer.count_params() == rank * (6 + width) + rank + width
    layer.singular_weight.assign(np.linspace(-2, 2, rank))
    x = random(5, 6)
    u, v = layer.u.matrix.numpy(), layer.v.matrix.numpy()
    assert (u.shape, v.shape) == ((width, rank), (rank, 6))
    matrix = u @ np.diag(layer.singular_values) @ v
    np.testing.assert_allclose(layer(x), x @ matrix.T, atol=1e-5)
    np.testing.assert_allclose(np.linalg.svd(matrix)[1][:rank], np.sort(layer.singular_values)[::-1], rtol=1e-5)
    np.testing.assert_allclose(layer.condense()(x), x @ matrix.T, atol=1e-5)
    model.compile("sgd", "mse", jit_compile=False)
    before = layer.get_weights()
    model.fit(x, random(5, width), verbose=0)
    assert all(np.abs(a - b).max() > 0 for a, b in zip(before, layer.get_weights(), strict=True))
    model.save(tmp_path / "m.keras")
    assert_agree(keras.models.load_model(tmp_path / "m.keras")(x), model(x))


def test_thin_maps_are_inverted_where_they_are_square() -> None:
    x = random(5, 6)
    layer = SVDDense(map="householder", rank=6)
    np.testing.assert_allclose(layer.inverse(layer(x)), x, atol=1e-5)
    assert layer.certificate().invertible
    with pytest.raises(
        ValueError, match=r"last axis that the layer was built for. Expected shape \(..., 6\). Received: \(2, 3\)"
    ):
        layer.inverse(random(2, 3))
    layer = SVDDense(map="householder", rank=5)
    y = layer(x)
    with pytest.raises(NotImplementedError, match="Received: a matrix of rank 5 in 6 dimensions has no inverse"):
        layer.inverse(y)
    assert "rank 5" in layer.certificate().reason


def test_a_thin_map_after_many_features_is_small() -> None:
    layer = SVDDense(10, "householder", rank=10)
    layer.build((None, 2048))
    assert layer.count_params() == 10 * (2048 + 10) + 10


def test_errors_at_build() -> None:
    with pytest.raises(ValueError, match=r"Expected rank ≤ 6. Received: 7"):
        SVDDense(9, "householder", rank=7).build((None, 6))
    with pytest.raises(ValueError, match=r"Expected shape \(batch, ..., d\). Received: \(None, None\)"):
        SVDDense().build((None, None))
    with pytest.raises(ValueError, match=r"Expected 1 ≤ reflections ≤ 4. Received: 5"):
        SVDDense(4, "householder", reflections=5).build((None, 6))
    with pytest.raises(ValueError, match="has not been built"):
        _ = SVDDense().singular_values


@pytest.mark.parametrize("units", [3, 6, 9])
@pytest.mark.parametrize("map", ["householder", "cayley", "exp"])
def test_condenses_into_a_dense_layer(map: str, units: int) -> None:
    layer, x = SVDDense(units, map, activation="tanh", use_bias=True, bias_initializer="ones"), random(2, 3, 6)
    expected = layer(x)
    dense = layer.condense()
    assert type(dense) is keras.layers.Dense
    np.testing.assert_allclose(dense(x), expected, atol=2e-6)
    layer.singular_weight.assign_add([1.0] * min(6, units))
    np.testing.assert_allclose(dense(x), expected, atol=2e-6)  # a copy


def test_auxiliary_reflections_do_not_condense() -> None:
    layer = SVDDense()
    layer.build((None, 3))
    with pytest.raises(NotImplementedError, match=r"not linear.*Received: map='aux'"):
        layer.condense()


def test_inverts_auxiliary_reflections_on_their_branch() -> None:
    """Free W near I − Q: certified, and the log-determinant that of automatic differentiation."""
    layer = SVDDense(map="aux", kernel_initializer=ReflectionOf(-np.eye(4)), use_bias=True, dtype="float64")
    layer.build((None, 4))
    for weight in layer.trainable_weights:
        weight.assign_add(0.05 * np.random.default_rng(0).normal(size=weight.shape))
    assert layer.certificate().invertible, layer.certificate()
    x = np.random.default_rng(1).normal(size=(5, 4))
    y, log_det = layer.forward_and_log_det(x)
    np.testing.assert_allclose(y, layer(x), atol=1e-12)
    np.testing.assert_allclose(layer.inverse(y), x, atol=1e-9)
    for row, expected in zip(x, log_det, strict=True):
        copies = tf.repeat(row[None], 4, axis=0)
        with tf.GradientTape() as tape:
            tape.watch(copies)
            diagonal = tf.linalg.diag_part(layer(copies))
        assert float(expected) == pytest.approx(np.linalg.slogdet(tape.gradient(diagonal, copies))[1], abs=1e-9)
    layer.u.trainable_weights[0].assign(np.random.default_rng(5).normal(size=(4, 4)))
    assert layer.certificate().reason.startswith("Not proven: of 'u': ")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({"units": 3}, "a map from 4 to 3 dimensions"), ({"activation": "relu"}, "the activation 'relu' is not undone")],
)
def test_what_is_not_invertible_says_so(arguments: dict[str, Any], reason: str) -> None:
    layer = SVDDense(map="exp", **arguments)
    layer.build((None, 4))
    for name in ("inverse", "log_det_jacobian", "forward_and_log_det"):
        with pytest.raises(NotImplementedError, match=reason):
            getattr(layer, name)(np.ones((1, 4), "float32"))
    with pytest.raises(NotImplementedError, match=reason):
        layer.bijector()
    assert not layer.certificate().invertible
    assert reason in layer.certificate().reason


def test_a_singular_value_of_zero_is_not_certified() -> None:
    layer = SVDDense(map="exp")
    layer.build((None, 2))
    layer.singular_weight.assign([1.0, 0.0])
    assert "a singular value is zero" in layer.certificate().reason


def test_bounds_with_auxiliary_reflections_come_with_a_proof() -> None:
    """The Jacobian lies between the constants of the certificate, whatever the weights."""
    layer, x = SVDDense(singular_bounds=(0.5, 2.0), kernel=kernels.RelaxedCayley(lipschitz=1.2), dtype="float64"), random(60, 4)
    layer(x)
    for weight in layer.trainable_weights:
        weight.assign_add(3 * random(*weight.shape))
    certificate = layer.certificate()
    assert certificate.invertible
    singular = np.linalg.svd(jacobians(layer, x.astype("float64")), compute_uv=False)
    assert singular.max() <= certificate.lipschitz <= 2 * 1.2**2
    assert singular.min() >= 1 / certificate.inverse_lipschitz
    assert isinstance(SVDDense(singular_bounds=(0.5, 2.0)).u.parametrization, kernels.RelaxedCayley)
    assert isinstance(SVDDense().u.parametrization, kernels.Free)


def test_bounds_of_a_shape_without_inverse() -> None:
    layer = SVDDense(3, "exp", singular_bounds=(0.5, 2.0), activation="relu")
    layer(random(2, 5))
    certificate = layer.certificate()
    assert not certificate.invertible
    assert 1 < certificate.lipschitz <= 2.0001
    assert certificate.inverse_lipschitz is None
    tall = SVDDense(7, "exp", singular_bounds=(0.5, 2.0))
    tall(random(2, 5))
    assert tall.certificate().inverse_lipschitz <= 2.0001


def test_a_free_kernel_with_bounds_is_what_earlier_files_have_and_says_what_it_lacks() -> None:
    with pytest.warns(UserWarning, match="bounds σ and not the layer"):
        layer = SVDDense(singular_bounds=(0.5, 2.0), kernel="free")
    earlier = layer.get_config()
    del earlier["kernel"]
    with pytest.warns(UserWarning, match="bounds σ and not the layer"):
        loaded = SVDDense.from_config(earlier)
    assert isinstance(loaded.u.parametrization, kernels.Free)
    with pytest.raises(ValueError, match=r'Expected map="aux". Received: map=\'exp\', kernel=\'free\''):
        SVDDense(map="exp", kernel="free")
