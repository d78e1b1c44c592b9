"""A first use of the installed package, in an environment that may have nothing but it: `python -I smoke.py`."""

import importlib.metadata
import importlib.resources
import os
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import keras_auxref
from keras_auxref import AuxReflection, Glow, OrthogonalRNN, SVDDense, export_saved_model


def check(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"failed: {what}")
    print(f"ok: {what}")


def main() -> None:
    where = os.path.dirname(keras_auxref.__file__)
    check(where.startswith(sys.prefix), f"imported from the environment, {os.path.relpath(where, sys.prefix)}")
    check(keras_auxref.__version__ == importlib.metadata.version("keras-auxref"), f"version {keras_auxref.__version__}")
    check(importlib.resources.files(keras_auxref).joinpath("py.typed").is_file(), "types are shipped")

    x = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")
    y = keras.ops.convert_to_numpy(AuxReflection()(x))
    check(np.allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5), "a reflection keeps norms")

    model = keras.Sequential([keras.Input((6,)), SVDDense(activation="relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(x, x[:, :1], verbose=0)
    check(OrthogonalRNN(4)(x[..., None]).shape == (32, 4), "a recurrent layer")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        again = keras.models.load_model(path).predict(x, verbose=0)
        check(np.allclose(model.predict(x, verbose=0), again, atol=1e-6), "a model trains, is saved and loads")
        check(export_saved_model(model, os.path.join(folder, "served")).is_dir(), "it is exported")

    layer = AuxReflection("spectral")
    layer.build(x.shape)
    bijector = layer.bijector()
    back = bijector.inverse(keras.ops.copy(bijector.forward(x)))
    check(np.abs(keras.ops.convert_to_numpy(back) - x).max() < 1e-4, "a TFP bijector inverts")

    flow = Glow((8, 8, 1), levels=1, steps=1, hidden=4)
    images = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 1), dtype="uint8")
    z, _ = flow.encode(images)
    check(np.abs(keras.ops.convert_to_numpy(flow.decode(z)) - images / 255).max() < 1e-3, "a flow inverts")


if __name__ == "__main__":
    main()
