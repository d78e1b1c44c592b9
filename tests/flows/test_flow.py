"""A density of vectors: what it answers, what it refuses, and that it is a density."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import FactoredReflection, Flow, export_saved_model
from keras_auxref.flows import COUPLINGS, MIXINGS, SplineCoupling
from tests.flows.support import disturb
from tests.support import assert_agree, log_abs_det

PROVEN = [mixing for mixing in MIXINGS if mixing != "aux"]
GRID = [(mixing, coupling) for mixing in PROVEN for coupling in COUPLINGS]
PAIRS = [(mixing, COUPLINGS[i % len(COUPLINGS)]) for i, mixing in enumerate(PROVEN)]  # each of both, at least once


def _marks(pair):
    """Every coupling by default, every mixing among the slow tests, and all pairs by hand."""
    if pair not in PAIRS:
        return [pytest.mark.slow, pytest.mark.exhaustive]
    return [] if pair in PAIRS[: len(COUPLINGS)] else [pytest.mark.slow]


def vectors(n, d=3, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d)).astype("float32")


def small(d=3, **kwargs):
    return Flow(d, **{"steps": 2, "hidden": 4, "seed": 1, **kwargs})


@pytest.fixture(scope="module")
def trained():
    model = small()
    history = model.fit(vectors(64), epochs=2, batch_size=32, validation_data=(vectors(16, seed=1),), verbose=0).history
    return model, history


@pytest.mark.parametrize(("mixing", "coupling"), [pytest.param(*pair, marks=_marks(pair)) for pair in GRID])
def test_a_density_integrates_to_one(mixing, coupling):
    """On a grid over all that matters, after some steps of training."""
    model, x = small(2, mixing=mixing, coupling=coupling, dtype="float64"), vectors(256, 2).astype("float64")
    model.compile(keras.optimizers.Adam(0.02), run_eagerly=True)
    model.fit(np.stack([x[:, 0], x[:, 1] + x[:, 0] ** 2], axis=1), batch_size=32, verbose=0)
    line = np.linspace(-12, 12, 321)
    grid = np.stack(np.meshgrid(line, line), axis=-1).reshape(-1, 2)
    total = np.exp(-model(grid)).sum() * (line[1] - line[0]) ** 2
    assert total == pytest.approx(1, abs=1e-3)
    assert all(certificate.invertible for certificate in model.certificates().values())


def test_log_prob_is_that_of_a_brute_force_jacobian():
    model, x = disturb(small(dtype="float64")), tf.constant(vectors(3).astype("float64"))
    z, log_det = model.encode(x)
    brute = log_abs_det(lambda x: model.encode(x)[0], x, 1)
    np.testing.assert_allclose(log_det, brute, rtol=1e-9, atol=1e-10)
    expected = brute - 0.5 * np.square(z).sum(-1) - 1.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(model.log_prob(x), expected, rtol=1e-9)
    np.testing.assert_allclose(model(x), -expected, rtol=1e-9)
    np.testing.assert_allclose(model.decode(tf.identity(z)), x, atol=1e-9)


def test_fit_starts_from_data_and_reports_nats(trained):
    model, history = trained
    assert model.initialized
    assert set(history) == {"loss", "nats", "val_loss", "val_nats"}
    x = vectors(32, seed=2)
    assert model.evaluate(x, verbose=0)[0] == pytest.approx(-float(np.mean(model.log_prob(x))), rel=1e-5)
    assert_agree(model.predict(x, verbose=0), -model.log_prob(x))


def test_the_start_standardises_data_of_any_scale():
    model, x = small(), vectors(500) * [1e-4, 1.0, 1e4] + [5.0, -3.0, 1e5]
    model.initialize(x)
    z = model.encode(x)[0].numpy()
    np.testing.assert_allclose(z.std(axis=0), np.ones(3), atol=0.3)


def test_samples_have_a_seed_and_the_distribution_agrees(trained):
    model, _ = trained
    x = vectors(8, seed=3)
    assert_agree(model.sample(4, seed=5), model.sample(4, seed=5))
    assert np.abs(model.sample(4, seed=5) - model.sample(4, seed=6)).max() > 1e-3
    np.testing.assert_allclose(model.distribution().log_prob(x), model.log_prob(x), atol=1e-4)
    bijector = model.bijector()
    np.testing.assert_allclose(bijector.inverse(tf.identity(bijector.forward(x))), x, atol=1e-4)


@pytest.mark.slow
def test_saves_loads_and_is_served(trained, tmp_path):
    model, _ = trained
    x = vectors(4, seed=4)
    model.save(tmp_path / "flow.keras")
    again = keras.models.load_model(tmp_path / "flow.keras")
    assert again.get_config() == model.get_config()
    assert again.initialized
    assert_agree(again.log_prob(x), model.log_prob(x))
    served = tf.saved_model.load(str(export_saved_model(model, tmp_path / "served"))).signatures
    assert set(served) == {"serving_default", "log_prob", "encode", "decode", "sample"}
    np.testing.assert_allclose(served["log_prob"](x=tf.constant(x))["log_prob"], model.log_prob(x), atol=1e-4)
    z = served["encode"](x=tf.constant(x))["z"]
    np.testing.assert_allclose(served["decode"](z=z)["x"], x, atol=1e-4)
    drawn = served["sample"](n=tf.constant(2), seed=tf.constant(3, "int64"), temperature=tf.constant(1.0))["x"]
    np.testing.assert_allclose(drawn, model.sample(2, seed=3), atol=1e-4)


def test_layers_as_parts_save_and_load(tmp_path):
    model = disturb(small(mixing=FactoredReflection(margin=0.3), coupling=SplineCoupling(hidden=4, bins=3)))
    model.save(tmp_path / "flow.keras")
    assert_agree(keras.models.load_model(tmp_path / "flow.keras").log_prob(vectors(3)), model.log_prob(vectors(3)))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.ones((4, 2), "float32"), r"Expected shape \(batch, 3\). Received: \(4, 2\)"),
        (np.ones(3, "float32"), r"Received: \(3,\)"),
        (np.ones((4, 3), "int32"), "Expected floating-point numbers. Received: int32"),
        (np.array([[1.0, np.nan, 2], [np.inf, 1, 2]], "float32"), "Received: 2 that are NaN or infinite, in columns 0, 1"),
        (np.ones((4, 3), "complex64"), "this model. Expected floating-point numbers. Received: complex64"),
        (np.ones((4, 3), object), "Expected floating-point numbers. Received: object"),
        ({"a": 1}, "Expected a tensor. Received: a dictionary"),
    ],
)
def test_bad_data_are_refused(x, message):
    model = small()
    for method in (model.fit, model.evaluate):
        with pytest.raises(ValueError, match=message):
            method(x, verbose=0)
    if not isinstance(x, dict):
        for method in (model.log_prob, model.encode):
            with pytest.raises(ValueError, match=message):
                method(x)


def test_constant_columns_are_named():
    x = vectors(16)
    x[:, 1] = 7
    with pytest.raises(ValueError, match=r"Expected columns that vary. Received: column 1, constant over 16 vectors"):
        small().fit(x, verbose=0)
    for rows in (0, 1):
        with pytest.raises(ValueError, match=f"Expected 2 or more vectors. Received: {rows}"):
            small().fit(x[:rows], verbose=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"d": 1}, "Expected 2, 3, 4, … Received: 1"),
        ({"steps": 0}, "Expected 1, 2, 3, … Received: 0"),
        ({"dtype": "float16"}, "float32 or float64"),
        ({"context": 0}, "Expected None, 1, 2, 3, … Received: 0"),
        ({"context": 2, "classes": 3}, "Received: context=2 and classes=3"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        small(**arguments)


def test_methods_of_several_models_are_not_taken_for_one_that_is_traced_again_and_again():
    """TensorFlow counts by the code of a function, which all of them share."""
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logger = logging.getLogger("tensorflow")
    level = logger.level
    logger.setLevel("WARNING")
    logger.addHandler(handler)
    try:
        for _ in range(3):
            model, x = Flow(2, steps=1, hidden=4, coupling="affine"), np.eye(2, dtype="float32") + np.ones((2, 1), "float32")
            model.initialize(x)
            z, _ = model.encode(x)
            model.decode(z)
            model.log_prob(x)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert not [message for message in seen if "retracing" in message]
