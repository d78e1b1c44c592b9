"""Derivatives of every kind through a general and a symmetric W: eager, in a graph and compiled."""

import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import AuxReflection

WAYS = [
    pytest.param(("free", False), id="free"),
    pytest.param(("spectral", False), id="spectral"),
    pytest.param(("spectral", True), id="XLA", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
]


@pytest.fixture(scope="module", params=WAYS)
def functions(request):
    """(eager, in a graph) of the log-determinant and of the inverse."""
    kernel, jit = request.param
    layer = AuxReflection(kernel=kernel)
    layer.build((None, 3))
    eager = (lambda x: layer.forward_and_log_det(x)[1], layer.inverse)
    return [(function, tf.function(function, autograph=False, jit_compile=jit)) for function in eager]


def _gradient(function, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return tape.gradient(y, x)


def _batch_jacobian(function, x):
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = tf.reshape(function(x), (2, -1))
    return tape.batch_jacobian(y, x)


def _hessian_vector_product(function, x):
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(tf.square(function(x)))
        slope = tape.gradient(total, x)
    return outer.gradient(slope, x, output_gradients=tf.ones_like(slope))


@pytest.mark.slow
@pytest.mark.parametrize("derivative", [_gradient, _batch_jacobian, _hessian_vector_product])
def test_a_graph_has_the_derivatives_of_eager_code(functions, derivative, request):
    if "XLA-_hessian_vector_product" in request.node.name:
        pytest.skip("XLA on a CPU has no second derivative of this loop: «RET_CHECK failure … dynamic_size != nullptr».")
    x = tf.constant(np.random.default_rng(0).normal(size=(2, 3)), tf.float32)
    for eager, graph in functions:
        expected = derivative(eager, x)
        np.testing.assert_allclose(derivative(graph, x), expected, rtol=0, atol=2e-3 * (1 + np.abs(expected).max()))
