"""A process on another backend: takes a flow from a file, answers, trains it on and saves it.

    KERAS_BACKEND=jax python on_a_backend.py folder mixing [coupling dequantisation]

Reads `folder/flow.keras` and `folder/inputs.npz`; writes `answers.npz`, and after training `trained.keras` and `trained.npz`.
"""

import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_auxref
from keras_auxref import Glow


def answers(model: Glow, images: np.ndarray, z: np.ndarray) -> dict[str, np.ndarray]:
    coded, log_det = model.encode(images)
    found = {
        "z": coded,
        "log_det": log_det,
        "log_prob": model.log_prob(images),
        "bits": model.bits_per_dim(images),
        "predicted": model.predict(images, batch_size=4, verbose=0),
        "decoded": model.decode(z),
        "sample": model.sample(3, seed=7, temperature=0.8),
        "certified": [c.invertible for c in model.certificates().values()],
    }
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
    history = fresh.fit(images, batch_size=4, epochs=2, validation_data=(images,), verbose=0).history
    assert fresh.initialized
    assert set(history) == {"loss", "bits_per_dim", "val_loss", "val_bits_per_dim"}
    assert np.isfinite(fresh.evaluate(images, verbose=0)).all()
    back = np.asarray(keras.ops.convert_to_numpy(fresh.decode(fresh.encode(images)[0])))
    assert np.abs(back - images / 255).max() < 1e-4
    fresh.save(folder / "trained.keras")
    np.savez(folder / "trained.npz", **answers(fresh, images, z))
    print(keras_auxref.__name__, keras.backend.backend(), "tensorflow" in sys.modules)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
