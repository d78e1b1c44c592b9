"""OrthogonalDense: y = U x, with U orthogonal before and after training."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import AuxReflection, OrthogonalDense
from keras_auxref.initializers import Cayley, Henaff, ReflectionOf
from tests.support import assert_agree

MAPS = ["householder", "cayley", "exp"]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def orthogonal(d: int, determinant: int = 1, seed: int = 0) -> np.ndarray:
    q = np.linalg.qr(random(d, d, seed=seed).astype("float64"))[0]
    if np.linalg.slogdet(q)[0] != determinant:
        q[:, 0] *= -1
    return q


def orthogonality(u: Any) -> float:
    u = np.asarray(u, "float64")
    return float(np.linalg.norm(u.T @ u - np.eye(len(u))))


def built(d: int, **arguments: Any) -> OrthogonalDense:
    layer = OrthogonalDense(**arguments)
    layer.build((None, d))
    return layer


@pytest.mark.parametrize("shape", [(1, 6), (4, 6), (2, 3, 6), (2, 40, 6), (2, 4, 5, 6)])
@pytest.mark.parametrize("map", MAPS)
def test_computes_u_x_on_the_last_axis(map: str, shape: tuple[int, ...]) -> None:
    layer, x = OrthogonalDense(map), random(*shape)
    y = layer(x)
    assert tuple(y.shape) == shape == layer.compute_output_shape(shape)
    np.testing.assert_allclose(y, x @ layer.matrix.numpy().T, atol=2e-6)
    np.testing.assert_allclose(layer.inverse(y), x, atol=2e-6)
    np.testing.assert_array_equal(layer.log_det_jacobian(x), np.zeros(shape[:-1]))


@pytest.mark.parametrize("map", MAPS)
def test_one_dimension(map: str) -> None:
    layer = OrthogonalDense(map)
    np.testing.assert_allclose(layer(np.full((2, 1), 3.0)), np.full((2, 1), -3.0 if map == "householder" else 3.0))


@pytest.mark.parametrize("k", range(1, 7))
def test_reflections(k: int) -> None:
    layer = built(6, reflections=k)
    assert layer.kernel.shape == (6, k)
    u = layer.matrix.numpy()
    assert np.linalg.matrix_rank(np.eye(6) - u, tol=1e-4) == k
    np.testing.assert_allclose(np.linalg.det(u), (-1) ** k, rtol=1e-5)


def test_default_start_is_the_papers() -> None:
    for layer in (built(64, map="exp"), built(64, reflections=4)):
        values = layer.kernel.numpy()
        assert 0.95 / 8 < np.abs(values).max() <= 1 / 8
    assert not np.allclose(built(8).kernel, built(8).kernel)


@pytest.mark.parametrize("determinant", [-1, 1])
@pytest.mark.parametrize("d", [1, 2, 5, 20])
def test_householder_starts_at_any_orthogonal_matrix(d: int, determinant: int) -> None:
    q = orthogonal(d, determinant)
    np.testing.assert_allclose(built(d, kernel_initializer=ReflectionOf(q)).matrix, q, atol=3e-6)


@pytest.mark.parametrize("d", [2, 5, 20])
@pytest.mark.parametrize("map", MAPS)
def test_starts_as_the_function_that_aux_reflection_starts_as(map: str, d: int) -> None:
    start, x = ReflectionOf(orthogonal(d)), random(7, d)
    np.testing.assert_allclose(
        OrthogonalDense(map, kernel_initializer=start)(x), AuxReflection(kernel_initializer=start)(x), atol=5e-6
    )


@pytest.mark.parametrize("map", MAPS)
def test_every_kind_of_orthogonal_start(map: str) -> None:
    q, d = orthogonal(6), 6
    for start in (q, q.astype("float32"), tf.constant(q), ReflectionOf(q), ReflectionOf(q.astype("float32"))):
        np.testing.assert_allclose(built(d, map=map, kernel_initializer=start).matrix, q, atol=3e-6)
    for maker in (Cayley(seed=1), Henaff(seed=1)):
        for start in (maker, ReflectionOf(maker)):
            np.testing.assert_allclose(built(d, map=map, kernel_initializer=start).matrix, maker((d, d)), atol=3e-6)
    np.testing.assert_allclose(built(d, map=map, kernel_initializer="identity").matrix, np.eye(d), atol=1e-6)


def test_any_other_initializer_makes_the_weight() -> None:
    layer = built(5, reflections=3, kernel_initializer="ones")
    np.testing.assert_array_equal(layer.kernel, np.ones((5, 3)))


def test_fewer_reflections_reproduce_what_they_can() -> None:
    q = np.eye(8)
    q[:4, :4] = orthogonal(4)
    np.testing.assert_allclose(built(8, reflections=5, kernel_initializer=ReflectionOf(q)).matrix, q, atol=3e-6)
    with pytest.raises(ValueError, match=r"Expected at least rank\(I − U\) = 8 reflections. Received: 5"):
        built(8, reflections=5, kernel_initializer=ReflectionOf(orthogonal(8)))


@pytest.mark.parametrize("map", ["cayley", "exp"])
def test_a_start_that_the_map_cannot_reach_is_refused(map: str) -> None:
    with pytest.raises(ValueError, match=r"determinant −1|det U = -1"):
        built(5, map=map, kernel_initializer=ReflectionOf(orthogonal(5, -1)))


@pytest.mark.parametrize("map", MAPS)
def test_stays_orthogonal_at_a_large_learning_rate(map: str) -> None:
    keras.utils.set_random_seed(0)
    d = 48
    model = keras.Sequential([keras.Input((d,)), OrthogonalDense(map), keras.layers.Dense(3)])
    model.compile(keras.optimizers.Adam(1.0), "mse", jit_compile=False)
    before = model.layers[0].matrix.numpy()
    model.fit(random(160, d), random(160, 3, seed=1), batch_size=16, epochs=5, verbose=0)
    after = model.layers[0].matrix.numpy()
    assert model.optimizer.iterations == 50
    assert np.abs(after - before).max() > 0.1
    assert orthogonality(after) <= 1e-5 * np.sqrt(d)


@pytest.mark.parametrize("map", MAPS)
def test_learns_a_rotation(map: str) -> None:
    keras.utils.set_random_seed(0)
    x, q = random(256, 6), orthogonal(6)
    model = keras.Sequential([keras.Input((6,)), OrthogonalDense(map)])
    model.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=False)
    history = model.fit(x, x @ q.T.astype("float32"), batch_size=32, epochs=10, verbose=0).history["loss"]
    assert history[-1] < 0.05 * history[0]


@pytest.mark.parametrize("map", MAPS)
def test_trains_under_xla_as_without(map: str) -> None:
    results = []
    for jit in (False, True):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((12,)), OrthogonalDense(map)])
        model.compile("sgd", "mse", jit_compile=jit)
        model.fit(random(16, 12), random(16, 12, seed=1), batch_size=8, epochs=2, shuffle=False, verbose=0)
        results.append(model.layers[0].matrix.numpy())
    np.testing.assert_allclose(*results, atol=1e-5)


@pytest.mark.parametrize("map", MAPS)
def test_save_and_load(map: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"kernel_regularizer": "l2", "name": "turn"}
    if map == "householder":
        arguments["reflections"] = 3
    model = keras.Sequential([keras.Input((6,)), OrthogonalDense(map, **arguments)])
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    x = random(5, 6)
    assert_agree(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    assert loaded.layers[0].get_config() == model.layers[0].get_config()


def test_save_and_load_with_an_orthogonal_array(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), OrthogonalDense("cayley", kernel_initializer=orthogonal(4))])
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded.layers[0].kernel, model.layers[0].kernel)


@pytest.mark.parametrize("policy", ["float32", "float64", "mixed_bfloat16"])
@pytest.mark.parametrize("map", MAPS)
def test_condense(map: str, policy: str) -> None:
    layer = built(6, map=map, dtype=policy)
    dense = layer.condense()
    assert type(dense) is keras.layers.Dense
    assert dense.built
    assert not dense.use_bias
    x = random(2, 3, 6)
    y, expected = dense(x), layer(x)
    assert y.dtype == expected.dtype
    tolerance = {"float32": 2e-6, "float64": 1e-13, "mixed_bfloat16": 0.05}[policy]
    np.testing.assert_allclose(tf.cast(y, "float64"), tf.cast(expected, "float64"), atol=tolerance)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("map", MAPS)
def test_mixed_precision(map: str, policy: str) -> None:
    layer = OrthogonalDense(map, dtype=policy)
    x = random(4, 6)
    y = layer(x)
    assert y.dtype == layer.compute_dtype
    assert layer.kernel.dtype == "float32"
    assert orthogonality(layer.matrix) < 1e-5
    np.testing.assert_allclose(tf.cast(y, "float32"), x @ layer.matrix.numpy().T, atol=0.05)


@pytest.mark.parametrize("map", MAPS)
def test_functional_model_masks_and_unknown_axes(map: str) -> None:
    inputs = keras.Input((None, 6))
    outputs = OrthogonalDense(map)(keras.layers.Masking()(inputs))
    assert outputs.shape == (None, None, 6)
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(outputs))
    x = random(2, 5, 6)
    x[:, 3:] = 0
    np.testing.assert_allclose(model(x), model(x[:, :3]), atol=1e-6)


def test_built_while_a_step_is_traced() -> None:
    model = keras.Sequential([OrthogonalDense("exp", kernel_initializer=ReflectionOf(orthogonal(4)))])
    model.compile("sgd", "mse")
    model.fit(random(8, 4), random(8, 4), verbose=0)
    assert orthogonality(model.layers[0].matrix) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"map": "svd"}, r"Expected one of \['cayley', 'exp', 'householder'\]. Received: 'svd'"),
        ({"map": "exp", "reflections": 2}, "Expected map=\"householder\". Received: map='exp'"),
        ({"reflections": 0}, "Expected 1 ≤ k ≤ d. Received: 0"),
        ({"reflections": 1.5}, "positive integer"),
        ({"kernel_initializer": np.ones((2, 2))}, "Expected an orthogonal matrix"),
    ],
)
def test_errors_at_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OrthogonalDense(**arguments)


def test_errors_at_build_and_call() -> None:
    with pytest.raises(ValueError, match=r"Expected 1 ≤ reflections ≤ 4. Received: 5"):
        built(4, reflections=5)
    with pytest.raises(ValueError, match=r"Expected shape \(batch, ..., d\). Received: \(None, None\)"):
        OrthogonalDense().build((None, None))
    with pytest.raises(ValueError, match=r"Expected shape \(3, 3\). Received: \(4, 4\)"):
        built(3, kernel_initializer=ReflectionOf(orthogonal(4)))
    for name in ("matrix", "condense"):
        with pytest.raises(ValueError, match="has not been built"):
            getattr(OrthogonalDense(), name)()
    with pytest.raises(ValueError, match="has not been built"):
        OrthogonalDense().inverse(random(2, 3))
