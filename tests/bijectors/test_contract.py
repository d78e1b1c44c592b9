"""What every bijector of the registry has to do."""

import math

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

from tests.bijectors.cases import CASES, TRACED, TRAINABLE, Case
from tests.support import assert_agree, log_abs_det, relative

tfb, tfd = tfp.bijectors, tfp.distributions
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
VECTORS = [case for case in CASES if len(case.event) == 1]


def _tolerance(dtype):
    return 1e-4 if dtype == "float32" else 1e-9


def _input(rng, case, dtype, *lead):
    return tf.constant(rng.normal(size=(*lead, *case.event)), dtype)


def _brute_force(bijector, x, event_ndims):
    return log_abs_det(bijector.forward, x, event_ndims)


def _distribution(case, bijector, dtype, invert=False):
    """A standard normal on the events of the bijector, moved by it, or by its inverse."""
    shape = bijector.forward_event_shape(case.event) if invert else case.event
    base = tfd.Sample(tfd.Normal(tf.constant(0.3, dtype), tf.constant(1.5, dtype)), shape)
    return tfd.TransformedDistribution(base, tfb.Invert(bijector) if invert else bijector)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(case, ("float64", "float32")[i % 2], id=case.name) for i, case in enumerate(CASES)],
)
def test_round_trip(rng, dtype, case):
    bijector = case.make(rng, dtype)
    for lead in [(), (1,), (2, 3)]:
        x = _input(rng, case, dtype, *lead)
        y = bijector.forward(x)
        assert y.dtype == x.dtype
        assert y.shape == (*lead, *bijector.forward_event_shape(case.event))
        # tf.identity: TFP would answer inverse(forward(x)) from its cache.
        back = bijector.inverse(tf.identity(y))
        assert back.shape == x.shape
        assert relative(back, x) < _tolerance(dtype)


@every_case
def test_event_shapes(rng, case):
    bijector = case.make(rng, "float32")
    assert bijector.inverse_event_shape(bijector.forward_event_shape(case.event)) == case.event
    assert tuple(bijector.forward_event_shape_tensor(case.event)) == tuple(bijector.forward_event_shape(case.event))
    assert tuple(bijector.inverse_event_shape_tensor(bijector.forward_event_shape_tensor(case.event))) == case.event


@every_case
def test_log_det_is_that_of_automatic_differentiation(rng, dtype, case):
    bijector = case.make(rng, dtype)
    x = _input(rng, case, dtype, 2, 3)
    event_ndims = len(case.event)
    forward = bijector.forward_log_det_jacobian(x, event_ndims=event_ndims)
    expected = _brute_force(bijector, x, event_ndims)
    assert forward.shape == (2, 3)
    assert forward.dtype == x.dtype
    np.testing.assert_allclose(forward, expected, rtol=_tolerance(dtype), atol=_tolerance(dtype))
    y = tf.identity(bijector.forward(x))
    inverse = bijector.inverse_log_det_jacobian(y, event_ndims=len(y.shape) - 2)
    np.testing.assert_allclose(inverse, -expected, rtol=_tolerance(dtype), atol=_tolerance(dtype))


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case.name)
def test_log_det_is_summed_over_a_larger_event(rng, case):
    bijector = case.make(rng, "float64")
    x = _input(rng, case, "float64", 2, 3)
    each = bijector.forward_log_det_jacobian(tf.identity(x), event_ndims=1)
    whole = bijector.forward_log_det_jacobian(x, event_ndims=2)
    np.testing.assert_allclose(whole, tf.reduce_sum(each, axis=1), rtol=1e-12, atol=1e-12)


@every_case
def test_chain_invert_and_reshape(rng, case):
    bijector = case.make(rng, "float64")
    size, event_ndims = math.prod(case.event), len(case.event)
    half, minus = tf.constant(0.5, tf.float64), tf.constant(-0.7, tf.float64)
    chain = tfb.Chain([tfb.Shift(half), bijector, tfb.Scale(minus), tfb.Reshape(case.event, (size,))])
    x = tf.constant(rng.normal(size=(3, size)))
    inner = -0.7 * tf.reshape(x, (3, *case.event))
    y = chain.forward(x)
    np.testing.assert_allclose(y, bijector.forward(tf.identity(inner)) + 0.5, atol=1e-12)
    assert relative(chain.inverse(tf.identity(y)), x) < 1e-9
    log_det = chain.forward_log_det_jacobian(x, event_ndims=1)
    np.testing.assert_allclose(log_det, _brute_force(bijector, inner, event_ndims) + size * np.log(0.7), rtol=1e-9)
    inverted = tfb.Invert(bijector)
    z = tf.identity(bijector.forward(inner))
    assert relative(inverted.forward(z), inner) < 1e-9
    np.testing.assert_allclose(
        inverted.forward_log_det_jacobian(tf.identity(z), event_ndims=event_ndims),
        -_brute_force(bijector, inner, event_ndims),
        atol=1e-9,
    )


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case.name)
def test_blockwise(rng, case):
    bijector, d = case.make(rng, "float64"), case.event[0]
    block = tfb.Blockwise([bijector, tfb.Scale(tf.constant(3.0, tf.float64))], [d, 2])
    x = tf.constant(rng.normal(size=(4, d + 2)))
    y = block.forward(x)
    np.testing.assert_allclose(y, tf.concat([bijector.forward(tf.identity(x[:, :d])), 3 * x[:, d:]], axis=1), atol=1e-12)
    assert relative(block.inverse(tf.identity(y)), x) < 1e-9
    expected = _brute_force(bijector, x[:, :d], 1) + 2 * np.log(3)
    np.testing.assert_allclose(block.forward_log_det_jacobian(x, event_ndims=1), expected, rtol=1e-9)


def _compiled(case):
    return pytest.param(case, True, marks=[pytest.mark.slow] if "aux" in case.name else [], id=f"{case.name}-xla")


@pytest.mark.parametrize(
    ("case", "jit"), [pytest.param(case, False, id=case.name) for case in TRACED] + [_compiled(case) for case in TRACED]
)
def test_inside_a_function_of_unknown_batch(rng, case, jit):
    bijector = case.make(rng, "float64")

    @tf.function(input_signature=[tf.TensorSpec([None, *case.event], tf.float64)], jit_compile=jit)
    def function(x):
        y = bijector.forward(x)
        return y, bijector.inverse(tf.identity(y)), bijector.forward_log_det_jacobian(x, event_ndims=len(case.event))

    for batch in (2,) if jit else (2, 1):
        x = _input(rng, case, "float64", batch)
        y, back, log_det = function(x)
        np.testing.assert_allclose(y, bijector.forward(tf.identity(x)), atol=1e-10)
        np.testing.assert_allclose(back, x, atol=1e-9)
        np.testing.assert_allclose(log_det, _brute_force(bijector, x, len(case.event)), atol=1e-9)


@every_case
def test_validate_args_changes_no_value(rng, case):
    bijector = case.make(rng, "float64")
    checked = bijector.copy(validate_args=True)
    x = _input(rng, case, "float64", 3)
    y = checked.forward(x)
    assert_agree(y, bijector.forward(tf.identity(x)))
    assert_agree(checked.inverse(tf.identity(y)), bijector.inverse(tf.identity(y)))


# Both dtypes go through every method above; TFP's own arithmetic around them is the same in both.
@every_case
@pytest.mark.parametrize(("dtype", "invert"), [("float64", True), ("float32", False)])
def test_a_sample_has_the_density_that_is_computed_afresh(rng, dtype, case, invert):
    distribution = _distribution(case, case.make(rng, dtype), dtype, invert)
    sample, log_prob = distribution.experimental_sample_and_log_prob((2, 3), seed=1)
    assert log_prob.shape == (2, 3)
    assert distribution.event_shape == sample.shape[2:]
    np.testing.assert_allclose(distribution.log_prob(tf.identity(sample)), log_prob, rtol=20 * _tolerance(dtype))


@pytest.mark.parametrize(
    ("case", "invert", "graph"),
    [pytest.param(case, False, True, id=f"{case.name}-graph") for case in TRAINABLE if case in TRACED]
    + [pytest.param(case, True, False, id=f"{case.name}-inverted") for case in TRAINABLE],
)
def test_gradients_reach_the_variables(rng, case, invert, graph):
    """Against central differences along one direction in the space of all variables."""
    bijector = case.make(rng, "float64")
    distribution = _distribution(case, bijector, "float64", invert)
    variables = bijector.trainable_variables
    assert variables
    x = _input(rng, case, "float64", 4)

    def value_and_gradients():
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(distribution.log_prob(x))
        return value, tape.gradient(value, variables)

    gradients = (tf.function(value_and_gradients) if graph else value_and_gradients)()[1]
    directions = [rng.normal(size=v.shape) for v in variables]
    slope = sum(np.sum(g * d) for g, d in zip(gradients, directions, strict=True))
    start, sides, step = [v.numpy() for v in variables], [], 1e-6
    for sign in (1, -1):
        for v, s, d in zip(variables, start, directions, strict=True):
            v.assign(s + sign * step * d)
        sides.append(float(tf.reduce_sum(distribution.log_prob(tf.identity(x)))))
    assert abs(slope) > 1e-3
    assert slope == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-5)


@pytest.mark.parametrize(
    ("case", "invert", "graph"),
    [pytest.param(case, False, False, id=f"{case.name}") for case in TRAINABLE]
    + [pytest.param(case, True, True, id=f"{case.name}-graph") for case in TRAINABLE if case in TRACED],
)
def test_a_changed_variable_is_seen(rng, case: Case, invert, graph):
    """The same tensor before and after an assignment: what TFP's cache would answer from memory."""
    bijector = case.make(rng, "float64")
    distribution = _distribution(case, bijector, "float64", invert)
    x = _input(rng, case, "float64", 3)
    moves = [tf.constant(0.01 * rng.normal(size=v.shape)) for v in bijector.trainable_variables]

    def before_and_after():
        before = distribution.log_prob(x)
        for v, move in zip(bijector.trainable_variables, moves, strict=True):
            v.assign_add(move)
        return before, distribution.log_prob(x)

    function = tf.function(before_and_after) if graph else before_and_after
    for _ in range(2):
        before, after = function()
        np.testing.assert_allclose(after, distribution.log_prob(tf.identity(x)), rtol=1e-9)
        assert np.abs(after - before).max() > 1e-5
