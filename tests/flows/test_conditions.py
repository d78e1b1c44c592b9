"""Flows with a context, of numbers and of labels: for vectors and for images."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import Flow, Glow, export_saved_model
from keras_auxref.flows import AffineCoupling
from tests.flows.support import disturb, images
from tests.support import assert_agree

RNG = np.random.default_rng(0)
X, CONTEXT, LABELS = RNG.normal(size=(8, 3)).astype("float32"), RNG.normal(size=(8, 2)).astype("float32"), np.arange(8) % 3


def numbers(**kwargs):
    return Flow(3, **{"steps": 1, "hidden": 4, "seed": 1, "coupling": "affine", "context": 2, **kwargs})


def labelled(**kwargs):
    return Flow(3, **{"steps": 1, "hidden": 4, "seed": 1, "coupling": "affine", "classes": 3, **kwargs})


@pytest.mark.parametrize(("model", "context"), [(numbers, CONTEXT), (labelled, LABELS)])
def test_the_density_depends_on_the_context_and_inverts_with_it(model, context):
    model = disturb(model())
    z, log_det = model.encode(X, context)
    np.testing.assert_allclose(model.decode(z, context), X, atol=1e-4)
    expected = log_det - 0.5 * tf.reduce_sum(z**2, axis=-1) - 1.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(model.log_prob(X, context), expected, atol=1e-4)
    one = model.log_prob(X[:1], context[:1])
    assert abs(float(model.log_prob(X[:1], context[1:2])[0] - one[0])) > 1e-4
    # One context for all is that context for each.
    np.testing.assert_allclose(model.log_prob(X, context[0]), model.log_prob(X, np.stack([context[0]] * 8)), atol=1e-5)
    assert_agree(model.sample(8, seed=2, context=context)[0], model.sample(8, seed=2, context=context[0])[0])


def test_a_conditional_density_integrates_to_one():
    model = disturb(Flow(2, steps=2, hidden=4, context=1, seed=1, dtype="float64"))
    line = np.linspace(-12, 12, 321)
    grid = np.stack(np.meshgrid(line, line), axis=-1).reshape(-1, 2)
    for value in (-1.0, 2.0):
        total = np.exp(model.log_prob(grid, [value])).sum() * (line[1] - line[0]) ** 2
        assert total == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "context"), [(numbers, CONTEXT), (labelled, LABELS)])
def test_fit_takes_y_for_the_context_from_arrays_and_datasets(make, context, tmp_path):
    model = make()
    history = model.fit(X, context, batch_size=4, epochs=1, validation_data=(X, context), verbose=0).history
    assert set(history) == {"loss", "nats", "val_loss", "val_nats"}
    expected = -float(np.mean(model.log_prob(X, context)))
    assert model.evaluate(X, context, verbose=0)[0] == pytest.approx(expected, rel=1e-4)
    data = tf.data.Dataset.from_tensor_slices((X, context)).batch(4)
    assert model.evaluate(data, verbose=0)[0] == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(model.predict([X, context], verbose=0), -model.log_prob(X, context), atol=1e-4)
    make().fit(data, verbose=0)  # starts from the first batch, with its contexts
    model.save(tmp_path / "flow.keras")
    again = keras.models.load_model(tmp_path / "flow.keras")
    assert again.get_config() == model.get_config()
    assert_agree(again.log_prob(X, context), model.log_prob(X, context))
    served = tf.saved_model.load(str(export_saved_model(model, tmp_path / "served"))).signatures
    given = tf.constant(context, "int32" if context.ndim == 1 else "float32")
    np.testing.assert_allclose(
        served["log_prob"](x=tf.constant(X), context=given)["log_prob"], model.log_prob(X, context), atol=1e-4
    )
    z = served["encode"](x=tf.constant(X), context=given)["z"]
    np.testing.assert_allclose(served["decode"](z=z, context=given)["x"], X, atol=1e-4)
    settings = {"n": tf.constant(2), "seed": tf.constant(3, "int64"), "temperature": tf.constant(1.0)}
    drawn = served["sample"](context=given[:1], **settings)["x"]
    np.testing.assert_allclose(drawn, model.sample(2, seed=3, context=context[0]), atol=1e-4)


@pytest.mark.slow
def test_learns_what_the_context_says():
    """x = c + noise: without the context its deviation is 1.1, with it 0.1 … 0.2 in each entry."""
    c = RNG.normal(size=(512, 1)).astype("float32")
    x = c + 0.2 * RNG.normal(size=(512, 2)).astype("float32")
    model = Flow(2, steps=2, hidden=16, coupling="affine", context=1, seed=1)
    model.compile(Flow.optimizer(learning_rate=0.02, warmup_steps=0))
    model.fit(x, c, epochs=20, batch_size=128, verbose=0)
    entropy = np.log(2 * np.pi * np.e * 0.04)
    assert model.evaluate(x, c, verbose=0)[0] < entropy + 0.5
    assert abs(float(np.mean(model.sample(200, seed=1, context=[1.5]))) - 1.5) < 0.25


def test_distributions_of_several_contexts():
    model = disturb(numbers())
    several = model.distribution(CONTEXT[:2])
    drawn = several.sample(5, seed=1)
    assert drawn.shape == (5, 2, 3)
    expected = np.stack([model.log_prob(drawn[:, i], CONTEXT[i]) for i in range(2)], axis=1)
    np.testing.assert_allclose(several.log_prob(tf.identity(drawn)), expected, atol=1e-4)
    one = model.bijector(CONTEXT[0])
    np.testing.assert_allclose(one.inverse(tf.identity(one.forward(X))), X, atol=1e-4)


@pytest.mark.slow
def test_images_with_labels(tmp_path):
    x, labels = images(8, (4, 4, 3)), np.arange(8) % 2
    model = Glow((4, 4, 3), levels=1, steps=1, hidden=4, seed=1, classes=2)
    model.fit(x, labels, batch_size=4, verbose=0)
    disturb(model)
    bits = model.bits_per_dim(x, labels)
    assert model.evaluate(x, labels, verbose=0)[0] == pytest.approx(float(np.mean(bits)), rel=1e-4)
    assert np.abs(bits - model.bits_per_dim(x, 1 - labels)).max() > 1e-5
    z = model.encode(x, labels)[0]
    np.testing.assert_allclose(model.decode(z, labels), x / 255, atol=1e-4)
    assert model.sample(3, seed=1, context=1).shape == (3, 4, 4, 3)
    model.save(tmp_path / "flow.keras")
    assert_agree(keras.models.load_model(tmp_path / "flow.keras").log_prob(x, labels), model.log_prob(x, labels))


@pytest.mark.parametrize(
    ("model", "context", "message"),
    [
        (numbers, None, r"made with context=2, and needs a context. Expected shape \(batch, 2\). Received: none"),
        (numbers, CONTEXT[:, :1], r"Expected shape \(batch, 2\). Received: \(8, 1\)"),
        (numbers, CONTEXT[:3], "Expected 1 context, or 8. Received: 3 contexts"),
        (numbers, np.full((8, 2), np.nan, "float32"), "The context does not fit .* 16 that are NaN"),
        (labelled, LABELS + 1, "Expected whole numbers 0 … 2 .* Received: numbers from 1 to 3"),
        (labelled, LABELS.astype("float32"), r"Received: float32 of shape \(8,\)"),
    ],
)
def test_a_context_that_does_not_fit_is_refused(model, context, message):
    with pytest.raises(ValueError, match=message):
        model().log_prob(X, context)


def test_all_of_an_array_of_contexts_is_looked_at(monkeypatch):
    """Also what is beyond the vectors that ActNorm starts from."""
    monkeypatch.setattr(Flow, "initial_size", 4)
    labels, model = np.where(np.arange(8) == 7, 3, LABELS), labelled()
    for call in (lambda: model.fit(X, labels, verbose=0), lambda: model.predict([X, labels], verbose=0)):
        with pytest.raises(ValueError, match="Received: numbers from 0 to 3"):
            call()
    with pytest.raises(ValueError, match=r"Received: 1 that are NaN or infinite, in column 1"):
        numbers().fit(X, np.where(np.arange(16).reshape(8, 2) == 15, np.nan, CONTEXT), verbose=0)
    with pytest.raises(ValueError, match=r"needs a context.* Received: none"):
        model.fit(tf.data.Dataset.from_tensor_slices((X,)).batch(4), verbose=0)


def test_a_coupling_with_another_context_is_refused():
    given = AffineCoupling(hidden=4, context=3)
    with pytest.raises(ValueError, match=r"without `context`, or with context=2. Received: 'affine.*' with context=3"):
        numbers(coupling=given)
    with pytest.raises(ValueError, match=r"Expected a coupling without `context`. Received: 'affine.*' with context=3"):
        Flow(3, coupling=given)
    assert numbers(coupling=AffineCoupling(hidden=4, context=2)).log_prob(X, CONTEXT).shape == (8,)


def test_without_a_context_none_is_taken_and_y_is_ignored():
    model = Flow(3, steps=1, hidden=4, coupling="affine", seed=1)
    with pytest.raises(ValueError, match=r"made without a context. Expected no context"):
        model.log_prob(X, CONTEXT)
    model.fit(X, LABELS, verbose=0)
    assert model.evaluate(X, LABELS, verbose=0)[0] == pytest.approx(-float(np.mean(model.log_prob(X))), rel=1e-4)
