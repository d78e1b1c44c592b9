"""Couplings with a context: the network sees it beside x_a, and nothing else changes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref.flows import AdditiveCoupling, AffineCoupling, LogisticMixtureCoupling, SplineCoupling
from tests.support import assert_agree, relative

COUPLINGS = [AdditiveCoupling, AffineCoupling, LogisticMixtureCoupling, SplineCoupling]


def made(coupling, rng, shape, dtype="float64", **arguments):
    layer = coupling(hidden=4, context=2, dtype=dtype, **arguments)
    layer.build((None, *shape[1:]))
    for weight in layer.weights:
        weight.assign_add(0.5 * rng.normal(size=weight.shape))
    return layer


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("shape", [(3, 5), (3, 2, 2, 3)])
def test_inverts_with_the_same_context_and_not_with_another(rng, coupling, shape):
    layer, x, context = made(coupling, rng, shape), rng.normal(size=shape), rng.normal(size=(3, 2))
    y, log_det = layer.forward_and_log_det(x, context=context)
    assert relative(layer.inverse(y, context), x) < 1e-10
    assert relative(layer.inverse(y, context + 1), x) > 1e-3
    assert_agree(layer(x, context), y)
    assert_agree(layer.log_det_jacobian(x, context), log_det)
    with tf.GradientTape() as tape:
        tensor = tf.constant(x)
        tape.watch(tensor)
        y = layer(tensor, context)
    size = x[0].size
    jacobian = tf.reshape(tape.batch_jacobian(y, tensor), (3, size, size))
    np.testing.assert_allclose(log_det, np.linalg.slogdet(jacobian)[1], rtol=1e-8, atol=1e-10)


def test_the_network_sees_it_beside_x_a(rng):
    """The same for all pixels of an image, or one for every pixel."""
    x, context = rng.normal(size=(2, 3, 3, 4)), rng.normal(size=(2, 2))
    layer = made(AdditiveCoupling, rng, x.shape)
    spread = np.broadcast_to(context[:, None, None], (2, 3, 3, 2))
    expected = x[..., 2:] + layer.network(np.concatenate([x[..., :2], spread], axis=-1)).numpy()
    np.testing.assert_allclose(layer(x, context)[..., 2:], expected, rtol=1e-12)
    np.testing.assert_allclose(layer(x, spread)[..., 2:], expected, rtol=1e-12)


def test_gradients_reach_the_context(rng):
    layer, x = made(AffineCoupling, rng, (3, 4)), rng.normal(size=(3, 4))
    context = tf.constant(rng.normal(size=(3, 2)))
    with tf.GradientTape() as tape:
        tape.watch(context)
        value = tf.reduce_sum(layer.forward_and_log_det(x, context=context)[1])
    gradient, direction = tape.gradient(value, context), rng.normal(size=(3, 2))
    sides = [tf.reduce_sum(layer.log_det_jacobian(x, context + sign * 1e-6 * direction)) for sign in (1, -1)]
    assert float(tf.reduce_sum(gradient * direction)) == pytest.approx(float(sides[0] - sides[1]) / 2e-6, rel=1e-6)


def test_saves_and_loads(rng, tmp_path):
    layer, x, context = made(SplineCoupling, rng, (3, 4), "float32"), rng.normal(size=(3, 4)), rng.normal(size=(3, 2))
    inputs = [keras.Input((4,)), keras.Input((2,))]
    model = keras.Model(inputs, layer(*inputs))
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert_agree(loaded([x, context]), layer(x, context))
    assert loaded.layers[-1].get_config() == layer.get_config()


def test_an_old_configuration_has_none():
    config = AffineCoupling(hidden=3).get_config()
    del config["context"]
    layer = AffineCoupling.from_config(config)
    layer.build((None, 4))
    assert layer.context is None
    assert layer.network.input_shape == (None, 2)


def test_errors(rng):
    layer, x = made(AffineCoupling, rng, (3, 4)), np.zeros((3, 4))
    with pytest.raises(ValueError, match=r"made with context=2. Expected a context of shape \(batch, 2\). Received: none"):
        layer(x)
    with pytest.raises(ValueError, match=r"does not fit .* Expected shape \(batch, 2\). Received: \(3, 3\)"):
        layer.inverse(x, np.zeros((3, 3)))
    plain = AffineCoupling(hidden=4)
    plain.build((None, 4))
    with pytest.raises(ValueError, match=r"context=None. Expected no context. Received: shape \(3, 2\)"):
        plain.forward_and_log_det(x, context=np.zeros((3, 2)))
    for wrong in (0, 2.0, True):
        with pytest.raises(ValueError, match="Expected None, 1, 2, 3, … Received: "):
            AffineCoupling(context=wrong)
