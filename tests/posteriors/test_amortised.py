"""Flows whose parameters come from an encoder: one contract for all, and what each has of its own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import ops
from keras_auxref.posteriors import FactoredFlow, HouseholderFlow, SylvesterFlow
from tests.keras_contract import run_layer_test
from tests.support import assert_agree, jacobians, quick

N, D, FEATURES = 3, 4, 5
CASES = {
    "householder": (HouseholderFlow, {"steps": 3}),
    "factored": (FactoredFlow, {"steps": 3, "margin": 0.2}),
    "sylvester_orthogonal": (SylvesterFlow, {"steps": 2, "columns": 3}),
    "sylvester_householder": (SylvesterFlow, {"steps": 2, "form": "householder", "reflections": 2}),
    "sylvester_triangular": (SylvesterFlow, {"steps": 2, "form": "triangular"}),
    "one_step": (FactoredFlow, {"steps": 1}),
    "no_step": (SylvesterFlow, {"steps": 0}),
}
each = pytest.mark.parametrize("name", CASES)


def make(name, rng, dtype="float64", d=D):
    layer_class, arguments = CASES[name]
    if d == 1:
        arguments = {key: value for key, value in arguments.items() if key != "columns"}
    layer = layer_class(**arguments, dtype=dtype)
    layer.build((None, d), (None, FEATURES))
    for weight in layer.trainable_weights:
        weight.assign_add(0.5 * rng.normal(size=weight.shape))
    return layer, rng.normal(size=(N, d)).astype(dtype), rng.normal(size=(N, FEATURES)).astype(dtype)


@each
@pytest.mark.parametrize("d", [1, D])
def test_inverse_and_determinant(rng, dtype, name, d):
    layer, z, h = make(name, rng, dtype, d)
    moved, log_det = layer.forward_and_log_det(z, h)
    assert (moved.dtype, log_det.dtype, log_det.shape) == (dtype, dtype, (N,))
    np.testing.assert_allclose(layer(z, h), moved, rtol=1e-6)
    np.testing.assert_allclose(layer.inverse(moved, h), z, atol=1e-3 if dtype == "float32" else 1e-10)
    if dtype == "float64":
        expected = np.linalg.slogdet(jacobians(lambda z: layer(z, h), z))[1]
        np.testing.assert_allclose(log_det, expected, atol=1e-7)
        assert name.startswith(("householder", "no_step")) or d == 1 or np.abs(expected).max() > 1e-3


@each
def test_every_sample_has_parameters_of_its_own(rng, name):
    layer, z, h = make(name, rng)
    together = layer(z, h)
    for i in range(N):
        np.testing.assert_allclose(layer(z[i : i + 1], h[i : i + 1])[0], together[i], atol=1e-12)
    if layer.steps:
        assert np.abs(layer(z, h[::-1]) - together).max() > 1e-3


@each
def test_several_samples_of_each(rng, name):
    layer, z, h = make(name, rng)
    several = np.stack([z, z + 1])
    moved, log_det = layer.forward_and_log_det(several, h)
    assert log_det.shape == (2, N)
    for s in range(2):
        np.testing.assert_allclose(moved[s], layer(several[s], h), atol=1e-12)
    np.testing.assert_allclose(layer.inverse(moved, h), several, atol=1e-9)


@each
def test_saves_and_loads_with_its_weights(rng, tmp_path, name):
    layer, z, h = make(name, rng, "float32")
    inputs = keras.Input((D,)), keras.Input((FEATURES,))
    model = keras.Model(inputs, layer(*inputs))
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert_agree(loaded([z, h]), model([z, h]))
    assert loaded.layers[-1].get_config() == layer.get_config()


@each
def test_keras_own_layer_contract(name):
    layer_class, arguments = CASES[name]
    fresh = layer_class(**arguments)
    fresh.build((None, D), (None, FEATURES))
    run_layer_test(
        layer_class,
        init_kwargs=arguments,
        input_shape={"inputs_shape": (N, D), "context_shape": (N, FEATURES)},
        expected_output_shape=(N, D),
        expected_num_trainable_weights=len(fresh.trainable_weights),
        expected_num_non_trainable_weights=0,
        supports_masking=False,
        run_training_check=False,
    )


def value_and_gradients(layer, z, h):
    with tf.GradientTape() as tape:
        moved, log_det = layer.forward_and_log_det(z, h)
        value = tf.reduce_sum(tf.sin(moved)) + tf.reduce_sum(tf.cos(log_det))
    return value, tape.gradient(value, [weight.value for weight in layer.trainable_weights])


@each
def test_every_weight_gets_a_gradient(rng, name):
    layer, z, h = make(name, rng)
    for gradient, weight in zip(value_and_gradients(layer, z, h)[1], layer.trainable_weights, strict=True):
        assert np.abs(gradient).max() > 1e-8, weight.path


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(CASES, keep=3, exhaustive=True))
def test_compiles_under_xla(rng, name):
    layer, z, h = make(name, rng)
    found = [tf.function(value_and_gradients, jit_compile=jit)(layer, z, h) for jit in (False, True)]
    for plain, compiled in zip(*(tf.nest.flatten(one) for one in found), strict=True):
        np.testing.assert_allclose(compiled, plain, rtol=1e-8, atol=1e-10)
    inverse = tf.function(layer.inverse, jit_compile=True)
    np.testing.assert_allclose(inverse(layer(z, h), h), z, atol=1e-9)


def test_the_directions_are_a_chain(rng):
    layer, z, h = make("householder", rng)
    v = [h]
    for kernel, bias in zip(layer.weights[::2], layer.weights[1::2], strict=True):
        v.append(v[-1] @ np.asarray(kernel) + np.asarray(bias))
    np.testing.assert_allclose(layer(z, h), ops.householder_flow(z, np.stack(v[1:], 1)), atol=1e-12)


def test_the_auxiliary_flow_starts_as_a_householder_flow(rng):
    layer = FactoredFlow(steps=3, dtype="float64")
    z, h = rng.normal(size=(N, D)), rng.normal(size=(N, FEATURES))
    np.testing.assert_allclose(layer(z, h), ops.householder_flow(z, layer.parameters(h)["v"]), atol=1e-12)
    np.testing.assert_allclose(layer.forward_and_log_det(z, h)[1], 0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 1e4), ("float64", 1e4), ("mixed_float16", 10)])
def test_stays_a_bijection_whatever_the_encoder_says(rng, dtype, size):
    for name in ("factored", "sylvester_orthogonal", "sylvester_householder", "sylvester_triangular"):
        layer_class, arguments = CASES[name]
        layer = layer_class(**arguments, dtype=dtype)
        layer.build((None, D), (None, FEATURES))
        for weight in layer.trainable_weights:
            weight.assign(size * rng.normal(size=weight.shape))
        h = rng.normal(size=(N, FEATURES))
        found = layer.parameters(keras.ops.convert_to_tensor(h, layer.compute_dtype))
        if name == "factored":
            scales = np.asarray(keras.ops.cast(found["eigenvalues"], "float64"))
            assert np.all(scales.max(-1) / scales.min(-1) < 2)
        else:
            diagonals = [np.diagonal(keras.ops.cast(found[key], "float64"), axis1=-2, axis2=-1) for key in ("r", "r_tilde")]
            assert np.all(diagonals[0] * diagonals[1] > -1)
            assert np.abs(diagonals[0] * diagonals[1]).max() > 0.9  # and the weights are as absurd as they should be
        log_det = layer.forward_and_log_det(rng.normal(size=(N, D)), h)[1]
        assert np.isfinite(np.asarray(keras.ops.cast(log_det, "float64"))).all()


def test_the_inverse_builds_on_first_use(rng):
    flow, z, context = HouseholderFlow(2), rng.normal(size=(3, 4)).astype("float32"), rng.normal(size=(3, 5)).astype("float32")
    before = flow.inverse(z, context)
    np.testing.assert_allclose(flow(before, context), z, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HouseholderFlow(-1), "Expected 0, 1, 2, … Received: -1"),
        (lambda: HouseholderFlow(1.5), "Received: 1.5"),
        (lambda: FactoredFlow(margin=0), r"`margin` must lie in \(0, 1\)"),
        (lambda: SylvesterFlow(form="full"), r"Expected one of \['orthogonal', .* Received: 'full'"),
        (lambda: SylvesterFlow(form="triangular", columns=2), '`columns` is for form="orthogonal"'),
        (lambda: SylvesterFlow(reflections=2), '`reflections` is for form="householder"'),
        (lambda: SylvesterFlow(columns=0), "`columns` must be None or a positive integer. Expected None, 1, 2, 3"),
        (lambda: SylvesterFlow(columns=5).build((None, 4), (None, 3)), "Expected columns ≤ 4. Received: 5"),
        (lambda: HouseholderFlow().build((None, 4), (None, 2, 3)), r"Expected shape \(batch, features\)"),
        (lambda: HouseholderFlow().build((None, None), (None, 3)), "known last axis"),
        (lambda: HouseholderFlow(dtype="int32"), "floating-point"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
