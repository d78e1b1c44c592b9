import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref.flows import Squeeze


@pytest.mark.parametrize("factor", [1, 2, 3])
def test_is_space_to_depth(rng, factor):
    x = rng.normal(size=(2, 6, 12, 3)).astype("float32")
    layer = Squeeze(factor)
    y = layer(x)
    np.testing.assert_array_equal(y, x if factor == 1 else tf.nn.space_to_depth(x, factor))
    np.testing.assert_array_equal(layer.inverse(y), x)
    np.testing.assert_array_equal(layer.log_det_jacobian(x), np.zeros(2))


def test_images_of_unknown_size(rng):
    inputs = keras.Input((None, None, 3))
    model = keras.Model(inputs, Squeeze()(inputs))
    assert model.output_shape == (None, None, None, 12)
    for size in (4, 6):
        x = rng.normal(size=(2, size, size, 3)).astype("float32")
        np.testing.assert_array_equal(model(x), tf.nn.space_to_depth(x, 2))
        np.testing.assert_array_equal(model.predict(x, verbose=0), tf.nn.space_to_depth(x, 2))


def test_errors():
    with pytest.raises(ValueError, match=r"Expected multiples of 2. Received: height 3, width 4"):
        Squeeze().build((None, 3, 4, 1))
    with pytest.raises(ValueError, match=r"Expected multiples of 2. Received: height 4, width 5"):
        keras.Sequential([keras.Input((4, 5, 1)), Squeeze()])
    with pytest.raises(ValueError, match=r"Expected a multiple of 4. Received: 6"):
        Squeeze().inverse(np.zeros((1, 2, 2, 6)))
    with pytest.raises(ValueError, match=r"Expected shape \(..., height, width, channels\). Received: \(2, 4\)"):
        Squeeze()(np.zeros((2, 4)))
    with pytest.raises(ValueError, match="Expected 1, 2, 3, … Received: 0"):
        Squeeze(0)
