import numpy as np
import pytest

from keras_auxref.flows import AdditiveCoupling
from tests.support import assert_agree


@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 4, 3)])
def test_is_the_formula_and_preserves_volume(rng, dtype, shape):
    x, layer = rng.normal(size=shape).astype(dtype), AdditiveCoupling(hidden=4, dtype=dtype)
    np.testing.assert_array_equal(layer(x), x)
    for weight in layer.weights:
        weight.assign_add(0.3 * rng.normal(size=weight.shape))
    y, log_det = layer.forward_and_log_det(x)
    size = shape[-1] // 2
    shift = layer.network(x[..., :size]).numpy()
    assert shift.shape == (*shape[:-1], shape[-1] - size)
    assert np.abs(shift).max() > 0.1
    np.testing.assert_array_equal(y[..., :size], x[..., :size])
    assert_agree(y[..., size:], x[..., size:] + shift)
    np.testing.assert_array_equal(log_det, np.zeros(shape[0]))


def test_errors():
    with pytest.raises(ValueError, match=r"AdditiveCoupling splits .* Expected a last axis of size ≥ 2. Received: 1"):
        AdditiveCoupling().build((None, 1))
    with pytest.raises(ValueError, match=r"default network of AdditiveCoupling .* Received: rank 3"):
        AdditiveCoupling().build((None, 5, 4))
