"""The flow as a Keras model and as a TFP distribution."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import AuxReflection, Glow
from keras_auxref.flows import AffineCoupling
from keras_auxref.flows.randomness import normal
from tests.flows.support import disturb, images
from tests.support import assert_agree, log_abs_det, quick

SHAPE = (4, 4, 3)


def small(mixing="aux", shape=SHAPE, **kwargs):
    return Glow(shape, **{"levels": 2, "steps": 1, "hidden": 4, "mixing": mixing, "seed": 1, **kwargs})


def gradients(count, shape=(8, 8, 3), seed=0):
    """Images with something to learn: a smooth ramp in a random direction."""
    generator = np.random.default_rng(seed)
    slope, base = generator.normal(size=(count, 2, 1, 1, 1)), generator.uniform(60, 190, size=(count, 1, 1, 3))
    row, column = np.mgrid[: shape[0], : shape[1]]
    ramp = slope[:, 0] * row[None, ..., None] + slope[:, 1] * column[None, ..., None]
    return np.clip(base + 6 * ramp, 0, 255).astype("uint8")


def test_log_prob_is_that_of_a_brute_force_jacobian():
    model = disturb(small("aux_factored", dtype="float64"))
    x = tf.constant(np.random.default_rng(0).uniform(size=(2, *SHAPE)))
    z, log_det = model.encode(x)
    brute = log_abs_det(lambda x: model.encode(x)[0], x, 3)
    np.testing.assert_allclose(model.log_prob(x), brute - 0.5 * np.square(z).sum(-1) - 24 * np.log(2 * np.pi), rtol=1e-9)
    np.testing.assert_allclose(log_det, brute, rtol=1e-9)
    np.testing.assert_allclose(model.decode(tf.identity(z)), x, atol=1e-9)


@pytest.mark.parametrize("mixing", ["aux_relaxed_cayley", "aux_factored"])
def test_density_of_a_certified_flow_integrates_to_one(mixing):
    # Two pixels of one channel have 4 entries: importance sampling with a uniform proposal over images settles it.
    model = disturb(small(mixing, (2, 2, 1), levels=1, dtype="float64"), size=0.2)
    width = 256 / 255 / 0.9  # of the support of every pixel, about ½
    x = 0.5 + width * np.random.default_rng(0).uniform(-0.5, 0.5, size=(200_000, 2, 2, 1))
    density = np.exp(model.log_prob(x).numpy()) * width**4
    assert density.mean() == pytest.approx(1, abs=5 * density.std() / len(x) ** 0.5)
    assert density.std() / len(x) ** 0.5 < 0.05


# What is proven, and what is not; tests of the layers have the gradients of all.
@pytest.mark.parametrize("mixing", ["aux_factored", *quick(("aux_conv", "aux", "qr"), keep=1, exhaustive=True)])
def test_fit_learns_and_still_inverts(mixing):
    keras.utils.set_random_seed(0)
    model, x = small(mixing, (8, 8, 3), hidden=16), gradients(256)
    model.compile(optimizer=Glow.optimizer(5e-3, warmup_steps=5))
    history = model.fit(x, batch_size=64, epochs=8, verbose=0).history["bits_per_dim"]
    assert history[-1] < history[0] - 0.5
    z, _ = model.encode(x[:16])
    np.testing.assert_allclose(model.decode(tf.identity(z)), x[:16] / 255, atol=1e-4)


def test_fit_compiles_initialises_and_reports():
    model = small("fixed")
    assert not model.flow.initialized
    history = model.fit(images(8, SHAPE), verbose=0).history
    assert model.flow.initialized
    assert model.compiled
    assert history["loss"] == pytest.approx(history["bits_per_dim"])
    assert model.optimizer.global_clipnorm > 0
    assert float(model.optimizer.learning_rate) < 1e-3


@pytest.mark.parametrize("source", ["pairs", "sequence"])  # tests/flows/test_images.py has more
def test_fit_takes_what_keras_takes(source):
    class Sequence(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return (images(4, SHAPE, seed=index),)

    dataset = tf.data.Dataset.from_tensor_slices(images(8, SHAPE)).batch(4)
    data = {"pairs": dataset.map(lambda x: (x, x)), "sequence": Sequence()}
    model = small("fixed")
    assert np.isfinite(model.fit(data[source], verbose=0).history["loss"]).all()
    assert model.flow.initialized


def test_a_generator_loses_nothing_to_the_start_of_act_norm():
    model, seen = small("fixed"), []

    def batches():
        for index in range(3):
            seen.append(index)
            yield (images(4, SHAPE, seed=index),)

    model.fit(batches(), steps_per_epoch=3, verbose=0)
    assert seen == [0, 1, 2]
    assert int(model.optimizer.iterations) == 3
    assert model.flow.initialized


@pytest.mark.parametrize("bits", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_integers_and_fractions_are_the_same_images_everywhere(bits):
    model, peak = disturb(small("conv", dtype="float64", bits=bits)), 2**bits - 1
    x = np.random.default_rng(0).integers(0, peak + 1, (4, *SHAPE))
    for method in (model.bits_per_dim, model.log_prob, model.encode, model.predict):
        for whole, fraction in zip(method(x), method(x / peak), strict=True):
            np.testing.assert_allclose(whole, fraction, rtol=1e-12)
    np.testing.assert_allclose(model.distribution().log_prob(x / peak), model.log_prob(x), rtol=1e-12)
    np.testing.assert_allclose(model.decode(model.encode(x)[0]), x / peak, atol=1e-9)
    model.compile(optimizer="sgd")
    assert model.evaluate(x, verbose=0) == pytest.approx(model.evaluate(x / peak, verbose=0), rel=1e-12)


@pytest.mark.parametrize("bits", [1, 8])
def test_bits_per_dim_is_log_prob_of_dequantised_images(bits):
    model, peak = disturb(small("conv", dtype="float64", bits=bits)), 2**bits - 1
    x = np.random.default_rng(0).integers(0, peak + 1, (3, *SHAPE))
    noise = tf.random.stateless_uniform(x.shape, (0, 0), dtype="float64", alg="philox")
    # P(image) ≥ the density times the volume of its share of the line, of width 1/(2ᵇ − 1) in every pixel
    log_prob = model.distribution().log_prob((x - 0.5 + noise.numpy()) / peak) - 48 * np.log(peak)
    np.testing.assert_allclose(model.bits_per_dim(x), -log_prob / (48 * np.log(2)), rtol=1e-12)
    np.testing.assert_allclose(model.predict(x, verbose=0), model.bits_per_dim(x), rtol=1e-12)


def test_pixels_lie_in_the_middle_of_the_noise():
    # The mean of log p over the noise of dark pixels is that at the pixels, and not at an end of their share of the line.
    model, x = disturb(small("conv", dtype="float64")), np.full((1, *SHAPE), 2)
    noise = np.random.default_rng(0).uniform(size=(400, *SHAPE))
    spread = model.log_prob((x - 0.5 + noise) / 255).numpy().mean()
    at = [float(model.log_prob((x + shift) / 255)[0]) for shift in (-0.5, 0.0, 0.5)]
    assert float(model.log_prob(x)[0]) == pytest.approx(at[1], rel=1e-9)
    assert abs(at[1] - spread) < 0.1 * min(abs(at[0] - spread), abs(at[2] - spread))


def test_impossible_images_have_no_density_inside_of_a_graph():
    model = disturb(small("aux_factored"))
    x = np.full((3, *SHAPE), 0.5, "float32")
    x[1, 0, 0, 0], x[2] = 2.0, 200.0
    log_prob = tf.function(model.log_prob, autograph=False)(x)
    np.testing.assert_array_equal(np.isneginf(log_prob), [False, True, True])
    assert np.isfinite(log_prob[0])
    np.testing.assert_array_equal(np.isneginf(model.distribution().log_prob(x)), [False, True, True])
    z, log_det = tf.function(model.encode, autograph=False)(x)
    np.testing.assert_array_equal(np.isnan(z).all(axis=-1), [False, True, True])
    np.testing.assert_array_equal(np.isneginf(log_det), [False, True, True])
    bits = tf.function(model.bits_per_dim, autograph=False)(tf.constant([[[[7] * 3] * 4] * 4, [[[256] * 3] * 4] * 4]))
    assert np.isfinite(bits[0])
    assert np.isposinf(bits[1])


def test_only_the_loss_of_a_flow():
    for arguments in ({"loss": "mse"}, {"metrics": ["mae"]}, {"weighted_metrics": ["mae"]}, {"loss_weights": [1.0]}):
        with pytest.raises(ValueError, match=rf"Expected no `{next(iter(arguments))}`. Received: "):
            small("fixed").compile(optimizer="sgd", **arguments)


def test_the_first_training_step_is_traced_once(monkeypatch):
    calls, call = [], Glow.call

    def counted(self, inputs, training=None):
        calls.append(tf.executing_eagerly())
        return call(self, inputs, training)

    monkeypatch.setattr(Glow, "call", counted)
    model = small("fixed")
    model.fit(images(4, SHAPE), verbose=0)
    assert calls == [False]  # without the variables of the optimizer TensorFlow would trace it once more


def test_train_on_batch_starts_act_norm():
    model, x = small("fixed"), images(8, SHAPE)
    model.compile(optimizer=keras.optimizers.SGD(1e-9))
    trained = model.train_on_batch(x, return_dict=True)
    assert model.flow.initialized
    assert trained["bits_per_dim"] == pytest.approx(model.test_on_batch(x, return_dict=True)["bits_per_dim"], rel=0.01)


def test_evaluate_repeats_and_training_noise_does_not():
    model, x = small("conv"), images(8, SHAPE)
    model.compile(optimizer="sgd")
    assert model.evaluate(x, verbose=0) == pytest.approx(model.evaluate(x, verbose=0), rel=1e-6)
    assert np.abs(model(x, training=True) - model(x, training=True)).max() > 0


def test_sample_weights_weigh():
    model, x = small("conv"), images(4, SHAPE)
    model.compile(optimizer="sgd")
    bits = model.bits_per_dim(x).numpy()
    weights = np.array([1.0, 0.0, 0.0, 3.0])
    # Keras passes weights on only beside labels, whatever these are.
    weighted = model.evaluate(x, np.zeros(4), sample_weight=weights, verbose=0, return_dict=True)
    assert weighted["loss"] == pytest.approx((bits[0] + 3 * bits[3]) / 4, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mixing", ["aux_factored", pytest.param(AuxReflection("spectral"), marks=pytest.mark.exhaustive)])
def test_saves_and_loads_with_the_state_of_training(mixing, tmp_path):
    model, x = small(mixing), images(8, SHAPE)
    model.fit(x, verbose=0)
    model.save(tmp_path / "flow.keras")
    again = keras.models.load_model(tmp_path / "flow.keras")
    assert again.flow.initialized
    assert int(again.optimizer.iterations) == 1
    assert_agree(again.bits_per_dim(x), model.bits_per_dim(x))
    assert_agree(again.sample(2, seed=3), model.sample(2, seed=3))
    before = [np.asarray(w) for w in again.weights if w.name == "act_norm_shift"]
    again.fit(x, verbose=0)  # goes on, and does not start ActNorm anew
    after = [np.asarray(w) for w in again.weights if w.name == "act_norm_shift"]
    assert len(after) == 2
    assert max(np.abs(a - b).max() for a, b in zip(after, before, strict=True)) < 1e-3


@pytest.mark.slow
def test_an_interrupted_fit_resumes(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    x, backup = images(8, SHAPE), lambda: keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(KeyboardInterrupt):
        small("fixed").fit(x, epochs=3, verbose=0, callbacks=[backup(), Stop()])
    model = small("fixed")
    history = model.fit(x, epochs=3, verbose=0, callbacks=[backup()])
    assert history.epoch == [2]
    assert int(model.optimizer.iterations) == 3


def test_samples_follow_seed_and_temperature():
    model = disturb(small("conv"))
    assert_agree(model.sample(3, seed=5), model.sample(3, seed=5))
    assert np.abs(model.sample(3, seed=5) - model.sample(3, seed=6)).max() > 0
    assert np.abs(model.sample(3) - model.sample(3)).max() > 0
    cold = model.sample(3, seed=5, temperature=0.0).numpy()
    np.testing.assert_allclose(cold, np.repeat(cold[:1], 3, axis=0), atol=1e-6)
    assert cold.shape == (3, *SHAPE)
    assert cold.min() >= 0
    assert cold.max() <= 1
    with pytest.raises(ValueError, match="temperature"):
        model.sample(1, temperature=-1.0)


def test_distribution_and_bijector_are_views():
    import tensorflow_probability as tfp

    model = disturb(small("aux_relaxed_cayley", dtype="float64"))
    x = np.random.default_rng(0).uniform(size=(2, *SHAPE))
    distribution = model.distribution()
    assert distribution.event_shape == SHAPE
    np.testing.assert_allclose(distribution.log_prob(x), model.log_prob(x), rtol=1e-10)
    assert distribution.sample(3, seed=1).shape == (3, *SHAPE)
    assert len(distribution.trainable_variables) == len(model.trainable_variables)
    disturb(model, seed=9)
    np.testing.assert_allclose(model.distribution().log_prob(x), model.log_prob(x), rtol=1e-10)
    np.testing.assert_allclose(distribution.log_prob(x), model.log_prob(x), rtol=1e-10)
    bijector = model.bijector()
    np.testing.assert_allclose(bijector.inverse(tf.identity(bijector.forward(x))), x, atol=1e-9)
    chain = tfp.bijectors.Chain([tfp.bijectors.Scale(tf.constant(2.0, tf.float64)), bijector])
    np.testing.assert_allclose(chain.forward(x), 2 * model.encode(x)[0], rtol=1e-10)
    with tf.GradientTape() as tape:
        loss = -tf.reduce_mean(model.distribution().log_prob(x))
    found = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
    assert all(g is not None for g in found)


def test_default_is_proven_and_supports_xla():
    model = Glow(SHAPE, levels=1, steps=1, hidden=4)
    assert model.mixing == "aux_factored"
    assert model.supports_jit
    assert all(certificate.invertible for certificate in disturb(model, size=3.0).certificates().values())


@pytest.mark.slow
@pytest.mark.parametrize("mixing", ["aux_factored"])
def test_xla_where_it_is_supported(mixing):
    model = small(mixing)
    model.compile(optimizer=Glow.optimizer(), jit_compile=True)
    assert np.isfinite(model.fit(images(8, SHAPE), batch_size=4, verbose=0).history["loss"]).all()
    assert not small("aux").supports_jit


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_shape": (8, 8)}, "image_shape"),
        ({"image_shape": (6, 8, 3)}, "divisible by 4"),
        ({"mixing": "lu"}, "mixing"),
        ({"bits": 0}, "bits"),
        ({"bits": 8.0}, "bits"),
        ({"squash": 1.0}, "squash"),
        ({"dtype": "float16"}, "float32 or float64"),
        ({"dtype": "mixed_float16"}, "float32 or float64"),
    ],
)
def test_bad_arguments_say_what_was_expected(arguments, message):
    with pytest.raises(ValueError, match=message):
        Glow(**{"image_shape": (8, 8, 3), "levels": 2, "steps": 1, **arguments})


def test_wrong_shapes_are_refused():
    model = small("fixed")
    for call in (model.encode, model.log_prob, model.bits_per_dim, model.initialize):
        with pytest.raises(ValueError, match=r"\(batch, 4, 4, 3\).*Received"):
            call(images(2, (4, 4, 1)))
    with pytest.raises(ValueError, match=r"\(batch, 48\).*Received"):
        model.decode(np.zeros((2, 47), "float32"))


def test_batch_of_one_and_black_and_white_images():
    model = disturb(small("aux_factored"))
    for value in (0, 255):
        x = np.full((1, *SHAPE), value, "uint8")
        z, log_det = model.encode(x)
        assert np.isfinite(z).all()
        assert np.isfinite(log_det).all()
        np.testing.assert_allclose(model.decode(tf.identity(z)), x / 255, atol=1e-4)


def test_typicality_is_the_distance_from_the_mean_of_typical_images():
    model, x = small("conv"), images(6, SHAPE)
    model.initialize(x)
    bits = np.asarray(model.bits_per_dim(x))
    np.testing.assert_allclose(model.typicality(x, x), np.abs(bits - bits.mean()), atol=1e-4)
    flat = np.zeros((1, *SHAPE), "uint8")
    np.testing.assert_allclose(model.typicality(flat, 3.0), np.abs(np.asarray(model.bits_per_dim(flat)) - 3), atol=1e-4)


def test_a_learned_prior_and_normalised_networks_are_in_files_bijectors_and_samples(tmp_path):
    coupling = AffineCoupling(hidden=4, norm=True)
    model = disturb(small("conv", prior="learned", coupling=coupling), size=0.2)
    x = images(3, SHAPE)
    z, log_det = model.encode(x)
    np.testing.assert_allclose(model.decode(tf.identity(z)), x / 255, atol=1e-5)
    np.testing.assert_allclose(model.distribution().log_prob(x / 255), model.log_prob(x), rtol=1e-5)
    np.testing.assert_allclose(
        model.sample(2, seed=1), model.as_samples(model.decode(normal(2, 48, (1, 0), "float32"))), atol=1e-6
    )
    model.save(tmp_path / "flow.keras")
    again = keras.models.load_model(tmp_path / "flow.keras")
    for mine, theirs in zip((z, log_det), again.encode(x), strict=True):
        assert_agree(mine, theirs)
    with again.flow.steps_of_levels[0].copy(0) as step:
        kinds = [type(layer).__name__ for layer in step.layers[-1].network.layers]
    assert kinds.count("LayerNormalization") == 2
