import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref.flows import AffineCoupling
from tests.support import assert_agree


class Counting(keras.layers.Dense):
    """Counts its own calls."""

    calls = 0

    def call(self, inputs):
        Counting.calls += 1
        return super().call(inputs)


@pytest.mark.parametrize("shape", [(3, 2), (3, 5), (1, 4, 6, 3), (2, 1, 1, 2)])
def test_starts_as_the_identity(rng, dtype, shape):
    x = rng.normal(size=shape).astype(dtype)
    layer = AffineCoupling(hidden=4, dtype=dtype)
    np.testing.assert_array_equal(layer(x), x)
    np.testing.assert_array_equal(layer.log_det_jacobian(x), np.zeros(shape[0]))
    assert layer.event_ndims == len(shape) - 1
    assert {weight.dtype for weight in layer.weights} == {dtype}


@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 4, 3)])
def test_is_the_formula(rng, shape):
    """The first half stays; the second is moved by what the network says about the first."""
    x = rng.normal(size=shape)
    layer = AffineCoupling(hidden=4, bound=1.3, dtype="float64")
    layer(x)
    for weight in layer.weights:
        weight.assign_add(0.3 * rng.normal(size=weight.shape))
    y, log_det = layer.forward_and_log_det(x)
    size = shape[-1] // 2
    output = layer.network(x[..., :size]).numpy()
    shift, raw = np.split(output, 2, axis=-1)
    log_s = 1.3 * np.tanh(raw / 1.3)
    np.testing.assert_array_equal(y[..., :size], x[..., :size])
    np.testing.assert_allclose(y[..., size:], (x[..., size:] + shift) * np.exp(log_s), rtol=1e-12)
    np.testing.assert_allclose(log_det, log_s.reshape(shape[0], -1).sum(axis=1), rtol=1e-10)
    assert np.abs(log_s).max() > 0.1


def test_float64_is_not_rounded_on_the_way(rng):
    x = rng.normal(size=(2, 4, 4, 2))
    layer = AffineCoupling(hidden=4, dtype="float64")
    layer(x)
    for weight in layer.weights:
        weight.assign(rng.normal(size=weight.shape))
    nudged = x.copy()
    nudged[..., 0] += 1e-12
    change = np.abs(layer(nudged) - layer(x))[..., 1].max()
    assert 1e-14 < change < 1e-9


def test_the_default_network(rng):
    dense, image = AffineCoupling(hidden=7), AffineCoupling(hidden=7)
    dense.build((None, 5))
    image.build((None, 8, 8, 5))
    assert [weight.shape for weight in dense.weights] == [(2, 7), (7,), (7, 7), (7,), (7, 6), (6,)]
    assert [weight.shape for weight in image.weights] == [(3, 3, 2, 7), (7,), (1, 1, 7, 7), (7,), (3, 3, 7, 6), (6,)]


def test_one_pass_of_the_network(rng):
    layer, x = AffineCoupling(Counting(4)), rng.normal(size=(2, 4)).astype("float32")
    layer(x)
    for method in (layer, layer.forward_and_log_det, layer.inverse, layer.log_det_jacobian):
        Counting.calls = 0
        method(x)
        assert Counting.calls == 1


def test_a_network_of_any_rank_saves_and_loads(rng, tmp_path):
    network = keras.Sequential([keras.layers.Conv1D(5, 3, padding="same", activation="tanh"), keras.layers.Dense(4)])
    layer, x = AffineCoupling(network), rng.normal(size=(2, 6, 4)).astype("float32")
    model = keras.Sequential([keras.Input((6, 4)), layer])
    assert layer.event_ndims == 2
    assert layer.log_det_jacobian(x).shape == (2,)
    np.testing.assert_allclose(layer.inverse(layer(x)), x, atol=1e-5)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert_agree(loaded(x), model(x))
    assert np.abs(model(x) - x).max() > 1e-3


def test_no_single_coupling_overflows(rng):
    network = keras.layers.Dense(2, kernel_initializer="zeros", bias_initializer=keras.initializers.Constant(1e30))
    layer = AffineCoupling(network)
    assert float(layer.forward_and_log_det(np.zeros((1, 2), "float32"))[1][0]) == pytest.approx(2)


def test_learns_a_conditional_scale(rng):
    """x_b ~ N(0, exp(x_a)²): the flow finds log s = −x_a, which no linear map can."""
    a = rng.normal(size=(512, 1)).clip(-1.5, 1.5)
    x = np.concatenate([a, np.exp(a) * rng.normal(size=(512, 1))], axis=1).astype("float32")
    layer = AffineCoupling(hidden=16)
    layer.build((None, 2))
    optimizer = keras.optimizers.Adam(0.02)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            y, log_det = layer.forward_and_log_det(x)
            loss = tf.reduce_mean(0.5 * tf.reduce_sum(tf.square(y), axis=-1) - log_det)
        optimizer.apply(tape.gradient(loss, [w.value for w in layer.trainable_weights]), layer.trainable_weights)
        return loss

    losses = [float(step()) for _ in range(150)]
    assert losses[-1] < losses[0] - 0.5
    slope = np.polyfit(a[:, 0], layer.log_det_jacobian(x), 1)[0]
    assert slope == pytest.approx(-1, abs=0.15)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(rng, policy):
    layer, x = AffineCoupling(hidden=4, dtype=policy), rng.normal(size=(2, 4, 4, 2)).astype("float32")
    y = layer(x)
    assert y.dtype == layer.compute_dtype
    assert {weight.dtype for weight in layer.weights} == {"float32"}


def test_images_of_unknown_size(rng):
    inputs = keras.Input((None, None, 3))
    layer = AffineCoupling(hidden=4)
    model = keras.Model(inputs, layer(inputs))
    for size in (1, 5):
        assert model(np.zeros((2, size, size, 3))).shape == (2, size, size, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"network": lambda x: x}, "Expected a `keras.layers.Layer`"),
        ({"hidden": 0}, "Expected 1, 2, 3, … Received: 0"),
        ({"bound": 0}, "Expected 0 < bound < ∞. Received: 0"),
        ({"bound": float("inf")}, "Received: inf"),
        ({"dtype": "int32"}, "floating-point"),
    ],
)
def test_errors_at_construction(arguments, message):
    with pytest.raises(ValueError, match=message):
        AffineCoupling(**arguments)


def test_errors_at_build():
    with pytest.raises(ValueError, match=r"Expected a last axis of size ≥ 2. Received: 1"):
        AffineCoupling().build((None, 4, 4, 1))
    with pytest.raises(ValueError, match=r"Expected an input of rank 2 or 4. Received: rank 3"):
        AffineCoupling().build((None, 5, 4))
    with pytest.raises(ValueError, match=r"Expected \(None, 6\) for an input of shape \(None, 2\). Received: \(None, 4\)"):
        AffineCoupling(keras.layers.Dense(4)).build((None, 5))
    with pytest.raises(ValueError, match=r"Expected \(None, 4, 4, 4\) .* Received: \(None, 2, 2, 4\)"):
        AffineCoupling(keras.layers.Conv2D(4, 3)).build((None, 4, 4, 4))


@pytest.mark.parametrize("shape", [(3, 6), (2, 4, 4, 6)])
@pytest.mark.parametrize("norm", [True, False])
def test_only_normalised_networks_do_not_grow_with_their_input(rng, shape, norm):
    """Otherwise a flow scales an unusual image up, the larger image even more in the next step, and so on."""
    x = rng.normal(size=shape)
    layer = AffineCoupling(hidden=16, norm=norm, dtype="float64")
    layer(x)
    for weight in layer.weights:
        weight.assign_add(0.3 * rng.normal(size=weight.shape))
    usual, large = (np.abs(layer.network(factor * x[..., :3])).max() for factor in (10.0, 1000.0))
    assert (0.5 < large / usual < 2) if norm else large / usual > 30
