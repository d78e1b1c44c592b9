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
    return float(np.linalg.norm(u.T @ u - np.eye(u.shape[1])))


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
        ({"reflections": 0}, "Expected None, 1, 2, 3, … Received: 0"),
        ({"reflections": 1.5}, "positive integer"),
        ({"kernel_initializer": np.ones((2, 2))}, "Expected an orthogonal matrix"),
        ({"kernel_initializer": np.ones((2, 3))}, "Expected a matrix Q with orthonormal rows or columns"),
        ({"units": 0}, "`units` must be None or a positive integer. Expected None, 1, 2, 3, … Received: 0"),
        ({"units": 2.5}, "`units` must be None or a positive integer. Expected None, 1, 2, 3, … Received: 2.5"),
    ],
)
def test_errors_at_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OrthogonalDense(**arguments)


@pytest.mark.parametrize("units", [1, 4, 6, 9])
@pytest.mark.parametrize("map", MAPS)
def test_rectangular_maps_have_orthonormal_rows_or_columns(map: str, units: int) -> None:
    layer = OrthogonalDense(map, units=units)
    few, many = random(1, 6), random(2, 40, 6)
    y = layer(few)
    m, k = max(6, units), min(6, units)
    assert layer.kernel.shape == (m, k if map == "householder" else m)
    u = layer.matrix.numpy()
    assert u.shape == (units, 6)
    np.testing.assert_allclose(u @ u.T if units < 6 else u.T @ u, np.eye(k), atol=2e-6)
    np.testing.assert_allclose(y, few @ u.T, atol=2e-6)  # by reflections
    np.testing.assert_allclose(layer(many), many @ u.T, atol=2e-6)  # by the thin matrix
    assert layer.compute_output_shape((2, 40, 6)) == (2, 40, units)
    np.testing.assert_allclose(layer.condense()(many), many @ u.T, atol=2e-6)


@pytest.mark.parametrize("rows", [1, 50])
@pytest.mark.parametrize("units", [3, 8])
def test_gradients_of_rectangular_maps(units: int, rows: int) -> None:
    """Against automatic differentiation of the definition: reflections one after another, as matrices."""
    layer = built(5, units=units, dtype="float64")
    x, g = random(rows, 5).astype("float64"), random(rows, units, seed=1).astype("float64")

    def definition(x: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
        u = tf.eye(max(5, units), dtype="float64")
        for column in tf.unstack(v, axis=1):
            column = column[:, None]
            u = u @ (tf.eye(len(u), dtype="float64") - 2 * column @ tf.transpose(column) / tf.reduce_sum(column**2))
        return x @ tf.transpose(u[:units, :5])

    results = []
    for function in (lambda x, _: layer(x), definition):
        with tf.GradientTape() as tape:
            t, v = tf.constant(x), layer.kernel.value
            tape.watch(t)
            y = function(t, tf.convert_to_tensor(v))
        results.append([y, *tape.gradient(y, [t, v], g)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("units", [3, 8])
@pytest.mark.parametrize("map", MAPS)
def test_rectangular_starts(map: str, units: int) -> None:
    q = np.linalg.qr(random(8, min(units, 5)).astype("float64"))[0]
    q = q if units == 8 else np.linalg.qr(random(5, 3).astype("float64"))[0].T
    for start in (q, tf.constant(q), q.astype("float32")):
        np.testing.assert_allclose(built(5, map=map, units=units, kernel_initializer=start).matrix, q, atol=3e-6)
    for start, expected in (("identity", np.eye(units, 5)), (Cayley(seed=1), Cayley(seed=1)((max(units, 5),) * 2))):
        layer = built(5, map=map, units=units, kernel_initializer=start)
        np.testing.assert_allclose(layer.matrix, np.asarray(expected)[:units, :5], atol=3e-6)
    built(5, map="householder", units=units, kernel_initializer="orthogonal")


def test_a_tall_map_never_holds_a_square_matrix() -> None:
    """Of 30,000² entries in float32 there would be 3.6 GB."""
    layer = OrthogonalDense(units=50, kernel_initializer="orthogonal", use_bias=True)
    function = tf.function(lambda x: tf.gradients(layer(x), [x]))
    layer.build((None, 30_000))
    assert layer.count_params() == 30_000 * 50 + 50
    for rows in (None, 2, 200):
        graph = function.get_concrete_function(tf.TensorSpec((rows, 30_000))).graph
        graphs = [graph, *(f.graph for f in graph._functions.values() if hasattr(f, "graph"))]
        sizes = [
            np.prod([n or 1 for n in t.shape]) for g in graphs for op in g.get_operations() for t in op.outputs if t.shape.rank
        ]
        assert max(sizes) <= 30_000 * 200
    np.testing.assert_allclose(layer(random(2, 30_000)), random(2, 30_000) @ layer.matrix.numpy().T, atol=1e-3)


@pytest.mark.parametrize("units", [4, 9])
@pytest.mark.parametrize("map", MAPS)
def test_rectangular_maps_train_save_and_stay_orthonormal(map: str, units: int, tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    layer = OrthogonalDense(map, units=units, activation="relu", use_bias=True, kernel_regularizer="l2", bias_regularizer="l2")
    model = keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.3), "mse", jit_compile=False)
    before = layer.matrix.numpy()
    x = random(64, 6)
    model.fit(x, random(64, 2, seed=1), batch_size=16, epochs=3, verbose=0)
    u = layer.matrix.numpy()
    assert np.abs(u - before).max() > 0.05
    assert np.abs(layer.bias.numpy()).max() > 0
    assert len(layer.losses) == 2
    assert orthogonality(u if units > 6 else u.T) <= 3e-5
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert_agree(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    np.testing.assert_allclose(layer(x), np.maximum(x @ u.T + layer.bias.numpy(), 0), atol=1e-5)
    np.testing.assert_allclose(layer.condense()(x), layer(x), atol=1e-5)


def test_bias_is_undone_and_activation_is_not() -> None:
    x = random(3, 6)
    layer = OrthogonalDense(use_bias=True, bias_initializer="ones")
    np.testing.assert_allclose(layer.inverse(layer(x)), x, atol=2e-6)
    assert layer.certificate().invertible
    np.testing.assert_allclose(layer.bijector().inverse(tf.identity(layer(x))), x, atol=2e-6)
    layer.bias.assign(np.full(6, np.nan))
    assert not layer.certificate().invertible
    layer = OrthogonalDense(activation="tanh")
    layer(x)
    assert "'tanh' is not undone" in layer.certificate().reason
    for name in ("inverse", "log_det_jacobian", "forward_and_log_det"):
        with pytest.raises(NotImplementedError, match=r"no activation. Received: the activation 'tanh' is not undone"):
            getattr(layer, name)(x)


@pytest.mark.parametrize(("units", "kind"), [(4, "a contraction, ‖Ux‖ ≤ ‖x‖"), (9, "an isometry, ‖Ux‖ = ‖x‖")])
def test_what_is_proven_of_rectangular_maps(units: int, kind: str) -> None:
    layer, x = built(6, units=units), random(3, 6)
    certificate = layer.certificate()
    assert not certificate.invertible
    assert f"a map from 6 to {units} dimensions is no bijection; by construction it is linear and {kind}" in certificate.reason
    y = random(3, units)
    for name, argument in (("inverse", y), ("log_det_jacobian", x), ("forward_and_log_det", x), ("bijector", None)):
        with pytest.raises(NotImplementedError, match=f"Received: a map from 6 to {units} dimensions"):
            getattr(layer, name)(*[] if argument is None else [argument])


@pytest.mark.parametrize("policy", ["float64", "mixed_float16", "mixed_bfloat16"])
def test_rectangular_maps_in_every_precision(policy: str) -> None:
    x = random(4, 6)
    for units in (3, 9):
        layer = OrthogonalDense(units=units, dtype=policy)
        y = layer(x)
        assert y.dtype == layer.compute_dtype
        tolerance = 1e-12 if policy == "float64" else 0.05
        np.testing.assert_allclose(tf.cast(y, "float64"), x @ np.asarray(layer.matrix, "float64").T, atol=tolerance)


def test_errors_at_build_and_call() -> None:
    with pytest.raises(ValueError, match=r"Expected 1 ≤ reflections ≤ 3. Received: 4"):
        built(4, units=3, reflections=4)
    with pytest.raises(
        ValueError, match=r"Expected reflections=3 or no orthogonal `kernel_initializer`. Received: reflections=2"
    ):
        built(4, units=3, reflections=2, kernel_initializer="identity")
    with pytest.raises(ValueError, match=r"Expected shape \(3, 4\). Received: \(4, 3\)"):
        built(4, units=3, kernel_initializer=np.eye(4, 3))
    with pytest.raises(
        ValueError, match=r"last axis that the layer was built for. Expected shape \(..., 4\). Received: \(2, 3\)"
    ):
        built(4).inverse(random(2, 3))
    with pytest.raises(ValueError, match=r"Expected 1 ≤ reflections ≤ 4. Received: 5"):
        built(4, reflections=5)
    with pytest.raises(ValueError, match=r"Expected shape \(batch, ..., d\). Received: \(None, None\)"):
        OrthogonalDense().build((None, None))
    with pytest.raises(ValueError, match=r"Expected shape \(3, 3\). Received: \(4, 4\)"):
        built(3, kernel_initializer=ReflectionOf(orthogonal(4)))
    for name in ("matrix", "condense"):
        with pytest.raises(ValueError, match="has not been built"):
            getattr(OrthogonalDense(), name)()
