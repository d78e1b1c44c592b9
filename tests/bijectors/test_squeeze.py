import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import bijectors


@pytest.mark.parametrize("factor", [2, 3])
def test_is_space_to_depth(rng, factor):
    x = rng.normal(size=(2, 6, 12, 3))
    y = bijectors.Squeeze(factor).forward(x)
    np.testing.assert_array_equal(y, tf.nn.space_to_depth(x, factor))
    np.testing.assert_array_equal(bijectors.Squeeze(factor).inverse(tf.identity(y)), x)


def test_sizes_unknown_while_tracing(rng):
    bijector = bijectors.Squeeze()

    @tf.function(input_signature=[tf.TensorSpec([None, None, None, None], tf.float64)])
    def both(x):
        y = bijector.forward(x)
        return y, bijector.inverse(tf.identity(y))

    x = rng.normal(size=(2, 4, 6, 3))
    y, back = both(x)
    np.testing.assert_array_equal(y, tf.nn.space_to_depth(x, 2))
    np.testing.assert_array_equal(back, x)
    assert bijector.forward_event_shape([None, 4, 3]).as_list() == [None, 2, 12]
    assert bijector.forward_event_shape(tf.TensorShape(None)).rank is None
    assert bijector.inverse_event_shape(tf.TensorShape(None)).rank is None


def test_a_factor_of_one_is_the_identity(rng):
    x = rng.normal(size=(1, 3, 5, 2))
    np.testing.assert_array_equal(bijectors.Squeeze(1).forward(x), x)


def test_errors():
    with pytest.raises(ValueError, match=r"Expected multiples of 2. Received: height 3, width 4"):
        bijectors.Squeeze().forward(tf.zeros((1, 3, 4, 1)))
    with pytest.raises(ValueError, match=r"Expected a multiple of 4. Received: 3"):
        bijectors.Squeeze().inverse(tf.zeros((1, 2, 2, 3)))
    with pytest.raises(ValueError, match=r"Expected shape \(..., height, width, channels\). Received: \(4, 4\)"):
        bijectors.Squeeze().forward(tf.zeros((4, 4)))
    for factor in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="positive integer"):
            bijectors.Squeeze(factor)
