"""Export a trained Keras model for serving: a SavedModel that TensorFlow runs without this package.

    python examples/fcnn.py
    python examples/export.py runs/fcnn-digits-aux.keras runs/served/digits
    python examples/serve.py runs/served/digits

Writes the next version of the folder (`runs/served/digits/1`, then `2`, …) and prints its signatures. A flow also draws samples.
"""

import argparse
from pathlib import Path

import quiet  # noqa: F401  Keras without TensorFlow's start-up notices

import keras
import tensorflow as tf

from keras_auxref import export_saved_model
from keras_auxref.serving import show


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path, help="a .keras file, as the other examples write them")
    p.add_argument("folder", type=Path, help="folder of versions; its name is the name of the model")
    args = p.parse_args(arguments)
    if not args.model.is_file():
        p.error(f"argument model: expected a .keras file, received {args.model}")

    version = export_saved_model(keras.models.load_model(args.model), args.folder)
    loaded = tf.saved_model.load(str(version))
    for signature in show.describe(loaded):
        print(f"{signature.name}({', '.join(signature.inputs)}) → {', '.join(signature.outputs)}")
    if "sample" in loaded.signatures:
        picture = args.folder / "samples.png"
        show.draw_samples(loaded, picture, 36, temperature=0.7)
        print(picture)
    print(version)


if __name__ == "__main__":
    main()
