"""What is in an exported model: its signatures and, for a flow, a picture of samples."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_auxref.serving.versions import versions

_MOST_SAMPLES = 10_000
_PIXELS = 96  # an image is enlarged to about this size, by whole factors


class SignatureTable(NamedTuple):
    """The name of a signature, and the name, dtype and shape of every input and output as text."""

    name: str
    inputs: list[str]
    outputs: list[str]


def find_version(path: Path) -> Path:
    """The folder of a SavedModel: `path` itself, or the newest version under it."""
    if (path / "saved_model.pb").exists():
        return path
    found = versions(path)
    if not found:
        raise FileNotFoundError(f"Expected a SavedModel, or a folder with numbered versions of one. Received: {path}")
    return path / str(found[-1])


def describe(loaded: tf.Module) -> list[SignatureTable]:
    """The signatures of a loaded SavedModel, sorted by name, with `serving_default` first."""

    def words(specs: dict[str, tf.TensorSpec]) -> list[str]:
        return [f"{name}: {_shape(spec.shape)} {spec.dtype.name}" for name, spec in sorted(specs.items())]

    names = sorted(loaded.signatures, key=lambda name: (name != "serving_default", name))
    return [
        SignatureTable(
            name,
            words(loaded.signatures[name].structured_input_signature[1]),
            words(loaded.signatures[name].structured_outputs),
        )
        for name in names
    ]


def _shape(shape: tf.TensorShape) -> str:
    if not len(shape):
        return "number,"
    return "(" + ", ".join("batch" if i == 0 and n is None else str(n or "any") for i, n in enumerate(shape)) + ")"


def folder_size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def draw_samples(loaded: tf.Module, path: Path, n: int = 16, seed: int = 0, temperature: float = 0.7) -> None:
    """Writes a PNG with n samples of a flow, in rows, from its signature `sample`."""
    sample = loaded.signatures["sample"]
    inputs = sample.structured_input_signature[1]
    numbers = {"n": n, "seed": seed, "temperature": temperature}
    images = sample(**{name: tf.constant(numbers[name], spec.dtype) for name, spec in inputs.items()})["images"].numpy()
    # TensorFlow writes the image, so no other package is needed.
    picture = tf.io.encode_png(np.round(255 * mosaic(np.nan_to_num(images))).astype("uint8"))
    aside = path.with_name(f".{path.name}.tmp")
    aside.parent.mkdir(parents=True, exist_ok=True)
    aside.write_bytes(picture.numpy())
    aside.replace(path)


def mosaic(images: np.ndarray) -> np.ndarray:
    """Images of shape (n, height, width, channels) in rows of about √n, enlarged, with a light frame around each."""
    count, height, width, channels = images.shape
    if channels not in (1, 3):
        images, channels = images[..., :1], 1
    times = max(1, _PIXELS // max(height, width))
    gap = max(1, times // 2)
    columns = int(np.ceil(np.sqrt(count)))
    rows = int(np.ceil(count / columns))
    large = images.repeat(times, axis=1).repeat(times, axis=2)
    high, wide = height * times + gap, width * times + gap
    canvas = np.ones((rows * high + gap, columns * wide + gap, channels), images.dtype)
    for i, image in enumerate(large):
        top, left = (i // columns) * high + gap, (i % columns) * wide + gap
        canvas[top : top + image.shape[0], left : left + image.shape[1]] = image
    return canvas


def main(arguments: Sequence[str] | None = None) -> None:
    """The command `python -m keras_auxref.show`. Errors are one sentence, with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m keras_auxref.show",
        description="Print the signatures of an exported model; for a flow, also write a PNG of samples. "
        "A SavedModel is a program, and to load one is to run it: show only models whose origin you trust.",
    )
    parser.add_argument("path", type=Path, help="folder of versions, or of one version")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PNG",
        help="picture of samples (default: NAME-samples.png in the folder for temporary files)",
    )
    parser.add_argument("--samples", type=int, default=16, metavar="N", help="how many; 0 for no picture (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same samples (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="below 1: more typical (default: %(default)s)")
    args = parser.parse_args(arguments)
    if not 0 <= args.samples <= _MOST_SAMPLES:
        parser.error(f"argument --samples: expected a whole number from 0 to {_MOST_SAMPLES}, received {args.samples}")
    if not -(2**63) <= args.seed < 2**63:
        parser.error(f"argument --seed: expected a whole number of 64 bits, received {args.seed}")
    if not 0 <= args.temperature < np.inf:
        parser.error(f"argument --temperature: expected a number of at least 0, received {args.temperature:g}")
    if args.output is not None and args.output.is_dir():
        parser.error(f"argument --output: expected a file, received a folder: {args.output}")
    try:
        folder = find_version(args.path)
        loaded = tf.saved_model.load(str(folder))
    except FileNotFoundError as error:
        parser.error(str(error))
    except (OSError, ValueError, tf.errors.OpError) as error:
        parser.error(f"Expected a SavedModel. Received one that does not load, {folder}: {str(error).strip().splitlines()[-1]}")
    name = args.path.resolve().name if folder != args.path else folder.resolve().parent.name
    size = folder_size(folder) / 1e6
    print(f"{name}, version {folder.resolve().name}: {size:.2f} MB, written by TensorFlow {loaded.tensorflow_version}")
    for table in describe(loaded):
        print(f"\n  {table.name}")
        for arrow, lines in (("←", table.inputs), ("→", table.outputs)):
            for line in lines:
                print(f"    {arrow} {line}")
    if args.samples and _can_sample(loaded):
        output = args.output or Path(tempfile.gettempdir()) / f"{name}-samples.png"
        try:
            draw_samples(loaded, output, args.samples, args.seed, args.temperature)
        except OSError as error:
            parser.error(f"argument --output: expected a file that can be written, received {output}: {error.strerror}")
        print(f"\n{args.samples} samples at temperature {args.temperature:g}, seed {args.seed}: {output}")


def _can_sample(loaded: tf.Module) -> bool:
    """Whether there is a signature `sample` like that of a flow: in other models the name may mean anything."""
    if "sample" not in loaded.signatures:
        return False
    sample = loaded.signatures["sample"]
    images = sample.structured_outputs.get("images")
    inputs = set(sample.structured_input_signature[1])
    return inputs == {"n", "seed", "temperature"} and images is not None and images.shape.rank == 4
