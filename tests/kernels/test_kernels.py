"""The guarantee of a kernel holds at the start, in the middle and after absurd optimiser steps."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import AuxReflection, initializers, kernels, ops
from keras_auxref.kernels import norms
from tests.support import assert_agree, differences, gradients, orthogonal, pairwise, relative

GUARANTEED = {
    "spectral": lambda: kernels.Spectral(),
    "spectral 0.99": lambda: kernels.Spectral(bound=0.99),
    "relaxed_cayley": lambda: kernels.RelaxedCayley(),
    "relaxed_cayley 0.01": lambda: kernels.RelaxedCayley(margin=0.01),
    "cayley": lambda: kernels.RelaxedCayley(margin=1),
}


def _layer(kernel, d, dtype="float32", **kwargs):
    layer = AuxReflection(kernel=kernel, dtype=dtype, **kwargs)
    layer.build((None, d))
    return layer


@pytest.mark.parametrize(("name", "d", "dtype"), pairwise(GUARANTEED, [1, 2, 12, 33], ["float32", "float64"]))
def test_guarantee_holds_at_the_start_and_after_any_step(rng, dtype, name, d):
    layer = _layer(GUARANTEED[name](), d, dtype)
    assert layer.certificate().invertible
    for size in (0.1, 1e3, 1e8):
        for weight in layer.trainable_weights:
            weight.assign(weight + size * rng.normal(size=weight.shape))
        proof = layer.certificate()
        assert proof.invertible, proof.reason


@pytest.mark.parametrize("name", ["spectral 0.99", "relaxed_cayley 0.01"])  # the test above has all
def test_guarantee_holds_after_training_at_an_absurd_learning_rate(rng, name):
    layer = _layer(GUARANTEED[name](), 6)
    model = keras.Sequential([layer, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e8, clipnorm=1.0), "mse")
    x = rng.normal(size=(64, 6)).astype("float32")
    for weight in layer.trainable_weights:
        weight.assign_add(0.1 * rng.normal(size=weight.shape))
    model.fit(x, x[:, :1] ** 2, epochs=3, verbose=0)
    assert layer.certificate().invertible
    y = rng.normal(size=(50, 6)).astype("float32")
    assert np.abs(layer(layer.inverse(y)) - y).max() < 1e-4


@pytest.mark.parametrize("bound", [0.1, 0.5, 0.9])
def test_spectral_is_the_formula_of_the_paper(rng, dtype, bound):
    v = rng.normal(size=(5, 5))
    w = kernels.Spectral(bound)({"kernel": tf.constant(v, dtype)})
    gram = v @ v.T
    assert relative(w, np.eye(5) + bound * gram / np.linalg.norm(gram, 2)) < 1e-6
    eigenvalues = np.linalg.eigvalsh(np.asarray(w, np.float64))
    assert eigenvalues[0] > 1 - 1e-6
    assert eigenvalues[-1] <= 1 + bound + 1e-7
    assert kernels.Spectral.symmetric


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e25])
def test_spectral_ignores_the_length_of_v(rng, scale):
    v = np.float32(scale) * rng.normal(size=(4, 4)).astype("float32")
    value, gradient = gradients(lambda v: kernels.Spectral()({"kernel": v}), [v], rng.normal(size=(4, 4)))
    assert np.isfinite(value).all()
    assert np.isfinite(gradient).all()
    if scale == 0:
        np.testing.assert_array_equal(value, np.eye(4))


def test_gradients_of_both_kernels_match_finite_differences(rng):
    g = rng.normal(size=(4, 4))
    spectral = kernels.Spectral(0.7)
    v = rng.normal(size=(4, 4))
    a, b = gradients(lambda v: spectral({"kernel": v}), [v], g)[1], differences(lambda v: spectral({"kernel": v}), [v], g)[0]
    assert relative(a, b) < 1e-6
    cayley = kernels.RelaxedCayley(max_skew=2.0)
    for size in (0.05, 5.0):  # inside both bounds, and beyond both
        arguments = [size * rng.normal(size=(4, 4)) for _ in range(2)]
        function = lambda s, k: cayley({"symmetric": s, "skew": k})  # noqa: E731
        for a, b in zip(gradients(function, arguments, g)[1:], differences(function, arguments, g), strict=True):
            assert relative(a, b) < 1e-6


@pytest.mark.parametrize("d", [1, 2, 3, 8, 41])
def test_relaxed_cayley_starts_at_the_orthogonal_map(rng, dtype, d):
    q = orthogonal(d, rng, determinant=(-1) ** d)
    layer = _layer("relaxed_cayley", d, dtype, kernel_initializer=lambda shape, dtype=None: tf.constant(q, dtype))
    x = rng.normal(size=(20, d)).astype(dtype)
    # Angles within 0.02 of zero are moved to 0.02: nothing else is.
    smallest = np.abs(np.angle(np.linalg.eigvals(q))).min()
    allowed = 0.03 if smallest < 0.0203 else (2e-4 if dtype == "float32" else 1e-10)
    assert relative(layer(x), x @ q.T) < allowed
    assert layer.certificate().condition == pytest.approx(1, abs=1e-3)


def test_relaxed_cayley_arranges_the_determinant_by_a_sign(rng):
    q = orthogonal(4, rng, determinant=-1)
    layer = _layer("relaxed_cayley", 4, "float64", kernel_initializer=lambda shape, dtype=None: tf.constant(q, dtype))
    u = np.eye(4) - layer.kernel.numpy()
    np.testing.assert_allclose(u @ u.T, np.eye(4), atol=1e-10)
    assert np.linalg.det(u) == pytest.approx(1)
    np.testing.assert_allclose(u[:, 1:], q[:, 1:], atol=0.05)


def test_relaxed_cayley_starts_next_to_eigenvalue_one(rng):
    """The identity has nothing but eigenvalue 1: the start is as close to it as `max_skew` allows."""
    kernel = kernels.RelaxedCayley(max_skew=20)
    layer = _layer(kernel, 4, "float64", kernel_initializer="identity")
    assert layer.certificate().invertible
    x = rng.normal(size=(5, 4))
    assert relative(layer(x), x) < 0.06


def test_relaxed_cayley_refuses_a_start_that_is_not_orthogonal():
    with pytest.raises(ValueError, match=r"Expected an orthogonal matrix.*Received"):
        _layer("relaxed_cayley", 4, kernel_initializer="ones")


def test_free_is_the_weight_itself():
    layer = _layer("free", 5)
    np.testing.assert_array_equal(layer.kernel, layer.trainable_weights[0])
    assert np.abs(layer.kernel).max() <= 1 / np.sqrt(5)
    assert not layer.certificate().invertible


@pytest.mark.parametrize("name", ["spectral", "relaxed_cayley"])
def test_nan_weights_give_nan_and_no_crash_in_a_graph(name):
    layer = _layer(name, 3)
    for weight in layer.trainable_weights:
        weight.assign(np.full((3, 3), np.nan))
    assert np.isnan(tf.function(layer)(tf.ones([2, 3]))).all()


@pytest.mark.parametrize("make", [*GUARANTEED.values(), lambda: kernels.Free()])
def test_weight_names_are_those_of_the_weights(make):
    kernel = make()
    assert kernel.weight_names == tuple(kernel.initial_weights(3, kernel.default_initializer(), "float32"))
    # What a kernel that does not state them is asked for, also inside of a graph.
    asked = kernels.Kernel.weight_names.fget
    assert asked(kernel) == kernel.weight_names


@pytest.mark.parametrize("make", [*GUARANTEED.values(), lambda: kernels.Free()])
def test_serialisation(make):
    kernel = make()
    again = kernels.get(keras.saving.serialize_keras_object(kernel))
    assert type(again) is type(kernel)
    assert again.get_config() == kernel.get_config()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kernels.Spectral(bound=1.0), "0 < bound < 1. Received: 1.0"),
        (lambda: kernels.Spectral(bound=0), "0 < bound < 1. Received: 0"),
        (lambda: kernels.RelaxedCayley(margin=0), "0 < margin <= 1. Received: 0"),
        (lambda: kernels.RelaxedCayley(max_skew=-1), "positive. Received: -1"),
        (lambda: kernels.get("cayley"), r"Expected.*'free', 'relaxed_cayley', 'spectral'.*Received: 'cayley'"),
        (lambda: kernels.get(3), "Received: 3"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_kernel_of_ones_own_is_a_registered_subclass_and_nothing_else(rng, tmp_path):
    @keras.saving.register_keras_serializable("test_kernels")
    class Diagonal(kernels.Kernel):
        symmetric = True

        def default_initializer(self):
            return keras.initializers.Ones()

        def initial_weights(self, d, initializer, dtype):
            return {"diagonal": initializer((d,), dtype=dtype)}

        def __call__(self, weights):
            return keras.ops.diag(weights["diagonal"])

    model = keras.Sequential([keras.Input((3,)), AuxReflection(kernel=Diagonal())])
    x = rng.normal(size=(4, 3)).astype("float32")
    np.testing.assert_allclose(model(x), -x, rtol=1e-6)
    model.save(tmp_path / "m.keras")
    assert_agree(keras.models.load_model(tmp_path / "m.keras")(x), model(x))
    assert ops.reflect(x, model.layers[0].kernel).shape == (4, 3)


def test_starts_at_its_orthogonal_matrix_also_where_the_norm_is_a_bound(monkeypatch):
    """K is capped below what the bound could cut: a plane next to the eigenvalue 1 moves, and nothing else."""
    monkeypatch.setattr(norms, "EXACT_UP_TO", 0)
    start = initializers.FixedPointFree(seed=2)
    for max_skew in (50.0, 0.3):
        layer = _layer(kernels.RelaxedCayley(max_skew=max_skew), 24, "float64", kernel_initializer=start)
        k = layer.weights[1].numpy()
        np.testing.assert_allclose(np.linalg.inv(layer.kernel), 0.5 * np.eye(24) + k, atol=1e-8)
