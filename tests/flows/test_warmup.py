"""A learning rate that starts small."""

import keras
import numpy as np
import pytest

from keras_auxref.flows import Warmup


def test_rises_linearly_and_stays():
    schedule = Warmup(0.1, steps=4)
    np.testing.assert_allclose([float(schedule(step)) for step in range(6)], [0.025, 0.05, 0.075, 0.1, 0.1, 0.1], rtol=1e-6)
    assert float(Warmup(0.1, steps=0)(0)) == pytest.approx(0.1)


def test_serialises_with_the_optimizer():
    optimizer = keras.optimizers.Adam(Warmup(0.1, steps=4), global_clipnorm=3.0)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert float(again.learning_rate) == pytest.approx(0.025)
    assert again.global_clipnorm == 3.0


@pytest.mark.parametrize("arguments", [(0.0, 1), (-1.0, 1), (float("nan"), 1), (0.1, -1)])
def test_refuses_nonsense(arguments):
    with pytest.raises(ValueError, match="Received"):
        Warmup(*arguments)
