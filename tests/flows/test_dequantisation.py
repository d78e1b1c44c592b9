"""Variational dequantisation: its density against automatic differentiation, its bound against integrals."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import Glow, export_saved_model
from keras_auxref.flows import VariationalDequantisation
from keras_auxref.flows.dequantisation import check_dequantisation
from tests.flows.support import disturb, images
from tests.support import assert_agree

SHAPE = (4, 4, 3)


def small(shape=SHAPE, **kwargs):
    return Glow(shape, **{"levels": 1, "steps": 1, "hidden": 4, "seed": 1, "dequantisation": "variational", **kwargs})


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_log_density_is_that_of_automatic_differentiation(rng, steps):
    """v is uniform, so that u = u(v) has the density 1/|det ∂u/∂v|."""
    layer = VariationalDequantisation(hidden=3, steps=steps, dtype="float64")
    layer.build((None, 2, 4, 2))
    disturb(layer, size=0.2)
    image, v = rng.uniform(size=(2, 2, 4, 2)), tf.constant(rng.uniform(size=(2, 2, 4, 2)))
    with tf.GradientTape() as tape:
        tape.watch(v)
        u, log_q = layer(image, v)
    jacobian = tape.batch_jacobian(u, v).numpy().reshape(2, 16, 16)
    np.testing.assert_allclose(log_q, -np.linalg.slogdet(jacobian)[1], rtol=1e-9)
    assert np.abs(log_q).min() > 0.1
    assert ((u > 0) & (u < 1)).numpy().all()
    other = layer(1 - image, v)[0]
    assert np.abs(other - u).max() > 1e-3  # it sees the image


@pytest.mark.parametrize("steps", [1, 2])
def test_starts_as_uniform_noise(rng, dtype, steps):
    layer = VariationalDequantisation(hidden=3, steps=steps, dtype=dtype)
    v = rng.uniform(size=(3, *SHAPE)).astype(dtype)
    v[0, 0, 0, 0], v[0, 0, 0, 1] = 0, 1 - np.finfo(dtype).eps  # the least and the largest draw
    u, log_q = layer(rng.uniform(size=(3, *SHAPE)).astype(dtype), v)
    np.testing.assert_allclose(u, v, atol=2 * np.finfo(dtype).eps)
    np.testing.assert_array_equal(log_q, np.zeros(3))


def test_the_bound_starts_as_that_of_uniform_noise():
    x = images(6, SHAPE)
    variational, uniform = small(dtype="float64"), small(dtype="float64", dequantisation="uniform")
    for model in (variational, uniform):
        model.initialize(x)
    np.testing.assert_allclose(variational.bits_per_dim(x), uniform.bits_per_dim(x), rtol=1e-12)
    assert_agree(variational.log_prob(x), uniform.log_prob(x))


def test_bits_are_log_q_less_log_p(rng):
    """From the parts, with TFP's distribution for log p; and log_prob stays the density."""
    model, x = disturb(small(dtype="float64", bits=3), size=0.2), rng.integers(0, 8, (3, *SHAPE))
    noise = tf.random.stateless_uniform(x.shape, (0, 0), dtype="float64", alg="philox")
    u, log_q = model.dequantiser(x / 7, noise)
    expected = (48 * np.log(7) + log_q - model.distribution().log_prob((x - 0.5 + u) / 7)) / (48 * np.log(2))
    np.testing.assert_allclose(model.bits_per_dim(x), expected, rtol=1e-12)
    np.testing.assert_allclose(model.bits_per_dim(x / 7), expected, rtol=1e-12)
    np.testing.assert_allclose(model.log_prob(x), model.distribution().log_prob(x / 7), rtol=1e-12)
    assert np.abs(log_q).min() > 0.1


def _quadrature(points):
    """Nodes of shape (points⁴, 2, 2, 1) in the unit cube, and their weights, by Gauss and Legendre."""
    nodes, weights = np.polynomial.legendre.leggauss(points)
    nodes, weights = (nodes + 1) / 2, weights / 2
    grid = np.array(list(itertools.product(nodes, repeat=4))).reshape(-1, 2, 2, 1)
    return grid, np.prod(list(itertools.product(weights, repeat=4)), axis=-1)


@pytest.mark.slow
def test_the_bound_lies_between_the_truth_and_uniform_noise():
    """Four pixels of one bit: P(k) and the expectations are integrals over a cube, computed by quadrature."""
    model = disturb(small((2, 2, 1), bits=1, dtype="float64"), size=0.3)
    for network in model.dequantiser.networks:  # q starts as uniform again
        for variable in network.trainable_variables[-2:]:
            variable.assign(tf.zeros_like(variable))
    ks = np.array([[0, 0, 0, 0], [1, 0, 1, 1]]).reshape(2, 2, 2, 1)
    nodes, weights = _quadrature(8)

    def true_bits(k):
        density = np.exp(model.log_prob(k - 0.5 + nodes).numpy())
        return -np.log2(np.sum(weights * density)) / 4

    def bound(k, v=nodes, w=weights):
        u, log_q = model.dequantiser(np.broadcast_to(k, v.shape).astype("float64"), v)
        return tf.reduce_sum(w * (log_q - model._log_prob(k - 0.5 + u))) / (4 * np.log(2))

    truth, uniform = [true_bits(k) for k in ks], [float(bound(k)) for k in ks]
    assert all(u > t + 1e-3 for u, t in zip(uniform, truth, strict=True))
    optimizer, variables = keras.optimizers.Adam(0.02), model.dequantiser.trainable_variables
    few = _quadrature(4)

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            loss = sum(bound(k, *few) for k in ks)
        optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)

    optimizer.build(variables)
    for _ in range(60):
        step()
    learned = [float(bound(k)) for k in ks]
    for t, u, v in zip(truth, uniform, learned, strict=True):
        assert t < v < u
        assert v - t < 0.5 * (u - t)  # most of the gap is closed


@pytest.mark.slow
def test_trains_saves_loads_and_is_served(tmp_path):
    model, x = small(), images(8, SHAPE)
    before = [variable.numpy() for variable in model.dequantiser.trainable_variables]
    model.fit(x, epochs=2, verbose=0)
    changes = [np.abs(a - b).max() for a, b in zip(before, model.dequantiser.trainable_variables, strict=True)]
    assert max(changes) > 1e-6  # the gradient arrives
    model.save(tmp_path / "flow.keras")
    again = keras.models.load_model(tmp_path / "flow.keras")
    assert again.get_config() == model.get_config()
    assert_agree(again.bits_per_dim(x), model.bits_per_dim(x))
    assert model.evaluate(x, verbose=0) == pytest.approx(model.evaluate(x, verbose=0), rel=1e-6)
    served = tf.saved_model.load(str(export_saved_model(model, tmp_path / "served"))).signatures
    assert set(served) == {"serving_default", "log_prob", "encode", "decode", "sample"}
    found = served["log_prob"](images=(x / 255).astype("float32"))["log_prob"]
    np.testing.assert_allclose(found, model.log_prob(x), atol=5e-4)


def test_impossible_images_have_no_probability_inside_of_a_graph():
    model = disturb(small())
    x = tf.constant([[[[7] * 3] * 4] * 4, [[[256] * 3] * 4] * 4])
    bits = tf.function(model.bits_per_dim, autograph=False)(x)
    assert np.isfinite(bits[0])
    assert np.isposinf(bits[1])


def test_bad_arguments_say_what_was_expected():
    with pytest.raises(ValueError, match=r"Expected one of \['uniform', 'variational'\]. Received: 'flow'"):
        check_dequantisation("flow")
    for arguments, message in (({"hidden": 0}, "hidden"), ({"steps": 1.5}, "steps"), ({"bound": -1.0}, "bound")):
        with pytest.raises(ValueError, match=rf"`{message}`.* Expected .* Received: "):
            VariationalDequantisation(**arguments)
    with pytest.raises(ValueError, match="float32 or float64"):
        VariationalDequantisation(dtype="mixed_float16")
