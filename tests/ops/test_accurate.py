from fractions import Fraction

import numpy as np
import tensorflow as tf

from keras_auxref.ops.accurate import accurate_product
from tests.support import orthogonal


def test_products_that_cancel_keep_their_digits(rng, dtype):
    """x in the null space of W up to rounding: what is left of W x is exact, where the plain product is noise."""
    d = 5
    q = orthogonal(d, rng)
    w = (q[:, 1:] @ rng.normal(size=(d - 1, d - 1)) @ q[:, 1:].T).astype(dtype)
    x = q[:, :1].T.astype(dtype)
    w, x = w / 2 ** np.ceil(np.log2(np.abs(w).max())).astype(dtype), x / np.abs(x).max()
    x = x.astype(dtype)
    exact = [float(sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(row, x[0], strict=True))) for row in w]
    size = np.abs(exact).max()
    assert 0 < size < 100 * d * np.finfo(dtype).eps
    computed = tf.function(accurate_product)(tf.constant(x), tf.constant(w)).numpy()[0]
    assert np.abs(computed - exact).max() < 1e-2 * size
    assert np.abs((x @ w.T)[0] - exact).max() > 10 * np.abs(computed - exact).max()
