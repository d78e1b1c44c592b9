"""A variational autoencoder of binary digits whose posterior goes through a flow that the encoder steers.

    python examples/vae.py                           scikit-learn's digits, without a download: a minute on two CPU cores
    python examples/vae.py --posterior householder   T reflections of z: a Gaussian with a full covariance
    python examples/vae.py --posterior none          a Gaussian with a diagonal one
    python examples/vae.py --dataset mnist           28×28 pixels, which Keras downloads

Trains with `fit`, prints the negative ELBO of test images, draws samples, and saves the model.
"""

import argparse
import math
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is imported: no start-up notices

import keras
import numpy as np
from keras import ops

from keras_auxref.posteriors import FactoredFlow, HouseholderFlow, SylvesterFlow

FLOWS = {"aux": FactoredFlow, "householder": HouseholderFlow, "sylvester": SylvesterFlow}


@keras.saving.register_keras_serializable("keras_auxref_examples")
class VAE(keras.Model):
    """p(x|z) p(z) with a standard Gaussian p(z) and independent pixels, and a posterior q(z|x) that is a flow of a Gaussian.

    h = encoder(x),   z₀ = μ(h) + σ(h) ε,   z = flow(z₀, h),   log q(z|x) = log N(z₀; μ, σ²) − log|det ∂z/∂z₀|
    """

    def __init__(self, pixels: int, latent: int, hidden: int, flow: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.settings = {"pixels": pixels, "latent": latent, "hidden": hidden}
        self.encoder = network(pixels, hidden)
        self.decoder = network(latent, hidden, pixels)
        self.gaussian = keras.layers.Dense(2 * latent)
        self.flow, self.latent = flow, latent
        self.noise = keras.random.SeedGenerator()
        # All sizes are known: with every weight made here, a loaded model has them before it is called.
        self.gaussian.build((None, hidden))
        if not flow.built:
            flow.build((None, latent), (None, hidden))

    def log_weights(self, x: Any, samples: int = 1) -> Any:
        """log p(x|z) + log p(z) − log q(z|x) for `samples` z of every x, of shape (samples, batch): their mean is the ELBO."""
        h = self.encoder(x)
        mean, log_deviation = ops.split(self.gaussian(h), 2, axis=-1)
        noise = keras.random.normal((samples, ops.shape(x)[0], self.latent), seed=self.noise)
        z, log_det = self.flow.forward_and_log_det(mean + ops.exp(log_deviation) * noise, h)
        log_q = log_normal(noise) - ops.sum(log_deviation, axis=-1) - log_det
        logits = ops.reshape(self.decoder(ops.reshape(z, (-1, self.latent))), (samples, -1, x.shape[-1]))
        # log σ(l) for a pixel that is on, log σ(−l) for one that is off.
        log_p = ops.sum(ops.log_sigmoid((2 * x - 1) * logits), axis=-1)
        return log_p + log_normal(z) - log_q

    def call(self, x: Any) -> Any:
        weights = self.log_weights(x)
        self.add_loss(-ops.mean(weights))
        return weights

    def sample(self, count: int) -> np.ndarray:
        """Probabilities of pixels for z from p(z)."""
        return ops.convert_to_numpy(ops.sigmoid(self.decoder(keras.random.normal((count, self.latent), seed=self.noise))))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.settings, "flow": keras.saving.serialize_keras_object(self.flow)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "VAE":
        return cls(**{**config, "flow": keras.saving.deserialize_keras_object(config["flow"])})


def network(size: int, hidden: int, outputs: int | None = None) -> keras.Sequential:
    layers = [keras.Input((size,)), *(keras.layers.Dense(hidden, activation="relu") for _ in range(2))]
    return keras.Sequential(layers + ([keras.layers.Dense(outputs)] if outputs else []))


def log_normal(x: Any) -> Any:
    """log N(x; 0, I) on the last axis."""
    return -0.5 * ops.sum(ops.square(x) + math.log(2 * math.pi), axis=-1)


def bounds(model: VAE, x: np.ndarray, samples: int = 64) -> dict[str, float]:
    """In nats per image: the negative ELBO, and the bound on −log p(x) that `samples` weighted z give (Burda et al. 2016)."""
    parts = [ops.convert_to_numpy(model.log_weights(part, samples)) for part in np.array_split(x, math.ceil(len(x) / 100))]
    weights = np.concatenate(parts, axis=-1).astype("float64")
    largest = weights.max(axis=0)
    weighted = largest + np.log(np.exp(weights - largest).mean(axis=0))
    return {"negative_elbo": -float(weights.mean()), "importance_weighted": -float(weighted.mean())}


def load(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Images for training and for tests as vectors of zeros and ones."""
    if name == "mnist":
        (train, _), (test, _) = keras.datasets.mnist.load_data()
    else:
        from sklearn.datasets import load_digits

        images = load_digits().images * 16
        train, test = images[:-500], images[-500:]
    return binary(train), binary(test)


def binary(images: np.ndarray) -> np.ndarray:
    return (images.reshape(len(images), -1) > 127).astype("float32")


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dataset", choices=("digits", "mnist"), default="digits")
    p.add_argument("--posterior", choices=("none", *FLOWS), default="aux", help="flow of the posterior (default: aux)")
    p.add_argument("--steps", type=int, default=4, help="the number T of steps of the flow (default: 4)")
    p.add_argument("--epochs", type=int, help="default: digits 40, mnist 10")
    args = p.parse_args(arguments)
    epochs = args.epochs or {"digits": 40, "mnist": 10}[args.dataset]

    keras.utils.set_random_seed(0)
    train, test = load(args.dataset)
    flow = HouseholderFlow(0) if args.posterior == "none" else FLOWS[args.posterior](args.steps)
    model = VAE(train.shape[1], latent=8 if args.dataset == "digits" else 32, hidden=128, flow=flow)
    model.compile("adam")
    model.fit(train, batch_size=32, epochs=epochs, validation_data=(test,), validation_batch_size=500)

    found = bounds(model, test)
    path = Path("runs", f"vae-{args.dataset}-{args.posterior}.keras")
    path.parent.mkdir(exist_ok=True)
    model.save(path)
    side = math.isqrt(train.shape[1])
    picture = model.sample(32).reshape(4, 8, side, side).swapaxes(1, 2).reshape(4 * side, 8 * side, 1)
    keras.utils.save_img(path.with_suffix(".png"), 255 * picture, scale=False)
    print(
        f"\nAfter {epochs} epochs, on test images, in nats: negative ELBO {found['negative_elbo']:.2f}, "
        f"−log p(x) at most {found['importance_weighted']:.2f}\n{path}\n{path.with_suffix('.png')}"
    )


if __name__ == "__main__":
    main()
