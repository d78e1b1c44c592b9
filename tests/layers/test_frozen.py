"""A frozen model computes what depends on weights once, and answers as before."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref.flows import InvertibleDense
from keras_auxref.layers import AuxReflection, OrthogonalDense, OrthogonalRNN, SVDDense
from keras_auxref.layers.frozen import frozen

LAYERS = {
    "free": lambda: AuxReflection(),
    "spectral": lambda: AuxReflection("spectral"),
    "branch": lambda: AuxReflection(track_branch=True),
    "householder": lambda: OrthogonalDense("householder"),
    "two reflections": lambda: OrthogonalDense("householder", reflections=2),
    "cayley": lambda: OrthogonalDense("cayley"),
    "exp": lambda: OrthogonalDense("exp"),
    "dense": lambda: InvertibleDense(),
}


@pytest.mark.parametrize(("name", "dtype"), [(name, ("float32", "float64")[i % 2]) for i, name in enumerate(LAYERS)])
def test_every_method_answers_as_before(name, rng, dtype):
    layer = LAYERS[name]()
    layer = type(layer).from_config({**layer.get_config(), "dtype": dtype})
    x = rng.normal(size=(5, 2, 6)).astype(dtype)
    methods = (layer.__call__, layer.inverse, layer.log_det_jacobian, lambda x: layer.forward_and_log_det(x)[1])
    live = [method(x).numpy() for method in methods]
    with frozen(layer):
        eager = [method(x).numpy() for method in methods]
        graphs = tf.function(lambda x: [method(x) for method in methods], autograph=False)(x)
    tolerance = 1e-5 if dtype == "float32" else 1e-10
    for values in (eager, graphs, [method(x).numpy() for method in methods]):
        for value, expected in zip(values, live, strict=True):
            np.testing.assert_allclose(value, expected, rtol=tolerance, atol=tolerance)


def test_nothing_is_computed_twice_or_without_need(monkeypatch):
    layer, calls = AuxReflection("spectral"), []
    layer.build((None, 4))
    compute = layer._compute_kernel
    monkeypatch.setattr(layer, "_compute_kernel", lambda: calls.append(1) or compute())
    x = np.ones((2, 4), "float32")
    with frozen(layer, keep=lambda tensor: calls.append(tensor.shape) or tensor):
        for _ in range(3):
            layer(x)
        assert calls == [1, (4, 4)]  # W, and no factorisation: nothing has asked for one
        for _ in range(3):
            layer.inverse(x)
        assert calls.count(1) == 1
    assert not layer.is_frozen
    layer(x)
    assert calls.count(1) == 2


def test_a_model_is_frozen_with_all_its_parts():
    inner = keras.Sequential([keras.Input((4,)), SVDDense(map="cayley")])
    model = keras.Sequential([keras.Input((3, 4)), OrthogonalRNN(4, "exp"), inner])
    parts = [model.layers[0].cell.transition_map, inner.layers[0].u, inner.layers[0].v]
    with frozen(model):
        assert all(part.is_frozen for part in parts)
        with frozen(inner):
            pass
        assert all(part.is_frozen for part in parts)
    assert not any(part.is_frozen for part in parts)


def test_a_singular_matrix_has_no_inverse():
    layer = InvertibleDense(kernel_initializer="ones")
    layer.build((None, 3))
    with frozen(layer):
        assert np.isnan(layer.inverse(np.ones((2, 3), "float32"))).all()
        assert np.isneginf(layer.log_det_jacobian(np.ones((2, 3), "float32"))).all()
