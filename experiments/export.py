"""Export a trained model of an experiment for serving, with a model card.

    python -m experiments.export runs/fcnn-digits/fcnn-digits-aux-0.keras saved_models/digits

Writes the next version of the SavedModel folder (`saved_models/digits/1`, then `2`, …; `--overwrite` replaces the newest) and
`README.md` beside it, from the results file that the experiment left beside the `.keras` file: data, command, metric, size,
signatures and certificate; for a flow also `samples.png`. Any other `.keras` file works too, with a shorter card. `--onnx` and
`--litert` also write these formats, of models that can be had in them.
"""

import argparse
import os
import sys
from pathlib import Path

from experiments.harness import cards, cli
from experiments.harness.results import command

SAMPLES, TEMPERATURE = 36, 0.7


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path, help="a .keras file, as the experiments write them")
    p.add_argument("path", type=Path, help="folder of versions; its name is the name of the model")
    p.add_argument("--overwrite", action="store_true", help="replace the newest version instead of adding one")
    p.add_argument("--onnx", type=Path, metavar="FILE", help="also write an ONNX file")
    p.add_argument("--litert", type=Path, metavar="FILE", help="also write a LiteRT file")
    args = p.parse_args()
    if not args.model.is_file():
        p.error(f"argument model: expected a .keras file, received {args.model}")
    return args


def main() -> None:
    args = arguments()
    cli.import_keras()
    import keras
    import tensorflow as tf

    from keras_auxref import serving
    from keras_auxref.serving import show

    model = keras.models.load_model(args.model)
    folder = serving.export_saved_model(model, args.path, overwrite=args.overwrite)
    loaded = tf.saved_model.load(str(folder))
    text = cards.card(
        args.path.resolve().name,
        model,
        cards.find_training(args.model),
        command(),
        show.describe(loaded),
        show.folder_size(folder),
    )
    if "sample" in loaded.signatures:
        show.draw_samples(loaded, args.path / "samples.png", SAMPLES, temperature=TEMPERATURE)
        text += f"\n![{SAMPLES} samples at temperature {TEMPERATURE}](samples.png)\n"
    aside = args.path / f".README.{os.getpid()}.tmp"
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, args.path / "README.md")
    print(f"{text}\n{folder}\n{args.path / 'README.md'}")
    for write, file in ((serving.export_onnx, args.onnx), (serving.export_litert, args.litert)):
        if file:
            try:
                print(write(model, file, overwrite=args.overwrite))
            except (NotImplementedError, ImportError, FileExistsError, ValueError) as error:
                sys.exit(f"{file}: {error}")


if __name__ == "__main__":
    cli.main(main)
