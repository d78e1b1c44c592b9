"""What holds for every shape, scale and dtype, tried on what hypothesis comes up with."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keras_auxref import kernels, ops
from tests.support import certified, orthogonal

pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
# The same examples in every run, and none from a file that processes share.
SETTINGS = settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))

shapes = st.tuples(st.lists(st.integers(1, 3), max_size=3), st.integers(1, 9))
scales = st.sampled_from([1e-30, 1e-12, 1.0, 1e12, 1e30])
dtypes = st.sampled_from(["float32", "float64"])
seeds = st.integers(0, 2**31)


def _draw(shape, scale, dtype, seed):
    (*leading,), d = shape
    rng = np.random.default_rng(seed)
    return (scale * rng.normal(size=(*leading, d))).astype(dtype), rng, d


@SETTINGS
@given(shapes, scales, dtypes, seeds)
def test_reflection_preserves_shape_dtype_and_norm(shape, scale, dtype, seed):
    x, rng, d = _draw(shape, scale, dtype, seed)
    y = np.asarray(ops.reflect(x, rng.normal(size=(d, d)).astype(dtype)))
    assert y.shape == x.shape
    assert y.dtype == dtype
    norms = [np.linalg.norm(t.astype("float64") / scale, axis=-1) for t in (x, y)]
    np.testing.assert_allclose(*norms, rtol=1e-4 if dtype == "float32" else 1e-12)


@SETTINGS
@given(shapes, dtypes, seeds)
def test_two_reflections_in_the_same_direction_cancel(shape, dtype, seed):
    x, rng, _ = _draw(shape, 1.0, dtype, seed)
    v = rng.normal(size=x.shape).astype(dtype)
    np.testing.assert_allclose(ops.householder(v, ops.householder(v, x)), x, atol=1e-5 if dtype == "float32" else 1e-13)


@SETTINGS
@given(shapes, scales, dtypes, seeds, st.floats(1.0, 1.99), st.sampled_from([0.0, 0.5, 20.0]))
def test_inverse_undoes_certified_reflections(shape, scale, dtype, seed, condition, skew):
    y, rng, d = _draw(shape, scale, dtype, seed)
    w = certified(d, condition, skew, rng).astype(dtype)
    x = ops.inverse(y, w)
    np.testing.assert_allclose(np.asarray(ops.reflect(x, w)) / scale, y / scale, atol=1e-4 if dtype == "float32" else 1e-11)


@SETTINGS
@given(shapes, dtypes, seeds)
def test_log_determinant_of_forward_and_inverse_cancel(shape, dtype, seed):
    """log|det J| from the definition at x, and by the change of c at f(x): J⁻¹ has the opposite sign."""
    x, rng, d = _draw(shape, 1.0, "float64", seed)
    w = certified(d, 1.6, 1.0, rng)
    value = np.asarray(ops.log_det_jacobian(x.astype(dtype), w.astype(dtype)), "float64")
    inverse = np.linalg.inv(np.asarray(ops.jacobian(x, w)))
    np.testing.assert_allclose(value, -np.linalg.slogdet(inverse)[1], atol=1e-3 if dtype == "float32" else 1e-9)


@SETTINGS
@given(st.integers(1, 12), dtypes, seeds)
def test_theorem_1(d, dtype, seed):
    rng = np.random.default_rng(seed)
    u, x = orthogonal(d, rng), rng.normal(size=(4, d))
    y = ops.reflect(x.astype(dtype), (np.eye(d) - u).astype(dtype))
    np.testing.assert_allclose(y, x @ u.T, atol=2e-3 if dtype == "float32" else 1e-9)


@SETTINGS
@given(st.integers(1, 8), seeds, st.floats(-3, 10))
def test_relaxed_cayley_is_certified_for_every_weight(d, seed, exponent):
    rng = np.random.default_rng(seed)
    weights = {name: (10.0**exponent * rng.normal(size=(d, d))).astype("float32") for name in ("symmetric", "skew")}
    proof = kernels.certify(kernels.RelaxedCayley()(weights))
    assert proof.invertible, proof.reason
