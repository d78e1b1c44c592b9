"""FactoredReflection: y = U g(Vᵀx), a bijection for every value of its weights. The contract of all layers is elsewhere."""

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import FactoredReflection, export_saved_model, ops
from keras_auxref.initializers import Cayley, FixedPointFree, ReflectionOf
from keras_auxref.layers.frozen import frozen
from tests.support import assert_agree, orthogonal, pairwise, relative

MAPS = ("householder", "cayley", "exp")
SIDES = ("both", "left", "right")
ROOT = Path(__file__).parents[2]


def built(d, rng=None, size=1.0, **arguments):
    """A layer of d dimensions; moved away from its start where there is a generator."""
    layer = FactoredReflection(**arguments)
    layer.build((None, d))
    for weight in layer.trainable_weights if rng is not None else []:
        weight.assign_add(size * rng.normal(size=weight.shape))
    return layer


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("map", MAPS)
def test_starts_at_the_given_orthogonal_map(rng, map, sides):
    for d in (1, 2, 7):
        q = orthogonal(d, rng, determinant=1)
        layer = built(d, map=map, sides=sides, kernel_initializer=q, dtype="float64")
        x = rng.normal(size=(5, d))
        np.testing.assert_allclose(layer(x), x @ q.T, atol=1e-12)
        np.testing.assert_allclose(layer.log_det_jacobian(x), 0, atol=1e-12)
        np.testing.assert_allclose(layer.left @ tf.transpose(layer.right), q, atol=1e-12)
        np.testing.assert_array_equal(layer.eigenvalues, np.ones(d))


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("map", MAPS)
def test_computes_what_ops_compute(rng, map, sides):
    layer, x = built(6, rng, map=map, sides=sides, dtype="float64"), rng.normal(size=(2, 3, 6))
    parts = layer.left, layer.right, layer.eigenvalues
    y, log_det = layer.forward_and_log_det(x)
    expected = ops.factored_reflect_and_log_det(x, *parts)
    np.testing.assert_allclose(y, expected[0], rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(log_det, expected[1], rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(layer.inverse(y), x, rtol=1e-10, atol=1e-11)
    assert len(layer.trainable_weights) == (3 if sides == "both" else 2)
    for side in ("left", "right"):
        if sides not in ("both", side):
            np.testing.assert_array_equal(getattr(layer, side), np.eye(6))
    # The auxiliary reflection that it is made of.
    np.testing.assert_allclose(-ops.reflect(x, layer.kernel) @ layer.right @ tf.transpose(layer.left), y, atol=1e-11)
    c = 2 * np.einsum("...i,ij,...j->...", x, layer.kernel, x) / np.square(x @ np.asarray(layer.kernel)).sum(-1)
    np.testing.assert_allclose(layer.coefficient(x), c, rtol=1e-11)


@pytest.mark.parametrize("start", [None, "orthogonal", "identity", Cayley(seed=1), ReflectionOf(FixedPointFree(seed=1))])
def test_starts(start):
    layer = built(4, kernel_initializer=start)
    q = (layer.left @ tf.transpose(layer.right)).numpy()
    np.testing.assert_allclose(q @ q.T, np.eye(4), atol=1e-5)
    if start == "identity":
        np.testing.assert_allclose(q, np.eye(4), atol=1e-5)
    again = FactoredReflection.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()


@pytest.mark.parametrize("map", MAPS)
def test_default_start_is_one_that_the_map_reaches(map):
    for seed in range(4):
        keras.utils.set_random_seed(seed)
        assert built(3, map=map).certificate().invertible


@pytest.mark.parametrize(("size", "margin", "dtype"), pairwise([0.1, 10.0, 1e8, 1e30], [1e-5, 0.1, 0.9], ["float32", "float64"]))
def test_certificate_holds_for_every_value_of_the_weights(rng, dtype, margin, size):
    layer = built(8, rng, size, margin=margin, dtype=dtype)
    certificate = layer.certificate()
    assert certificate.invertible, certificate
    assert 1 <= certificate.condition <= 2 ** (1 - margin) * (1 + 1e-6)
    assert certificate.condition < 2
    x = rng.normal(size=(400, 8)).astype(dtype)
    c = layer.coefficient(x).numpy()
    assert certificate.bracket[0] * (1 - 1e-5) <= c.min() <= c.max() <= certificate.bracket[1] * (1 + 1e-5)
    y = layer(x)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-4)
    # At κ = 1.99999 an error of y may grow to 2e5 times its size in x, but not what comes back.
    assert relative(layer(layer.inverse(y)), y) < (1e-4 if dtype == "float32" else 1e-12)


def test_certificate_holds_after_steps_of_training_of_any_size(rng):
    x = rng.normal(size=(64, 6)).astype("float32") * [1, 2, 3, 4, 5, 6]
    for rate in (0.1, 1e4, 1e8):
        layer = built(6)
        for _ in range(5):
            with tf.GradientTape() as tape:
                y, log_det = layer.forward_and_log_det(x)
                loss = tf.reduce_mean(tf.reduce_sum(tf.square(y - 1) * [1, 3, 1, 3, 1, 3], -1) - log_det)
            for weight, g in zip(layer.trainable_weights, tape.gradient(loss, layer.trainable_weights), strict=True):
                weight.assign_sub(rate * g)
        certificate = layer.certificate()
        assert certificate.invertible
        assert certificate.condition > 1.001


@pytest.mark.parametrize(("map", "weight", "value"), pairwise(MAPS, [0, 1, 2], [np.nan, np.inf]))
def test_weights_that_are_not_finite(rng, map, weight, value):
    layer, x = built(4, rng, map=map), rng.normal(size=(3, 4)).astype("float32")
    variable = layer.trainable_weights[weight]
    broken = variable.numpy()
    broken[(0,) * broken.ndim] = value
    variable.assign(broken)
    certificate = layer.certificate()
    assert not certificate.invertible
    assert "finite" in certificate.reason
    results = [layer(x), layer.inverse(x)]
    if variable is not layer.left_map.kernel:  # on which the log-determinant does not depend
        results.append(layer.log_det_jacobian(x))
    for result in results:
        assert np.isnan(result).any(axis=-1).all()


def test_certificate_looks_at_the_values_and_does_not_trust_the_form(rng, monkeypatch):
    layer = built(4, rng)
    monkeypatch.setattr(FactoredReflection, "eigenvalues", property(lambda self: tf.constant([1.0, 1.5, 1.0, 2.0])))
    assert not layer.certificate().invertible
    monkeypatch.setattr(FactoredReflection, "eigenvalues", property(lambda self: tf.constant([1.0, 1.5, 1.0, 1.99])))
    assert layer.certificate().invertible
    monkeypatch.setattr(FactoredReflection, "left", property(lambda self: tf.ones((4, 4))))
    assert not layer.certificate().invertible


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16", "bfloat16"])
def test_half_precision_computes_with_what_is_certified(rng, policy):
    layer = built(16, rng, dtype=policy)
    assert all(weight.dtype == "float32" for weight in layer.weights)
    x = tf.cast(rng.normal(size=(64, 16)), layer.compute_dtype)
    y = layer(x)
    assert y.dtype == layer.compute_dtype
    certificate = layer.certificate()
    assert certificate.invertible
    scales = layer.eigenvalues.numpy()
    assert scales.dtype == "float32"
    assert certificate.condition == scales.max().astype("float64") / scales.min()
    expected = ops.factored_reflect(tf.cast(x, "float32"), layer.left, layer.right, scales)
    assert_agree(y, tf.cast(expected, y.dtype))
    back = tf.cast(layer.inverse(y), "float32")
    assert relative(back, tf.cast(x, "float32")) < (1e-2 if "16" in policy and "b" not in policy else 0.08)


def test_large_d_applies_reflections_without_forming_matrices(rng):
    layer = built(200, rng, 0.1)
    x = rng.normal(size=(3, 200)).astype("float32")
    assert layer._applies_reflections(x.shape)
    assert layer._applies_reflections((None, 200))
    assert not layer._applies_reflections((400, 200))
    assert not layer._applies_reflections((None, 48))
    y, log_det = layer.forward_and_log_det(x)
    expected = ops.factored_reflect_and_log_det(x, layer.left, layer.right, layer.eigenvalues)
    np.testing.assert_allclose(y, expected[0], atol=3e-5)
    np.testing.assert_allclose(log_det, expected[1], atol=1e-4)
    np.testing.assert_allclose(layer.inverse(y), x, atol=5e-5)


def test_frozen_layer_takes_matrices_as_constants(rng):
    layer, x = built(6, rng), rng.normal(size=(3, 6)).astype("float32")
    y = layer(x)
    with frozen(layer):
        traced = tf.function(layer.inverse).get_concrete_function(tf.TensorSpec([None, 6]))
    names = {operation.type for operation in traced.graph.get_operations()}
    assert not names & {"MatrixTriangularSolve", "ReadVariableOp", "Tanh"}
    np.testing.assert_allclose(traced(y), x, atol=1e-5)


def test_exports_for_plain_tensorflow(rng, tmp_path):
    inputs = keras.Input((5, 4), name="x")
    model = keras.Model(inputs, FactoredReflection()(inputs))
    path = export_saved_model(model, tmp_path / "m")
    x = rng.normal(size=(3, 5, 4)).astype("float32")
    loaded = tf.saved_model.load(str(path)).signatures["serving_default"](x=tf.constant(x))
    np.testing.assert_allclose(next(iter(loaded.values())), model(x), atol=1e-6)


def test_trains_in_a_model_with_dynamic_batches(rng):
    model = keras.Sequential([keras.Input((None, 6)), FactoredReflection(), keras.layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=True)
    x = rng.normal(size=(10, 3, 6)).astype("float32")
    before = model.layers[0].exponents.numpy()
    model.fit(x, x[..., :1], batch_size=4, verbose=0)
    assert np.abs(model.layers[0].exponents.numpy() - before).max() > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"map": "qr"}, r"map.*Expected one of.*Received: 'qr'"),
        ({"sides": "top"}, r"Expected one of.*'both'.*Received: 'top'"),
        ({"margin": 0.0}, r"margin.*Received: 0.0"),
        ({"margin": 1.0}, "margin"),
        ({"margin": -0.1}, "margin"),
        ({"margin": float("nan")}, "margin"),
        ({"margin": "small"}, "margin"),
        ({"kernel_initializer": np.ones((3, 3))}, r"orthogonal.*Received"),
        ({"kernel_initializer": np.ones((3, 2))}, r"orthonormal.*Received.*shape \(3, 2\)"),
        ({"dtype": "int32"}, "floating-point"),
    ],
)
def test_bad_arguments_say_what_was_expected(arguments, message):
    with pytest.raises(ValueError, match=message):
        FactoredReflection(**arguments)


@pytest.mark.parametrize(
    ("arguments", "shape", "message"),
    [
        ({}, (3,), r"Expected shape \(batch, ..., d\)"),
        ({}, (2, None), "known last axis"),
        ({"kernel_initializer": "glorot_uniform"}, (None, 4), "orthogonal"),
        ({"kernel_initializer": np.eye(3)}, (None, 4), r"Expected shape \(4, 4\)"),
        ({"map": "exp", "kernel_initializer": np.diag([1.0, -1.0])}, (None, 2), "Received"),
    ],
)
def test_bad_starts_are_refused_at_build(arguments, shape, message):
    with pytest.raises(ValueError, match=message):
        FactoredReflection(**arguments).build(shape)


def test_bad_inputs(rng):
    layer = built(4)
    with pytest.raises(ValueError, match="expected axis -1"):
        layer(np.ones((2, 5), "float32"))
    with pytest.raises(ValueError, match="min_ndim=2"):
        layer(np.ones(4, "float32"))
    with pytest.raises(ValueError, match="real numbers"):
        layer(np.ones((2, 4), "complex64"))
    for name in ("left", "right", "eigenvalues", "kernel"):
        with pytest.raises(ValueError, match="has not been built"):
            getattr(FactoredReflection(), name)
    with pytest.raises(ValueError, match="has not been built"):
        FactoredReflection().certificate()


OTHER_BACKEND = """
import os, sys
os.environ["KERAS_BACKEND"] = sys.argv[1]
import keras, numpy as np
from keras_auxref.layers.factored_reflection import FactoredReflection
x = np.random.default_rng(0).normal(size=(64, 5)).astype("float32")
for sides, map in (("both", "householder"), ("right", "cayley")):
    layer = FactoredReflection(map, sides)
    model = keras.Sequential([keras.Input((5,)), layer, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(x, x[:, :1], verbose=0, epochs=2)
    y, log_det = layer.forward_and_log_det(x)
    back = keras.ops.convert_to_numpy(layer.inverse(y))
    assert np.abs(back - x).max() < 1e-5, np.abs(back - x).max()
    assert np.abs(keras.ops.convert_to_numpy(log_det)).max() > 0
    assert layer.certificate().invertible and layer.certificate().condition > 1
print("right")
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_other_backends(backend):
    pytest.importorskip(backend)
    done = subprocess.run([sys.executable, "-c", OTHER_BACKEND, backend], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["right"], done.stderr[-3000:]


@pytest.mark.slow
def test_map_and_inverse_convert_to_onnx(rng, tmp_path):
    """No factorisation and no loop over data: unlike for other kernels, the inverse is made of operations that ONNX has."""
    onnxruntime, tf2onnx = pytest.importorskip("onnxruntime"), pytest.importorskip("tf2onnx")
    layer, x = built(4, rng), rng.normal(size=(3, 4)).astype("float32")
    y = layer(x).numpy()
    for name, function, given, expected in (("forward", layer.call, x, y), ("inverse", layer.inverse, y, x)):
        signature = [tf.TensorSpec([None, 4], name="vectors")]
        with frozen(layer, keep=np.asarray):
            traced = tf.function(function, input_signature=signature, autograph=False)
            tf2onnx.convert.from_function(traced, input_signature=signature, output_path=str(tmp_path / f"{name}.onnx"))
        session = onnxruntime.InferenceSession(tmp_path / f"{name}.onnx")
        np.testing.assert_allclose(session.run(None, {"vectors": given})[0], expected, atol=1e-5)
