import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref import bijectors, kernels, ops
from tests.support import assert_agree, certified, orthogonal, relative

tfb, tfd = tfp.bijectors, tfp.distributions


def test_is_the_ops_with_w(rng, dtype):
    w, x = certified(5, 1.5, 2.0, rng).astype(dtype), rng.normal(size=(3, 5)).astype(dtype)
    bijector = bijectors.AuxReflection(w)
    assert_agree(bijector.forward(x), ops.reflect(x, w))
    assert_agree(bijector.inverse(tf.constant(x)), ops.inverse(x, w))
    assert_agree(bijector.forward_log_det_jacobian(x), ops.log_det_jacobian(x, w))
    np.testing.assert_array_equal(bijector.matrix, w)
    assert bijector.certificate().invertible


def test_is_any_orthogonal_map(rng):
    """Theorem 1: W = I − U."""
    u = orthogonal(4, rng, 1)
    bijector = bijectors.AuxReflection(np.eye(4) - u)
    x = rng.normal(size=(3, 4))
    np.testing.assert_allclose(bijector.forward(x), x @ u.T, atol=1e-12)
    np.testing.assert_allclose(bijector.forward_log_det_jacobian(x), 0, atol=1e-12)


@pytest.mark.parametrize("kernel", ["spectral", "relaxed_cayley", kernels.Spectral(0.9), kernels.RelaxedCayley(0.5)])
def test_a_kernel_makes_w_from_its_weights(rng, kernel):
    instance = kernels.get(kernel)
    weights = instance.initial_weights(4, instance.default_initializer(), "float64")
    weights = {name: tf.Variable(value + rng.normal(size=(4, 4))) for name, value in weights.items()}
    bijector = bijectors.AuxReflection(weights, kernel=kernel)
    np.testing.assert_allclose(bijector.matrix, instance({name: v.value() for name, v in weights.items()}))
    assert bijector.certificate().invertible
    assert len(bijector.trainable_variables) == len(weights)
    if len(weights) == 1:
        assert_agree(bijectors.AuxReflection(weights["kernel"], kernel).matrix, bijector.matrix)


@pytest.mark.slow
def test_is_trainable_through_a_distribution(rng):
    """Data on an ellipse turned by 40 degrees: the density learns the turn."""
    angle = np.deg2rad(40)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    data = tf.constant(rng.normal(size=(400, 2)) * [3, 0.3] @ turn.T)
    weights = {"symmetric": tf.Variable(np.zeros((2, 2))), "skew": tf.Variable([[0.0, 1.0], [-1.0, 0.0]], dtype=tf.float64)}
    bijector = bijectors.AuxReflection(weights, "relaxed_cayley")
    base = tfd.MultivariateNormalDiag(scale_diag=tf.constant([3.0, 0.3], tf.float64))
    distribution = tfd.TransformedDistribution(base, bijector)
    best = float(tf.reduce_mean(base.log_prob(data @ turn)))
    variables = bijector.trainable_variables

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(distribution.log_prob(data))
        for v, g in zip(variables, tape.gradient(loss, variables), strict=True):
            v.assign_sub(0.02 * g / tf.norm(g))
        return loss

    gaps = [float(step()) + best for _ in range(60)]
    assert gaps[0] > 10
    assert min(gaps) < 0.5
    assert bijector.certificate().invertible


@pytest.mark.parametrize("graph", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_validate_args_raises_where_uniqueness_is_not_proven(rng, graph):
    w = tf.Variable(np.diag([1.0, 2.0, 5.0]))
    bijector = bijectors.AuxReflection(w, symmetric=True if graph else None, validate_args=True)
    inverse = tf.function(bijector.inverse) if graph else bijector.inverse
    y = tf.constant(rng.normal(size=(4, 3)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not certified"):
        inverse(y)
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not certified"):
        tfd.TransformedDistribution(tfd.MultivariateNormalDiag(tf.zeros(3, tf.float64)), bijector).log_prob(y)
    w.assign(np.diag([1.0, 1.2, 1.9]))
    x = inverse(tf.identity(y))
    assert relative(ops.reflect(x, w), y) < 1e-12
    # Without it, one of the preimages.
    w.assign(np.diag([1.0, 2.0, 5.0]))
    x = bijectors.AuxReflection(w).inverse(y)
    assert relative(ops.reflect(x, w), y) < 1e-9


def test_validate_args_raises_where_the_inverse_did_not_converge(rng, monkeypatch):
    inverse = ops.inverse
    lost = np.arange(20)[:, None] == 7  # a row of a certified W always has an inverse: this one is taken away
    monkeypatch.setattr(ops, "inverse", lambda y, w, **kwargs: tf.where(lost, tf.cast(np.nan, y.dtype), inverse(y, w, **kwargs)))
    w, y = certified(4, 1.9, 3.0, rng), tf.constant(rng.normal(size=(20, 4)))
    assert np.isnan(bijectors.AuxReflection(w).inverse(y)).any()
    with pytest.raises(tf.errors.InvalidArgumentError, match="did not find a preimage"):
        bijectors.AuxReflection(w, validate_args=True).inverse(tf.identity(y))


def test_near_is_passed_on(rng):
    """A free W with three preimages: the c of the outer ones lead to different x."""
    for _ in range(50):
        w, y = rng.normal(size=(3, 3)), rng.normal(size=3)
        preimages = ops.preimages(y, w)
        if len(preimages) >= 3:
            break
    cs = sorted(float(2 * x @ w.T @ x / np.sum(np.square(w @ x))) for x in preimages)
    found = [bijectors.AuxReflection(w, near=c).inverse(y).numpy() for c in cs]
    for c, x in zip(cs, found, strict=True):
        assert_agree(x, ops.inverse(y, w, near=c))
    assert np.abs(found[0] - found[-1]).max() > 1e-3


def test_symmetric_is_passed_on(rng, monkeypatch):
    seen = []
    monkeypatch.setattr(ops, "log_det_jacobian", lambda x, w, symmetric: seen.append(symmetric) or x[..., 0])
    v = rng.normal(size=(3, 3))
    for arguments in ({}, {"symmetric": True}, {"kernel": "spectral"}, {"kernel": "spectral", "symmetric": False}):
        bijectors.AuxReflection(v, **arguments).forward_log_det_jacobian(v)
    assert seen == [None, True, True, False]


def test_weights_inside_a_function(rng):
    """Copying and making one in a graph needs the names of the weights, and no initial weights."""
    weights = {"symmetric": tf.Variable(rng.normal(size=(3, 3))), "skew": tf.Variable(rng.normal(size=(3, 3)))}
    bijector, x = bijectors.AuxReflection(weights, "relaxed_cayley"), rng.normal(size=(2, 3))

    @tf.function
    def function(x):
        return bijectors.AuxReflection(weights, "relaxed_cayley").forward(x), bijector.copy().forward(x)

    for y in function(x):
        np.testing.assert_allclose(y, bijector.forward(x), rtol=1e-12)


def test_weights_are_there_by_the_name_of_the_argument(rng):
    w = tf.Variable(rng.normal(size=(3, 3)))
    assert bijectors.AuxReflection(w, "spectral").w is w
    weights = {"symmetric": w, "skew": tf.Variable(rng.normal(size=(3, 3)))}
    given = bijectors.AuxReflection(weights, "relaxed_cayley").w
    assert {key: value is weights[key] for key, value in given.items()} == {"symmetric": True, "skew": True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"w": np.zeros(3)}, r"`w` must have 2 axes or more. Expected shape \(..., d, d\). Received: \(3,\)"),
        ({"w": np.zeros((2, 3, 4))}, r"`w` must be square. Expected shape \(..., d, d\). Received: \(2, 3, 4\)"),
        ({"w": np.zeros((3, 4)), "kernel": "spectral"}, r"`w` must be square"),
        ({"w": {"symmetric": np.eye(3), "skew": np.zeros(3)}, "kernel": "relaxed_cayley"}, r"`w\['skew'\]` must have 2 axes"),
        ({"w": {"symmetric": np.eye(3), "skew": np.eye(2)}, "kernel": "relaxed_cayley"}, "must have one size"),
        (
            {"w": {"symmetric": np.zeros((2, 3, 3)), "skew": np.zeros((4, 3, 3))}, "kernel": "relaxed_cayley"},
            r"before the axes of one member, the last 2. Received: w\['symmetric'\] \(2, 3, 3\), w\['skew'\] \(4, 3, 3\)",
        ),
        ({"w": np.zeros((3, 3)), "kernel": "relaxed_cayley"}, r"Expected a dict with \['skew', 'symmetric'\]. Received: ndarray"),
        ({"w": {"v": np.eye(3)}, "kernel": "spectral"}, r"Expected a dict with \['kernel'\]. Received: \['v'\]"),
        ({"w": np.eye(3), "kernel": "nonsense"}, "Unknown kernel"),
        ({"w": np.eye(3, dtype=int)}, "`w` must have a floating-point dtype"),
        ({"w": {"symmetric": np.eye(3), "skew": np.eye(3, dtype="float32")}, "kernel": "relaxed_cayley"}, "share one dtype"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        bijectors.AuxReflection(**arguments)
