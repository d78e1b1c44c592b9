"""What every invertible layer has to do; a new one is tested by adding one line to CASES."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref.flows import (
    ActNorm,
    AdditiveCoupling,
    AffineCoupling,
    InvertibleDense,
    LogisticMixtureCoupling,
    Permutation,
    QRDense,
    ReflectedDense,
    SplineCoupling,
    Squeeze,
)
from keras_auxref.invertible import Invertible
from keras_auxref.layers import AuxReflection, FactoredReflection, OrthogonalDense, SVDDense
from tests.keras_contract import run_layer_test
from tests.support import assert_agree, relative

CASES = {
    "aux_spectral": (AuxReflection, {"kernel": "spectral"}, (3, 5)),
    "aux_relaxed_cayley": (AuxReflection, {"kernel": "relaxed_cayley"}, (2, 3, 4)),
    "factored": (FactoredReflection, {}, (2, 3, 4)),
    "factored_cayley": (FactoredReflection, {"map": "cayley", "margin": 0.4}, (3, 5)),
    "factored_left": (FactoredReflection, {"sides": "left"}, (2, 3, 3, 4)),
    "factored_right": (FactoredReflection, {"map": "exp", "sides": "right"}, (2, 3)),
    "householder": (OrthogonalDense, {"reflections": 2}, (3, 5)),
    "cayley": (OrthogonalDense, {"map": "cayley"}, (2, 3, 2, 4)),
    "exp": (OrthogonalDense, {"map": "exp"}, (1, 3)),
    "svd": (SVDDense, {"map": "cayley", "use_bias": True, "singular_bounds": (0.5, 2.0)}, (3, 5)),
    "qr": (QRDense, {"reflections": 3, "kernel_initializer": "glorot_uniform"}, (3, 5)),
    "qr_factored": (QRDense, {"rotation": "factored"}, (2, 3, 4)),
    "reflected_dense": (ReflectedDense, {}, (2, 3, 4)),
    "act_norm": (ActNorm, {}, (4, 3)),
    "act_norm_image": (ActNorm, {}, (2, 3, 5, 1)),
    "dense": (InvertibleDense, {}, (3, 5)),
    "dense_image": (InvertibleDense, {"kernel_initializer": "glorot_uniform"}, (2, 3, 3, 4)),
    "dense_one": (InvertibleDense, {}, (2, 1)),
    "coupling": (AffineCoupling, {"hidden": 6}, (3, 4)),
    "coupling_odd": (AffineCoupling, {"hidden": 6, "bound": 0.5}, (1, 3)),
    "coupling_image": (AffineCoupling, {"hidden": 5}, (2, 3, 5, 3)),
    "additive": (AdditiveCoupling, {"hidden": 6}, (3, 5)),
    "additive_image": (AdditiveCoupling, {"hidden": 5}, (2, 3, 5, 2)),
    "mixture": (LogisticMixtureCoupling, {"hidden": 6, "components": 3}, (3, 4)),
    "mixture_one": (LogisticMixtureCoupling, {"hidden": 6, "components": 1, "bound": 0.5, "scale_bound": 0.5}, (1, 3)),
    "mixture_image": (LogisticMixtureCoupling, {"hidden": 5, "components": 4}, (2, 2, 3, 3)),
    "spline": (SplineCoupling, {"hidden": 6, "bins": 4, "slope_bound": 1.0}, (3, 5)),
    "spline_image": (SplineCoupling, {"hidden": 5, "bins": 2, "bound": 1.0}, (2, 2, 3, 2)),
    "permutation": (Permutation, {}, (3, 5)),
    "permutation_image": (Permutation, {"order": [2, 0, 3, 1]}, (2, 3, 2, 4)),
    "squeeze": (Squeeze, {}, (2, 4, 6, 3)),
    "squeeze_3": (Squeeze, {"factor": 3}, (1, 3, 6, 2)),
}
# What neither shapes nor numbers matter to is asked once of every class: of the first case with the most arguments.
_by_arguments = sorted(CASES, key=lambda name: -len(CASES[name][1]))
CLASSES = {CASES[name][0]: name for name in reversed(_by_arguments)}.values()
each = pytest.mark.parametrize("name", CASES)
each_class = pytest.mark.parametrize("name", CLASSES)


def _make(name, rng=None, dtype="float32"):
    """A built layer, moved away from its start."""
    layer_class, arguments, shape = CASES[name]
    layer = layer_class(dtype=dtype, **arguments)
    layer.build((None, *shape[1:]))
    for weight in layer.trainable_weights if rng is not None else []:
        weight.assign_add(0.2 * rng.normal(size=weight.shape))
    return layer


def _input(name, rng, dtype="float32"):
    return rng.normal(size=CASES[name][2]).astype(dtype)


def _brute_force(layer, x):
    """log|det| of the whole Jacobian of one event after the other, by automatic differentiation."""
    event = x.shape[x.ndim - layer.event_ndims :]
    n, lead = math.prod(event), x.shape[: x.ndim - layer.event_ndims]
    values = []
    for one in x.reshape(-1, *event):
        # n copies of an event of size n, one output of each.
        copies = tf.repeat(tf.reshape(one, (1,) * (x.ndim - layer.event_ndims) + event), n, axis=0)
        with tf.GradientTape() as tape:
            tape.watch(copies)
            diagonal = tf.linalg.diag_part(tf.reshape(layer(copies), (n, n)))
        values.append(np.linalg.slogdet(tf.reshape(tape.gradient(diagonal, copies), (n, n)))[1])
    return np.reshape(values, lead)


@pytest.mark.parametrize(("name", "dtype"), [(name, ("float32", "float64")[i % 2]) for i, name in enumerate(CASES)])
def test_round_trip(rng, dtype, name):
    layer, x = _make(name, rng, dtype), _input(name, rng, dtype)
    assert isinstance(layer, Invertible)
    y = layer(x)
    assert y.dtype == dtype
    assert y.shape == layer.compute_output_shape(x.shape)
    assert layer.inverse_output_shape(y.shape) == x.shape
    back = layer.inverse(y)
    assert back.dtype == dtype
    assert relative(back, x) < (2e-5 if dtype == "float32" else 1e-10)
    assert layer.inverse_event_ndims == layer.event_ndims


@pytest.mark.parametrize(("name", "dtype"), [(name, ("float64", "float32")[i % 2]) for i, name in enumerate(CASES)])
def test_log_det_is_that_of_automatic_differentiation(rng, dtype, name):
    layer, x = _make(name, rng, dtype), _input(name, rng, dtype)
    expected = _brute_force(layer, x)
    tolerance = 1e-4 if dtype == "float32" else 1e-9
    log_det = layer.log_det_jacobian(x)
    assert log_det.dtype == dtype
    assert log_det.shape == x.shape[: x.ndim - layer.event_ndims]
    np.testing.assert_allclose(log_det, expected, rtol=tolerance, atol=tolerance)
    y, both = layer.forward_and_log_det(x)
    np.testing.assert_allclose(y, layer(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(both, log_det, rtol=1e-5, atol=1e-6)


@each
def test_gradients_of_inverse_and_log_det(rng, name):
    """Against central differences, along one direction in the space of the input and all weights."""
    layer, x = _make(name, rng, "float64"), tf.Variable(_input(name, rng, "float64"))
    variables = [x, *(weight.value for weight in layer.trainable_weights)]
    y = layer(x).numpy()
    cotangent = rng.normal(size=x.shape)

    def function(x):
        return tf.reduce_sum(cotangent * layer.inverse(tf.reshape(x, y.shape))) + tf.reduce_sum(tf.sin(layer.log_det_jacobian(x)))

    with tf.GradientTape() as tape:
        value = function(x)
    gradients = tape.gradient(value, variables)
    directions = [rng.normal(size=v.shape) for v in variables]
    slope = sum(np.sum(g * d) for g, d in zip(gradients, directions, strict=True))
    sides, step = [], 1e-6
    for sign in (1, -2):  # there, and back past the start
        for v, d in zip(variables, directions, strict=True):
            v.assign_add(sign * step * d)
        sides.append(float(function(x)))
    assert slope == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-4, abs=1e-6)


@each_class
def test_saves_and_loads_with_its_weights(rng, tmp_path, name):
    layer, x = _make(name, rng), _input(name, rng)
    model = keras.Sequential([keras.Input(x.shape[1:]), layer])
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert_agree(loaded(x), model(x))
    assert loaded.layers[0].get_config() == layer.get_config()
    for a, b in zip(loaded.weights, model.weights, strict=True):
        np.testing.assert_array_equal(a, b)
    assert_agree(loaded.layers[0].log_det_jacobian(x), layer.log_det_jacobian(x))


class Likelihood(keras.Model):
    """The smallest flow: one layer, trained by maximum likelihood."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x):
        y, log_det = self.layer.forward_and_log_det(x)
        self.add_loss(0.5 * keras.ops.sum(keras.ops.square(y - 1)) - keras.ops.sum(log_det))
        return y


# XLA takes seconds to compile each: one of every formula. OrthogonalDense and SVDDense have such a test of their own.
TRAINED = ["aux_spectral", "aux_relaxed_cayley", "factored", "qr", "reflected_dense", "dense", "coupling", "mixture", "spline"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_trains_under_xla_as_without(rng, name):
    x, results = _input(name, rng), []
    for jit in (False, True):
        keras.utils.set_random_seed(0)
        layer = _make(name, np.random.default_rng(1))
        start = [weight.numpy() for weight in layer.trainable_weights]
        model = Likelihood(layer)
        model.compile(keras.optimizers.SGD(0.01), jit_compile=jit)
        model.fit(x, epochs=2, batch_size=len(x), verbose=0)
        results.append([weight.numpy() for weight in layer.trainable_weights])
    assert max(np.abs(a - b).max() for a, b in zip(start, results[0], strict=True)) > 1e-5
    for plain, compiled in zip(*results, strict=True):
        np.testing.assert_allclose(compiled, plain, rtol=1e-3, atol=1e-5)


@each_class
def test_keras_own_layer_contract(name):
    layer_class, arguments, shape = CASES[name]
    fresh = _make(name)
    run_layer_test(
        layer_class,
        init_kwargs=arguments,
        input_shape=shape,
        expected_output_shape=fresh.compute_output_shape(shape),
        expected_num_trainable_weights=len(fresh.trainable_weights),
        expected_num_non_trainable_weights=len(fresh.non_trainable_weights),
        supports_masking=fresh.supports_masking,
        run_training_check=bool(fresh.trainable_weights),
    )


@each_class
def test_bijector_is_a_new_view(rng, name):
    layer, x = _make(name, rng), _input(name, rng)
    bijector = layer.bijector(name="view")
    assert bijector is not layer.bijector()
    np.testing.assert_allclose(bijector.forward(x), layer(x), rtol=1e-6)
    assert len(bijector.trainable_variables) == len(layer.trainable_weights)


@pytest.mark.parametrize("layer_class", [ActNorm, AffineCoupling, InvertibleDense, OrthogonalDense, AuxReflection])
def test_a_bijector_needs_weights(layer_class):
    with pytest.raises(ValueError, match="has not been built"):
        layer_class().bijector()


@each
def test_certificate_of_every_layer(rng, name):
    """Proven away from the start, and never for weights that are not numbers."""
    layer = _make(name, rng)
    assert layer.certificate().invertible, layer.certificate()
    assert layer.certificate().reason.startswith("Proven: ")
    proof = layer.proof()
    assert proof is None or bool(proof)
    for weight in layer.trainable_weights:
        value = weight.numpy()
        weight.assign(np.where(np.arange(value.size).reshape(value.shape) == value.size - 1, np.nan, value))
        assert not layer.certificate().invertible
        assert layer.certificate().reason.startswith("Not proven: ")
        weight.assign(value)


@pytest.mark.parametrize(
    ("layer", "value", "reason"),
    [
        (ActNorm(), 200.0, "a scale is zero"),  # exp(200) is no float32
        (ActNorm(), -200.0, "a scale is zero"),
        (AffineCoupling(hidden=2, bound=100.0), None, "leave float32"),
        (LogisticMixtureCoupling(hidden=2, bound=100.0), None, "leave float32"),
        (LogisticMixtureCoupling(hidden=2, scale_bound=100.0), None, "leave float32"),
        (SplineCoupling(hidden=2, slope_bound=100.0), None, "leave float32"),
        (InvertibleDense(), 1.0, "singular"),
    ],
)
def test_a_certificate_looks_at_the_numbers(layer, value, reason):
    layer.build((None, 4))
    if value is not None:
        weight = layer.log_scale if isinstance(layer, ActNorm) else layer.kernel
        weight.assign(np.full(weight.shape, value))
    certificate = layer.certificate()
    assert not certificate.invertible
    assert reason in certificate.reason


def test_the_certificate_of_a_matrix_tells_its_condition():
    layer = InvertibleDense()
    layer.build((None, 3))
    layer.kernel.assign(np.diag([4.0, 2.0, 1.0]))
    assert layer.certificate().condition == pytest.approx(4)


def test_a_certificate_never_guesses():
    class Unknown(Invertible, keras.layers.Layer):
        pass

    with pytest.raises(NotImplementedError, match="'mystery': Unknown does not implement `certificate`"):
        Unknown(name="mystery").certificate()


@each_class
def test_forward_and_log_det_takes_training(rng, name):
    layer, x = _make(name, rng), _input(name, rng)
    for training in (None, False, True):
        y, log_det = layer.forward_and_log_det(x, training=training)
        np.testing.assert_allclose(y, layer(x), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(log_det, layer.log_det_jacobian(x), rtol=1e-5, atol=1e-6)
