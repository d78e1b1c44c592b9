"""The variational autoencoder to learn from."""

import re

import keras
import matplotlib.image
import numpy as np
import pytest

from keras_auxref.posteriors import FactoredFlow, HouseholderFlow
from tests.examples.conftest import load

vae = load("vae")


def test_trains_prints_draws_and_saves(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train, test = vae.load("digits")
    assert (train.shape, test.shape) == ((1297, 64), (500, 64))
    assert set(np.unique(train)) == {0.0, 1.0}
    monkeypatch.setattr(vae, "load", lambda name: (train[:64], test[:32]))
    vae.main(["--epochs", "1", "--steps", "2"])
    printed = capsys.readouterr().out
    bound, weighted = map(float, re.search(r"ELBO ([\d.]+), −log p\(x\) at most ([\d.]+)", printed).groups())
    assert 20 < weighted < bound < 64
    assert matplotlib.image.imread("runs/vae-digits-aux.png").shape[:2] == (32, 64)
    loaded = keras.models.load_model("runs/vae-digits-aux.keras")
    assert isinstance(loaded.flow, FactoredFlow)
    assert loaded.flow.steps == 2
    assert vae.bounds(loaded, test[:32], 256)["negative_elbo"] == pytest.approx(bound, rel=0.01)
    again = keras.models.load_model("runs/vae-digits-aux.keras")
    assert len(again.trainable_weights) == 18
    for a, b in zip(loaded.weights, again.weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_bound_is_that_of_the_definition():
    """log p(x|z) + log p(z) − log q(z|x) by hand, for a posterior without a flow."""
    model = vae.VAE(pixels=5, latent=2, hidden=4, flow=HouseholderFlow(0))
    x = np.array([[0, 1, 1, 0, 1], [1, 1, 0, 0, 0]], "float32")
    seen = {}
    decoder = model.decoder

    def decode(z):
        seen["z"], seen["logits"] = np.asarray(z), np.asarray(decoder(z))
        return seen["logits"]

    model.__dict__["decoder"] = decode
    weights = model.log_weights(x, 3)
    mean, log_deviation = np.split(np.asarray(model.gaussian(model.encoder(x))), 2, axis=-1)
    z, p = seen["z"].reshape(3, 2, 2), 1 / (1 + np.exp(-seen["logits"].reshape(3, 2, 5)))
    log_q = np.sum(-0.5 * ((z - mean) / np.exp(log_deviation)) ** 2 - log_deviation - 0.5 * np.log(2 * np.pi), axis=-1)
    log_p = np.sum(np.log(np.where(x == 1, p, 1 - p)), axis=-1)
    expected = log_p + np.sum(-0.5 * z**2 - 0.5 * np.log(2 * np.pi), axis=-1) - log_q
    np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-4)
