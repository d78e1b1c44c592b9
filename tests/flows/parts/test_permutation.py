import numpy as np
import pytest

from keras_auxref.flows import Permutation


def test_reverses_by_default():
    layer = Permutation()
    np.testing.assert_array_equal(layer(np.array([[1.0, 2.0, 3.0]])), [[3.0, 2.0, 1.0]])
    assert not layer.weights
    assert layer.certificate().condition == 1


def test_puts_every_channel_in_its_place(rng):
    order, x = [3, 0, 2, 1], rng.normal(size=(2, 3, 4)).astype("float32")
    layer = Permutation(np.array(order))
    y = layer(x)
    for place, channel in enumerate(order):
        np.testing.assert_array_equal(y[..., place], x[..., channel])
    np.testing.assert_array_equal(layer.inverse(y), x)
    assert layer.log_det_jacobian(x).shape == (2, 3)
    assert layer.get_config()["order"] == order


@pytest.mark.parametrize("order", [[0, 0], [1, 2], [0.0, 1.0], [[0, 1]], "reverse"])
def test_what_is_not_a_permutation_is_refused(order):
    with pytest.raises(ValueError, match=r"Expected each of 0 … d − 1 once. Received: "):
        Permutation(order)


def test_the_size_has_to_fit():
    with pytest.raises(ValueError, match=r"Expected a last axis of size 2. Received: 3"):
        Permutation([1, 0]).build((None, 3))
