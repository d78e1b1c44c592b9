"""What TFP asks of its own bijectors: copies, equality, parameters, dtypes, composite tensors, gradients where they belong."""

import inspect

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref import bijectors
from tests.bijectors.cases import BATCHES, CASES
from tests.support import assert_agree

tfb, tfd = tfp.bijectors, tfp.distributions
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
COMPOSITES = [case for case in CASES if not case.name.startswith(("view", "coupling"))]
every_composite = pytest.mark.parametrize("case", COMPOSITES, ids=lambda case: case.name)
LINEAR = ("householder", "act_norm", "squeeze", "orthogonal", "dense", "permutation")


@every_case
def test_copies_are_equal_and_share_a_hash(rng, case):
    bijector = case.make(rng, "float32")
    copy = bijector.copy()
    assert copy == bijector
    assert hash(copy) == hash(bijector)
    assert copy is not bijector
    checked = bijector.copy(validate_args=True)
    assert checked.validate_args
    assert checked != bijector
    assert [v.ref() for v in copy.variables] == [v.ref() for v in bijector.variables]
    other = case.make(rng, "float32")
    assert (bijector == other) == ("squeeze" in case.name and "view" not in case.name)


@every_case
def test_dtypes_and_parameters_are_those_that_it_says(rng, case):
    bijector = case.make(rng, "float64")
    assert bijector.forward_dtype(tf.float64) == bijector.inverse_dtype(tf.float64) == tf.float64
    properties = type(bijector).parameter_properties()
    assert set(properties) <= set(inspect.signature(type(bijector)).parameters)
    assert bijector.experimental_batch_shape() == ()
    assert str(bijector).startswith(f'tfp.bijectors.{type(bijector).__name__}("')


@every_case
def test_the_log_det_depends_on_x_where_the_jacobian_does(rng, case):
    """A constant Jacobian has no gradient for x, as in TFP; any other has one."""
    bijector = case.make(rng, "float64")
    x = tf.constant(rng.normal(size=(3, *case.event)))
    with tf.GradientTape() as tape:
        tape.watch(x)
        log_det = bijector.forward_log_det_jacobian(x)
    gradient = tape.gradient(log_det, x)
    name = case.name.removeprefix("view_")
    assert bijector.is_constant_jacobian == name.startswith(LINEAR)
    assert (gradient is None) == (bijector.is_constant_jacobian or name == "additive")  # which preserves volume, and bends
    if bijector.is_constant_jacobian:
        assert np.ptp(log_det) == 0


@pytest.mark.parametrize("case", BATCHES, ids=lambda case: case.name)
def test_shapes_of_parameters_follow_from_the_shape_of_an_input(rng, case):
    properties = type(case.make(**case.parameters(rng, ()))).parameter_properties()
    for name, shape in case.shapes.items():
        if name in properties and name != "v":  # a Householder may have any number of columns
            assert tuple(properties[name].shape_fn([5, 2, case.d])) == (5, 2, *shape)


@pytest.mark.parametrize("kind", [bijectors.AuxReflection, bijectors.Householder, bijectors.ActNorm])
def test_make_trainable(kind):
    bijector = tfp.experimental.util.make_trainable(kind, batch_and_event_shape=[2, 3])
    assert all(variable.shape[:2] == (2, 3) for variable in bijector.trainable_variables)
    assert bijector.experimental_batch_shape() == (2,)
    distribution = tfd.TransformedDistribution(tfd.MultivariateNormalDiag(tf.zeros(3)), tfb.Invert(bijector))
    with tf.GradientTape() as tape:
        value = distribution.log_prob([1.0, 2.0, -1.0])
    assert value.shape == (2,)
    assert all(np.abs(gradient).max() > 0 for gradient in tape.gradient(value, bijector.trainable_variables))


def test_make_trainable_with_a_kernel_of_several_weights_says_what_it_needs():
    with pytest.raises(ValueError, match=r"`w` must hold the weights of RelaxedCayley. Expected a dict"):
        tfp.experimental.util.make_trainable(bijectors.AuxReflection, batch_and_event_shape=[3], kernel="relaxed_cayley")


@every_composite
def test_goes_in_and_out_of_functions_and_nests(rng, case):
    """With its variables, which stay variables; no retracing for another bijector of the same sizes."""
    first, second = case.make(rng, "float64"), case.make(rng, "float64")
    x = tf.constant(rng.normal(size=(2, *case.event)))
    traces = []

    @tf.function
    def function(bijector, x):
        traces.append(bijector)
        assert [v.trainable for v in bijector.variables] == [v.trainable for v in first.variables]
        return bijector.forward(x)

    for bijector in (first, second):
        np.testing.assert_allclose(function(bijector, x), bijector.forward(tf.identity(x)), rtol=1e-10, atol=1e-12)
    assert len(traces) == 1
    flat = tf.nest.flatten(first, expand_composites=True)
    again = tf.nest.pack_sequence_as(first, flat, expand_composites=True)
    assert_agree(again.forward(tf.identity(x)), first.forward(x))


def test_comes_out_of_a_function():
    @tf.function
    def function(v):
        return bijectors.Householder(2 * v, name="made")

    bijector = function(tf.constant([[0.0], [1.0]]))
    assert isinstance(bijector, bijectors.Householder)
    np.testing.assert_array_equal(bijector.forward([3.0, 4.0]), [3.0, -4.0])


def test_an_assignment_to_a_variable_that_came_as_an_argument_is_seen(rng):
    bijector, x = bijectors.ActNorm(tf.Variable([1.0, 2.0]), tf.Variable([0.0, 0.0])), tf.constant([[1.0, 1.0]])

    @tf.function
    def function(bijector, x):
        before = bijector.forward(x)
        bijector.shift.assign_add([1.0, 1.0])
        return before, bijector.forward(x)

    before, after = function(bijector, x)
    np.testing.assert_array_equal(after - before, [[1.0, 1.0]])
    assert_agree(bijector.forward(x), after)


@pytest.mark.filterwarnings("ignore:Encoding a StructuredValue")
def test_a_bijector_of_tfp_keeps_its_name_in_saved_models(tmp_path):
    """There is a `Householder` in TFP too, and TensorFlow finds the types of composite tensors by name."""

    def module(bijector):
        module = tf.Module()
        module.make = tf.function(lambda: bijector)
        return module

    theirs, ours = tfb.Householder([0.6, 0.8]), bijectors.Householder([[0.6], [0.8]])
    for name, bijector in (("theirs", theirs), ("ours", ours)):
        tf.saved_model.save(module(bijector), str(tmp_path / name))
        loaded = tf.saved_model.load(str(tmp_path / name)).make()
        assert type(loaded) is type(bijector)
        np.testing.assert_allclose(loaded.forward([1.0, 2.0]), bijector.forward([1.0, 2.0]), rtol=1e-6)


def test_a_subclass_of_a_user_has_a_type_of_its_own(rng):
    class Mine(bijectors.ActNorm):
        def _forward(self, x):
            return -super()._forward(x)

    mine = Mine([1.0], [0.0])
    assert tf.function(lambda bijector, x: bijector.forward(x))(mine, tf.constant([[1.0]])).numpy() == [[-2.0]]


@pytest.mark.parametrize("case", [case for case in COMPOSITES if "squeeze" not in case.name], ids=lambda case: case.name)
def test_a_variable_is_read_once(rng, case):
    bijector = case.make(rng, "float64")
    x = tf.zeros((2, *case.event), tf.float64)
    graph = tf.function(bijector.forward).get_concrete_function(x).graph
    reads = [op for op in graph.get_operations() if op.type == "ReadVariableOp"]
    assert len(reads) == len(bijector.variables)
