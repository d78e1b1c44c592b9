"""A learning rate that starts small, and may end at zero."""

import keras
import numpy as np
import pytest

from keras_auxref.flows import Warmup
from keras_auxref.flows.warmup import warm_up


def test_rises_linearly_and_stays():
    rate = warm_up(0.1, 4)
    np.testing.assert_allclose([float(rate(step)) for step in (0, 2, 4, 5, 900)], [0.025, 0.0625, 0.1, 0.1, 0.1], rtol=1e-6)
    assert float(warm_up(0.1, 0)(0)) == pytest.approx(0.1)


def test_falls_along_a_cosine_where_the_number_of_steps_is_known():
    rate = warm_up(0.1, 4, decay_steps=8)
    expected = [0.1 * (1 + np.cos(np.pi * done / 8)) / 2 for done in (0, 2, 4, 8, 8)]
    np.testing.assert_allclose([float(rate(step)) for step in (4, 6, 8, 12, 40)], expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("warmup", [0, 4])
def test_stays_before_it_falls(warmup):
    rate, now = warm_up(0.1, warmup, decay_steps=8, hold_steps=6), warm_up(0.1, warmup, decay_steps=8)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(rate))
    for step in range(warmup + 20):
        expected = now(step) if step < warmup else 0.1 if step < warmup + 6 else now(step - 6)
        np.testing.assert_allclose([rate(step), again(step)], float(expected), rtol=1e-6, atol=1e-9)
    assert float(rate(warmup + 14)) < 1e-8 < float(rate(warmup + 13))


def test_a_file_of_version_0_2_has_the_old_name():
    config = {"class_name": "keras_auxref>Warmup", "config": {"learning_rate": 0.1, "steps": 4}, "registered_name": None}
    config = {**config, "module": None, "registered_name": "keras_auxref>Warmup"}
    rate = keras.saving.deserialize_keras_object(config)
    assert float(rate(0)) == pytest.approx(0.025)
    with pytest.warns(DeprecationWarning, match="CosineDecay"):
        assert float(Warmup(0.1, steps=4)(9)) == pytest.approx(0.1)


def test_serialises_with_the_optimizer():
    optimizer = keras.optimizers.Adam(warm_up(0.1, 4), global_clipnorm=3.0)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert float(again.learning_rate) == pytest.approx(0.025)
    assert again.global_clipnorm == 3.0


@pytest.mark.parametrize(
    "arguments", [(0.0, 1), (-1.0, 1), (float("nan"), 1), (0.1, -1), (0.1, 1, 0), (0.1, 1, 5, -1), (0.1, 1, None, 5)]
)
def test_refuses_nonsense(arguments):
    with pytest.raises(ValueError, match="Received"):
        warm_up(*arguments)
