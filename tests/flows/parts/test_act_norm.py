import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref.flows import ActNorm


@pytest.mark.parametrize("shape", [(64, 3), (8, 5, 7, 3)])
def test_is_the_identity_until_it_has_seen_data(rng, dtype, shape):
    x = (rng.normal(size=shape) * [0.01, 1, 300] + [3, -2, 50]).astype(dtype)
    layer = ActNorm(dtype=dtype)
    np.testing.assert_array_equal(layer(x), x)
    assert int(layer.initialized) == 0
    layer.initialize(x)
    assert int(layer.initialized) == 1
    y = np.asarray(layer(x), np.float64)
    axes = tuple(range(len(shape) - 1))
    tolerance = 2e-3 if dtype == "float32" else 1e-10
    np.testing.assert_allclose(y.mean(axis=axes), 0, atol=tolerance)
    np.testing.assert_allclose(y.var(axis=axes), 1, atol=tolerance)
    np.testing.assert_allclose(layer.log_det_jacobian(x), np.full(shape[:-1], np.sum(layer.log_scale)), rtol=1e-5)


def test_call_never_looks_at_data(rng):
    layer = ActNorm()
    x = rng.normal(size=(10, 3)).astype("float32")
    layer.initialize(x)
    before = layer.get_weights()
    layer(5 * x, training=True)
    for a, b in zip(before, layer.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(layer(x[:1]), layer(x)[:1])


@pytest.mark.parametrize("value", [0.0, 0.1, -1e30, 1e-30])
def test_a_constant_channel_stays_finite(rng, dtype, value):
    x = rng.normal(size=(33, 2)).astype(dtype)
    x[:, 1] = value
    layer = ActNorm(dtype=dtype)
    layer.initialize(x)
    assert float(layer.log_scale[1]) == 0
    np.testing.assert_allclose(layer(x)[:, 1], 0, atol=1e-6 * abs(value))
    assert np.isfinite(layer(x)).all()


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e10, 1e30])
def test_tiny_and_huge_channels(rng, size):
    """Their squares leave float32."""
    x = (size * rng.normal(size=(200, 2))).astype("float32")
    layer = ActNorm()
    layer.initialize(x)
    y = layer(x).numpy()
    np.testing.assert_allclose(y.std(axis=0), 1, rtol=1e-4)
    np.testing.assert_allclose(layer.inverse(y), x, rtol=1e-3, atol=1e-5 * size)


def test_one_vector_is_shifted_to_zero():
    layer = ActNorm()
    x = np.array([[3.0, -4.0]], "float32")
    layer.initialize(x)
    np.testing.assert_array_equal(layer(x), np.zeros((1, 2)))
    assert np.isfinite(layer.get_weights()[1]).all()


def test_initializes_inside_a_graph(rng):
    layer = ActNorm()
    layer.build((None, 3))
    x = tf.constant(rng.normal(size=(20, 3)) * 7 + 1, tf.float32)

    @tf.function
    def start(x):
        layer.initialize(x)
        return layer(x)

    y = start(x)
    np.testing.assert_allclose(np.mean(y, axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(np.std(y, axis=0), 1, atol=1e-5)


def test_the_flag_travels_with_the_file(rng, tmp_path):
    layer = ActNorm()
    model = keras.Sequential([keras.Input((3,)), layer])
    path = tmp_path / "m.keras"
    for flag in (0, 1):
        if flag:
            layer.initialize(rng.normal(size=(10, 3)))
        model.save(path)
        loaded = keras.models.load_model(path).layers[0]
        assert int(loaded.initialized) == flag
        np.testing.assert_array_equal(loaded.log_scale, layer.log_scale)
    assert not layer.initialized.trainable
    assert len(layer.trainable_weights) == 2


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(rng, policy):
    layer = ActNorm(dtype=policy)
    x = rng.normal(size=(30, 2)).astype("float32") * 3
    layer.initialize(x)
    assert layer(x).dtype == layer.compute_dtype
    assert layer.shift.dtype == "float32"
    assert np.std(tf.cast(layer(x), tf.float32)) == pytest.approx(1, abs=0.02)


def test_errors():
    with pytest.raises(ValueError, match=r"Expected shape \(batch, ..., d\). Received: \(None, None\)"):
        ActNorm().build((None, None))
    with pytest.raises(ValueError, match=r"Expected no NaN and no infinity. Received: 1 non-finite"):
        ActNorm().initialize([[1.0, np.nan]])
    with pytest.raises(ValueError, match="floating-point"):
        ActNorm(dtype="int32")
