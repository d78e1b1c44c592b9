"""The same numbers on every backend: NumPy's Philox against TensorFlow's."""

import numpy as np
import pytest
import tensorflow as tf

from keras_auxref.flows.randomness import normal, uniform
from keras_auxref.ops.backend._philox import philox_normal, philox_uniform

SEEDS = [(0, 0), (5, 0), (-5, 3), (2**40 + 7, 2**63 - 1)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(3, 5), (2, 8), (1, 1), (64, 77)])
def test_numpy_draws_what_tensorflow_draws(shape, dtype, seed):
    np.testing.assert_array_equal(philox_uniform(shape, seed, dtype), uniform(shape, seed, dtype))
    rounding = 3e-6 if dtype == "float32" else 1e-14
    drawn = philox_normal(shape, seed, dtype)
    assert drawn.dtype == dtype
    np.testing.assert_allclose(drawn, normal(*shape, seed, dtype), rtol=rounding, atol=rounding)


def test_more_rows_begin_with_the_same():
    np.testing.assert_array_equal(philox_normal((2, 6), (1, 0), "float32"), philox_normal((5, 6), (1, 0), "float32")[:2])


def test_inside_of_a_graph_with_a_number_that_is_a_tensor():
    drawn = tf.function(lambda n, seed: normal(n, 4, tf.stack([seed, 0]), "float32"))(tf.constant(3), tf.constant(9))
    np.testing.assert_array_equal(drawn, normal(3, 4, (9, 0), "float32"))
