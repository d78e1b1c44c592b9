"""Call every signature of a model that TensorFlow Serving or examples/serve.py serves.

    python examples/client.py digits mnist-flow                              at http://127.0.0.1:8501
    python examples/client.py mnist-flow --url http://127.0.0.1:8501 --rows 8 with 8 rows to a request
    python examples/client.py digits --input inputs=digits.npy               with rows of your own instead of random ones

What a signature takes and gives is read from the server. Inputs that are not given come from the answers before, so that a flow
decodes what it has encoded, and are random numbers in [0, 1] otherwise. Samples of a flow become a picture, NAME-samples.png,
through Pillow.
"""

import argparse
import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

DTYPES = {"DT_HALF": "float16", "DT_FLOAT": "float32", "DT_DOUBLE": "float64", "DT_BOOL": "bool", "DT_STRING": "string"}
DTYPES |= {f"DT_{sign.upper()}INT{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
"""What goes through JSON: the name in the protocol, and NumPy's."""
# What comes first gives what a later one takes.
ORDER = ("serving_default", "log_prob", "encode", "decode", "sample")
SCALARS = {"n": 16, "seed": 1, "temperature": 0.7}
ATTEMPTS, TIMEOUT = 5, 60


class Tensor(NamedTuple):
    """An input or output; None stands for any size, and a shape of None for any shape."""

    shape: tuple[int | None, ...] | None
    dtype: str


class Signature(NamedTuple):
    """The named inputs and outputs of one function of a model."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


class CallError(Exception):
    """A call that failed; the message is one sentence."""


def read_signatures(definitions: Mapping[str, Any]) -> dict[str, Signature]:
    """Signatures from their definitions in the answer to `/metadata`."""

    def tensors(specs: Mapping[str, Any]) -> dict[str, Tensor]:
        found = {}
        for key, spec in sorted(specs.items()):
            if spec["dtype"] not in DTYPES:
                raise CallError(f"Expected signatures with numbers, truth values or text, received {spec['dtype']}.")
            shape = spec.get("tensor_shape", {})
            sizes = tuple(None if int(dim["size"]) < 0 else int(dim["size"]) for dim in shape.get("dim", ()))
            found[key] = Tensor(None if shape.get("unknown_rank") else sizes, DTYPES[spec["dtype"]])
        return found

    functions = {name: definition for name, definition in definitions.items() if not name.startswith("__")}
    return {name: Signature(tensors(f.get("inputs", {})), tensors(f.get("outputs", {}))) for name, f in functions.items()}


def call(url: str, content: Any = None) -> Any:
    """GET, or POST the content as JSON.

    A prediction changes nothing on the server, so it is asked for again when the connection breaks or the server fails or is too
    busy (5xx), as happens while a replica is replaced: five attempts within six seconds, and the time of the answers.
    """
    body = None if content is None else json.dumps(content).encode()
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(0.2 * 2**attempt)
        try:
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            reason = f"{error.code}, {_message(error.read())}"
            if error.code < 500:
                raise CallError(f"{url} answered {reason}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        except ValueError as error:
            raise CallError(f"{url}: expected an answer in JSON, received something else: {error}.") from error
    raise CallError(f"{url} did not answer in {ATTEMPTS} attempts: {reason}.")


def predict(url: str, name: str, signature: Signature, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Ask one signature and return its outputs by name."""
    columns = {key: array.tolist() for key, array in inputs.items()}
    found = call(f"{url}:predict", {"signature_name": name, "inputs": columns})["outputs"]
    if len(signature.outputs) == 1:
        found = {next(iter(signature.outputs)): found}
    return {key: np.array(found[key], None if spec.dtype == "string" else spec.dtype) for key, spec in signature.outputs.items()}


def generated(name: str, spec: Tensor, rows: int, generator: np.random.Generator) -> np.ndarray:
    """Random values for an input; None stands for the number of rows."""
    if spec.dtype in ("string", "bool"):
        raise CallError(f"Expected --input {name}=FILE.npy, because {spec.dtype} is not drawn at random.")
    if spec.shape == ():
        return np.array(SCALARS.get(name, 1), spec.dtype)
    shape = tuple(rows if size is None else size for size in spec.shape or (None,))
    return generator.uniform(size=shape).astype(spec.dtype)


def call_all(url: str, given: dict[str, np.ndarray], rows: int) -> dict[str, dict[str, np.ndarray]]:
    """Call every signature of the model at `url` and print a line for each; returns what they answered."""
    content = call(f"{url}/metadata")
    signatures = read_signatures(content["metadata"]["signature_def"]["signature_def"])
    spec = content["model_spec"]
    print(f"{spec['name']}, version {spec['version']}")
    generator, known, answers = np.random.default_rng(0), dict(given), {}
    for name in sorted(signatures, key=lambda key: (ORDER.index(key) if key in ORDER else len(ORDER), key)):
        signature = signatures[name]
        for key, tensor in signature.inputs.items():
            if key not in known:
                known[key] = generated(key, tensor, rows, generator)
        inputs = {key: known[key].astype(tensor.dtype) for key, tensor in signature.inputs.items()}
        started = time.perf_counter()
        answers[name] = predict(url, name, signature, inputs)
        milliseconds = 1000 * (time.perf_counter() - started)
        print(f"  {name}({', '.join(map(_text, inputs.items()))}) in {milliseconds:.1f} ms")
        for key, array in answers[name].items():
            print(f"    {_text((key, array))}{_range(array)}{_difference(array, inputs, known.get(key))}")
            known.setdefault(key, array)
    return answers


def save_picture(images: np.ndarray, path: Path) -> None:
    """Images with values in [0, 1] beside each other, in a square as far as possible."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        print("  no picture: pip install pillow")
        return
    count, height, width, channels = images.shape
    across = int(np.ceil(np.sqrt(count)))
    sheet = np.ones((-(-count // across) * across, height + 1, width + 1, channels))
    sheet[:count, :-1, :-1] = np.clip(np.nan_to_num(images), 0, 1)
    sheet = sheet.reshape(-1, across, *sheet.shape[1:]).swapaxes(1, 2).reshape(-1, across * (width + 1), channels)
    pixels = np.round(255 * sheet).astype("uint8")
    scale = max(1, 512 // max(pixels.shape[:2]))
    picture = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
    picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST).save(path)
    print(f"  {path}")


def _text(item: tuple[str, np.ndarray]) -> str:
    name, array = item
    return f"{name}={array.item():.4g}" if array.ndim == 0 else f"{name} {array.shape}"


def _range(array: np.ndarray) -> str:
    return f" from {array.min():.4g} to {array.max():.4g}" if array.size and array.dtype.kind in "fiu" else ""


def _difference(array: np.ndarray, inputs: dict[str, np.ndarray], before: np.ndarray | None) -> str:
    """How far what comes back is from what was sent at first, as in decode after encode."""
    if before is None or before.shape != array.shape or array.dtype.kind != "f" or not any(a.ndim for a in inputs.values()):
        return ""
    with np.errstate(invalid="ignore"):
        distance = np.where(array == before, 0, np.abs(array - before)).max()
    return f", {distance:.1e} from those before"


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace") or "without a reason"


def _array_argument(text: str) -> tuple[str, np.ndarray]:
    name, _, file = text.partition("=")
    try:
        return name, np.load(file)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"expected NAME=FILE.npy, received {text!r}: {error}") from error


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("models", nargs="+", metavar="NAME", help="a model that the server has")
    p.add_argument("--url", default="http://127.0.0.1:8501", help="where the server listens (default: %(default)s)")
    p.add_argument("--rows", type=int, default=4, metavar="N", help="rows of random inputs (default: %(default)s)")
    p.add_argument(
        "--input", type=_array_argument, action="append", default=[], metavar="NAME=FILE", help="an input, from a .npy file"
    )
    p.add_argument("--output", type=Path, default=Path(), metavar="DIR", help="folder for pictures (default: this one)")
    args = p.parse_args()
    if args.rows < 1:
        p.error(f"expected at least one of --rows, received {args.rows}")
    for name in args.models:
        answers = call_all(f"{args.url.rstrip('/')}/v1/models/{name}", dict(args.input), args.rows)
        images = answers.get("sample", {}).get("images")
        if images is not None and images.ndim == 4:
            args.output.mkdir(parents=True, exist_ok=True)
            save_picture(images, args.output / f"{name}-samples.png")


if __name__ == "__main__":
    try:
        main()
    except (CallError, ValueError) as error:
        sys.exit(str(error))
