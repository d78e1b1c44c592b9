"""A process on another backend: takes a flow from a file, answers, trains it on and saves it.

    KERAS_BACKEND=jax python on_a_backend.py folder mixing [coupling dequantisation]    # a Glow
    KERAS_BACKEND=jax python on_a_backend.py folder vectors mixing coupling              # a Flow with classes

Reads `folder/flow.keras` and `folder/inputs.npz`; writes `answers.npz`, and after training `trained.keras` and `trained.npz`.
"""

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_auxref
from keras_auxref import Flow, Glow


def answers(model: Glow, images: np.ndarray, z: np.ndarray) -> dict[str, np.ndarray]:
    coded, log_det = model.encode(images)
    found = {
        "z": coded,
        "log_det": log_det,
        "bits": model.bits_per_dim(images),
        "predicted": model.predict(images, batch_size=4, verbose=0),
        "sample": model.sample(3, seed=7, temperature=0.8),
        "certified": [c.invertible for c in model.certificates().values()],
    }
    return {**_numpy(found), **answers_of_the_trained(model, images, z)}


def answers_of_the_trained(model: Glow, images: np.ndarray, z: np.ndarray) -> dict[str, np.ndarray]:
    """Fewer: every method of every model is compiled on JAX."""
    return _numpy({"log_prob": model.log_prob(images), "decoded": model.decode(z)})


def _numpy(found: dict[str, Any]) -> dict[str, np.ndarray]:
    return {key: np.asarray(keras.ops.convert_to_numpy(value)) for key, value in found.items()}


def main(folder: Path, mixing: str, coupling: str = "affine", dequantisation: str = "uniform") -> None:
    inputs = np.load(folder / "inputs.npz")
    images, z = inputs["images"], inputs["z"]
    model = keras.models.load_model(folder / "flow.keras")
    np.savez(folder / "answers.npz", **answers(model, images, z))
    with pytest.raises(ValueError, match="images / 255"):
        model.log_prob(images.astype("float32"))
    parts = {"mixing": mixing, "coupling": coupling, "dequantisation": dequantisation}
    fresh = Glow(model.image_shape, levels=1, steps=1, hidden=4, seed=1, **parts)
    fresh.fit(images, batch_size=4, epochs=1, verbose=0)
    assert fresh.initialized
    assert np.isfinite(fresh.evaluate(images, verbose=0)).all()
    history = fresh.fit(images, batch_size=4, epochs=1, validation_data=(images,), verbose=0).history
    assert set(history) == {"loss", "bits_per_dim", "val_loss", "val_bits_per_dim"}
    fresh.save(folder / "trained.keras")
    np.savez(folder / "trained.npz", **answers_of_the_trained(fresh, images, z))
    print(keras_auxref.__name__, keras.backend.backend(), "tensorflow" in sys.modules)


def small_flow(mixing: str, coupling: str) -> Flow:
    return Flow(3, steps=2, hidden=4, classes=2, mixing=mixing, coupling=coupling, seed=1)


def flow_answers(model: Flow, x: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    z, log_det = model.encode(x, labels)
    found = {
        "z": z,
        "log_det": log_det,
        "log_prob": model.log_prob(x, labels),
        "predicted": -model.predict([x, labels], batch_size=4, verbose=0),
        "decoded": model.decode(x, labels),
        "sample": model.sample(3, seed=7, context=1),
        "certified": [c.invertible for c in model.certificates().values()],
    }
    return _numpy(found)


def vectors(folder: Path, mixing: str, coupling: str) -> None:
    inputs = np.load(folder / "inputs.npz")
    x, labels = inputs["x"], inputs["labels"]
    np.savez(folder / "answers.npz", **flow_answers(keras.models.load_model(folder / "flow.keras"), x, labels))
    model = small_flow(mixing, coupling)
    history = model.fit(x, labels, batch_size=4, epochs=2, validation_data=(x, labels), verbose=0).history
    assert model.initialized
    assert set(history) == {"loss", "nats", "val_loss", "val_nats"}
    assert np.isfinite(model.evaluate(x, labels, verbose=0)).all()
    with pytest.raises(ValueError, match="column 1"):
        model.log_prob(np.where(np.arange(3) == 1, np.nan, x), labels)
    model.save(folder / "trained.keras")
    np.savez(folder / "trained.npz", **_numpy({"log_prob": model.log_prob(x, labels)}))
    print(keras_auxref.__name__, keras.backend.backend())


if __name__ == "__main__" and sys.argv[2] == "vectors":
    vectors(Path(sys.argv[1]), *sys.argv[3:])
elif __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
