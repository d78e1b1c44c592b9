"""Half and mixed precision, and integers: what a layer computes with, and what it certifies."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import initializers, kernels, ops
from keras_auxref.flows import ActNorm, AffineCoupling, InvertibleDense, Squeeze
from keras_auxref.layers import AuxReflection, ModReLU, OrthogonalDense, OrthogonalRNN, SVDDense
from tests.support import assert_agree, skew

D = 4
HALF = ["float16", "bfloat16"]
LAYERS = {
    "free": lambda **kwargs: AuxReflection(**kwargs),
    "spectral": lambda **kwargs: AuxReflection("spectral", **kwargs),
    "relaxed_cayley": lambda **kwargs: AuxReflection("relaxed_cayley", **kwargs),
    "householder": lambda **kwargs: OrthogonalDense(**kwargs),
    "cayley": lambda **kwargs: OrthogonalDense("cayley", **kwargs),
    "exp": lambda **kwargs: OrthogonalDense("exp", **kwargs),
    "dense": lambda **kwargs: InvertibleDense(**kwargs),
    "act_norm": lambda **kwargs: ActNorm(**kwargs),
    "coupling": lambda **kwargs: AffineCoupling(hidden=4, **kwargs),
}
OTHERS = {
    "svd": lambda **kwargs: SVDDense(3, **kwargs),
    "svd_exp": lambda **kwargs: SVDDense(map="exp", use_bias=True, **kwargs),
    "modrelu": lambda **kwargs: ModReLU(**kwargs),
}
RECURRENT = {
    name: lambda name=name, **kwargs: OrthogonalRNN(5, name, **kwargs) for name in ("aux", "householder", "cayley", "exp")
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", LAYERS)
def test_half_precision_inverts_to_its_rounding(rng, name, dtype):
    layer, x = LAYERS[name](dtype=dtype), rng.normal(size=(5, D))
    layer.build((None, D))
    y, log_det = layer.forward_and_log_det(tf.cast(x, dtype))
    back = layer.inverse(y)
    assert y.dtype == back.dtype == log_det.dtype == layer(tf.cast(x, dtype)).dtype == dtype
    assert all(weight.dtype == dtype for weight in layer.trainable_weights)
    error = np.abs(np.asarray(back, np.float64) - x)
    if name != "free":  # which may have several preimages
        assert error.max() < (0.1 if dtype == "float16" else 0.6)
        assert layer.certificate().invertible, layer.certificate()


@pytest.mark.parametrize(("name", "dtype"), [(name, HALF[i % 2]) for i, name in enumerate([*LAYERS, *OTHERS, *RECURRENT])])
def test_half_precision_has_gradients(rng, name, dtype):
    layer = {**LAYERS, **OTHERS, **RECURRENT}[name](dtype=dtype)
    shape = (3, D) if name in RECURRENT else (D,)
    x = tf.cast(rng.normal(size=(8, *shape)), dtype)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(tf.cast(layer(x), "float32") - 1))
    gradients = tape.gradient(loss, [weight.value for weight in layer.trainable_weights])
    assert all(np.isfinite(np.asarray(tf.cast(gradient, "float64"))).all() for gradient in gradients)
    if name not in ("act_norm", "coupling"):
        assert any(np.abs(np.asarray(tf.cast(gradient, "float64"))).max() > 0 for gradient in gradients)


def _capped(policy, rng, d=3, max_skew=50.0):
    """A relaxed Cayley layer at the edge of what it may be: ‖B‖ and ‖K‖ at their bounds."""
    layer = AuxReflection(kernels.RelaxedCayley(max_skew=max_skew), dtype=policy)
    layer.build((None, d))
    layer.weights[0].assign(10 * rng.normal(size=(d, d)))
    layer.weights[1].assign(skew(d, 4 * max_skew, rng))
    return layer


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16", "float16"])
def test_promises_are_kept_in_half_precision(rng, policy):
    """At the cap of the skew part W rounded to half has up to three preimages; the W that is used has one."""
    for _ in range(4):
        layer = _capped(policy, rng)
        assert layer.certificate().invertible, layer.certificate()
        assert bool(layer.proof())
        w = np.asarray(layer.kernel, np.float64)
        assert all(len(ops.preimages(y, w)) == 1 for y in rng.normal(size=(8, 3)))
        # What `call` computes is the map of that W, and not of W in half precision.
        x = tf.cast(rng.normal(size=(40, 3)), layer.compute_dtype)
        exact = np.asarray(ops.reflect(tf.cast(x, "float64"), tf.constant(w)))
        rounding = 2.0**-7 if "bfloat16" in policy else 2.0**-10
        assert np.abs(np.asarray(tf.cast(layer(x), "float64")) - exact).max() < 4 * rounding
        assert np.abs(np.asarray(tf.cast(layer.forward_and_log_det(x)[0], "float64")) - exact).max() < 4 * rounding


def test_rounding_would_break_the_promise(rng):
    """The test above can fail: the same W in bfloat16 loses its certificate, and vectors get more preimages."""
    lost, several = 0, 0
    for _ in range(15):
        w = np.asarray(tf.cast(tf.cast(_capped("float32", rng).kernel, "bfloat16"), "float64"))
        lost += not kernels.certify(w).invertible
        several += any(len(ops.preimages(y, w)) > 1 for y in rng.normal(size=(20, 3)))
    assert lost > 5
    assert several > 0


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_the_certificate_of_a_free_layer_is_that_of_the_rounded_matrix(rng, policy):
    half = policy.removeprefix("mixed_")
    declined = 0
    for _ in range(15):
        w = np.asarray(_capped("float32", rng).kernel, np.float64)
        layer = AuxReflection(dtype=policy, kernel_initializer=keras.initializers.Constant(w))
        layer.build((None, 3))
        rounded = np.asarray(tf.cast(tf.cast(tf.cast(w, "float32"), half), "float64"))
        np.testing.assert_array_equal(np.asarray(layer.kernel, np.float64), rounded)
        certificate = layer.certificate()
        assert certificate == kernels.certify(rounded)
        declined += not certificate.invertible
    assert declined > 0


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_matrix_in_mixed_precision_is_one_matrix(rng, policy):
    """Value, inverse, log-determinant and certificate are those of W in half precision."""
    layer = InvertibleDense(kernel_initializer="glorot_uniform", dtype=policy)
    layer.build((None, D))
    w = np.asarray(tf.cast(tf.cast(layer.kernel.value, layer.compute_dtype), "float64"))
    assert layer.certificate().condition == pytest.approx(np.linalg.cond(w), rel=1e-6)
    log_det = float(layer.log_det_jacobian(np.ones((1, D)))[0])
    assert log_det == pytest.approx(np.linalg.slogdet(w)[1], rel=2.0**-7)
    back = np.asarray(tf.cast(layer.inverse(np.eye(D)), "float64")).T
    assert np.abs(back - np.linalg.inv(w)).max() < 2.0**-7 * np.abs(np.linalg.inv(w)).max()


@pytest.mark.parametrize(
    ("name", "kind"), [(name, ("uint8", "int32", "bool")[i % 3]) for i, name in enumerate([*LAYERS, *OTHERS])]
)
def test_integers_are_cast_as_by_dense(rng, name, kind):
    layer = {**LAYERS, **OTHERS}[name](dtype="float32")
    x = rng.integers(0, 2 if kind == "bool" else 100, size=(3, D)).astype(kind)
    expected = layer(x.astype("float32"))
    for given in (x, tf.constant(x)):
        y = layer(given)
        assert y.dtype == "float32" == keras.layers.Dense(2, dtype="float32")(given).dtype
        assert_agree(y, expected)
        if name in LAYERS and kind != "bool":
            assert_agree(layer.inverse(given), layer.inverse(x.astype("float32")))
    inputs = keras.Input((D,), dtype=kind)
    np.testing.assert_allclose(keras.Model(inputs, layer(inputs))(x), expected, rtol=1e-6)


def test_squeeze_casts_integers_in_both_directions():
    x = np.arange(16).reshape(1, 2, 2, 4)
    y = Squeeze()(x)
    assert y.dtype == "float32"
    np.testing.assert_array_equal(Squeeze().inverse(y), x)


@pytest.mark.parametrize("transition", ["aux", "exp"])
def test_recurrent_layers_cast_integers(rng, transition):
    layer, x = OrthogonalRNN(5, transition), rng.integers(0, 9, size=(2, 6, 3))
    assert_agree(layer(x), layer(x.astype("float32")))
    state = [tf.ones((2, 5))]
    assert_agree(layer.cell(x[:, 0], state)[0], layer.cell(tf.cast(x[:, 0], "float32"), state)[0])


def test_reflection_of_in_half_precision():
    for dtype in HALF:
        w = initializers.ReflectionOf(initializers.Cayley(seed=0))((8, 8), dtype=dtype)
        assert w.dtype == dtype
