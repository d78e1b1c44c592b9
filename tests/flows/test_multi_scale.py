"""The multi-scale architecture as one invertible layer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import kernels
from keras_auxref.flows import MultiScale
from tests.flows.support import disturb
from tests.support import assert_agree, log_abs_det


def built(shape, mixing="aux", dtype="float64", **kwargs):
    layer = MultiScale(mixing=mixing, dtype=dtype, seed=3, **{"levels": 2, "steps": 2, "hidden": 4, **kwargs})
    layer.build((None, *shape))
    return layer


CASES = [("aux_factored", "float32", 1e-4), ("conv", "float64", 1e-9)]
# One of every kind: that a mixing is what it should be is a test of its layer.
REST = [pytest.param(mixing, "float64", 1e-9, marks=pytest.mark.slow) for mixing in ("aux", "aux_conv", "aux_factored_qr")]


@pytest.mark.parametrize(("mixing", "dtype", "tolerance"), [*CASES, *REST])
def test_inverse_and_log_determinant_are_those_of_the_whole_map(mixing, dtype, tolerance):
    layer = disturb(built((4, 4, 3), mixing, dtype, steps=2, unroll=False))
    x = np.random.default_rng(1).uniform(size=(2, 4, 4, 3)).astype(dtype)

    @tf.function(autograph=False)
    def everything(x):
        z = layer(x)
        return z, layer.inverse(tf.identity(z)), *layer.forward_and_log_det(x)

    z, back, again, log_det = (t.numpy() for t in everything(tf.constant(x)))
    assert z.shape == (2, 48)
    np.testing.assert_allclose(again, z, rtol=1e-6)
    np.testing.assert_allclose(back, x, atol=tolerance)
    np.testing.assert_allclose(log_det, log_abs_det(layer, x, 3), rtol=tolerance)


@pytest.mark.parametrize(("shape", "levels"), [((2, 2, 1), 1), ((6, 2, 3), 1), ((8, 8, 1), 3), ((4, 12, 2), 2)])
def test_unusual_shapes(shape, levels):
    layer = disturb(built(shape, "conv", levels=levels, steps=1))
    x = np.random.default_rng(1).uniform(size=(1, *shape))
    z = layer(x)
    assert z.shape == (1, np.prod(shape)) == layer.compute_output_shape((1, *shape))
    assert layer.inverse_output_shape(z.shape) == (1, *shape)
    np.testing.assert_allclose(layer.inverse(tf.identity(z)), x, atol=1e-10)


@pytest.mark.parametrize("shape", [(6, 8, 3), (8, 7, 3), (None, 8, 3)])
def test_sizes_must_halve(shape):
    with pytest.raises(ValueError, match=r"divisible by 4.*Received"):
        built(shape)


@pytest.mark.parametrize("argument", ["levels", "steps", "hidden"])
def test_counts_are_positive_integers(argument):
    for value in (0, -1, 2.5):
        with pytest.raises(ValueError, match=argument):
            MultiScale(**{argument: value})


def test_initialize_standardises_what_leaves_every_act_norm():
    layer = built((4, 4, 3), "fixed", levels=1, steps=1)
    assert not layer.initialized
    x = np.random.default_rng(1).uniform(size=(64, 4, 4, 3))
    layer.initialize(x)
    assert layer.initialized
    # With couplings still at the identity and a rotation after ActNorm, z has the variance that ActNorm gave.
    z = layer(x).numpy()
    assert np.abs(z.mean(0)).max() < 1
    assert np.square(z).mean() == pytest.approx(1, abs=1e-6)


def test_seed_fixes_the_mixings_and_survives_the_config():
    first, second = built((4, 4, 3)), built((4, 4, 3))
    again = MultiScale.from_config(first.get_config())
    again.build((None, 4, 4, 3))
    starts = [[w for w in flow.weights if "mixing_kernel" in w.name] for flow in (first, second, again)]
    for a, b, c in zip(*starts, strict=True):
        assert_agree(a, b)
        assert_agree(a, c)
        assert np.abs(np.asarray(a[0]) - np.asarray(a[1])).max() > 0.1  # steps start apart
    assert np.abs(np.asarray(starts[0][0][0]) - np.asarray(starts[0][1][0])[:12, :12]).max() > 0.1  # and so do levels


def test_kernels_as_mixings_still_work_and_are_deprecated():
    with pytest.warns(DeprecationWarning, match=r"give a layer, `AuxReflection\(kernel=kernels.Spectral"):
        config = MultiScale(mixing=kernels.Spectral(0.7)).get_config()
    with pytest.warns(DeprecationWarning, match="give a layer"):
        kernel = MultiScale.from_config(config).mixing
    assert isinstance(kernel, kernels.Spectral)
    assert kernel.bound == 0.7


def test_as_a_layer_of_a_keras_model():
    inputs = keras.Input((4, 4, 3))
    model = keras.Model(inputs, MultiScale(levels=1, steps=1, hidden=4, mixing="householder")(inputs))
    assert model.output_shape == (None, 48)
    assert np.isfinite(model.predict(np.full((2, 4, 4, 3), 0.5), verbose=0)).all()


@pytest.mark.parametrize("context", [None, 2])
def test_a_learned_prior_is_a_gaussian_of_the_half_that_leaves_given_the_half_that_stays(context):
    flow = disturb(built((4, 4, 3), "conv", prior="learned", context=context, unroll=True))
    plain = built((4, 4, 3), "conv", context=context)
    for weight, value in zip(plain.weights, flow.weights, strict=False):  # those of the priors come last
        assert weight.shape == value.shape
        weight.assign(value)
    x = np.random.default_rng(1).uniform(size=(3, 4, 4, 3))
    given = {} if context is None else {"context": tf.constant([[0.5, 1.0], [-1.0, 2.0], [0.0, 0.3]], tf.float64)}
    z, log_det = flow.forward_and_log_det(x, **given)
    u, plain_log_det = plain.forward_and_log_det(x, **given)

    # By hand: log N(u; μ, σ²) of what the flow without a prior returns. The first 24 entries leave, the last 24 stay.
    split, top = flow.priors
    stays = plain.squeezes[1].inverse(plain.steps_of_levels[1].inverse(tf.reshape(u[:, 24:], (3, 1, 1, 24)), **given))
    stays = stays if context is None else tf.concat([stays, tf.tile(given["context"][:, None, None], (1, 2, 2, 1))], -1)
    t, r = np.split(split.network(stays).numpy(), 2, axis=-1)
    mean, deviation = -t.reshape(3, 24), np.exp(-2 * np.tanh(r / 2)).reshape(3, 24)
    parameters = np.asarray(top.parameters)[0, 0] + (0 if context is None else given["context"].numpy() @ np.asarray(top.kernel))
    t, r = np.split(np.broadcast_to(parameters, (3, 48)), 2, axis=-1)
    mean, deviation = np.concatenate([mean, -t], 1), np.concatenate([deviation, np.exp(-2 * np.tanh(r / 2))], 1)
    normal = -0.5 * np.square((u - mean) / deviation) - np.log(deviation)
    np.testing.assert_allclose(-0.5 * np.square(z).sum(1) + log_det, normal.sum(1) + plain_log_det, rtol=1e-10)
    np.testing.assert_allclose(flow(x, **given), z, rtol=1e-12)
    np.testing.assert_allclose(flow.inverse(tf.identity(z), **given), x, atol=1e-9)


def test_a_learned_prior_starts_as_the_standard_one_and_old_configurations_have_that():
    x = np.random.default_rng(1).uniform(size=(2, 4, 4, 3))
    learned, standard = (built((4, 4, 3), "conv", prior=prior) for prior in ("learned", "standard"))
    for weight, value in zip(standard.weights, learned.weights, strict=False):
        weight.assign(value)
    assert_agree(learned(x), standard(x))
    config = standard.get_config()
    assert config.pop("prior") == "standard"
    assert MultiScale.from_config(config).prior == "standard"
    with pytest.raises(ValueError, match=r"learned.*Received: 'normal'"):
        MultiScale(prior="normal")
