"""TensorFlow Serving's REST protocol: paths, JSON to arrays, arrays to JSON, and a clear refusal of anything else.

Nothing here knows of a server or of TensorFlow. The body of a prediction is

    {"signature_name": optional, "instances": [row, …]}                    answered by {"predictions": [row, …]}
    {"signature_name": optional, "inputs": value, or {name: value, …}}     answered by {"outputs": value, or {name: value, …}}

A row is the value of the only input, or {name: value} for each. A signature with several outputs answers with {name: value}.
NaN, Infinity and -Infinity are bare words in both directions, as in TensorFlow Serving: the log-likelihood of an impossible
image is an answer, not an error.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

DTYPES = {"DT_HALF": "float16", "DT_FLOAT": "float32", "DT_DOUBLE": "float64", "DT_BOOL": "bool", "DT_STRING": "string"}
DTYPES |= {f"DT_{sign.upper()}INT{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
"""What goes through JSON: the name in the protocol, and NumPy's."""
PATH = re.compile(r"/v1/models/([^/:]+)(?:/versions/([0-9]+))?(/metadata|:predict)?")
MOST_PARTS = 5_000_000
"""Values and lists of a request, and ten for each object: 1,024 images of 32 × 32 × 3 have 4.2 million."""
KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a fraction"}
ALLOWED = {"f": {int, float}, "i": {int}, "u": {int}, "b": {bool}, "O": {str}}
"""Types of JSON in words, and those for the kinds of NumPy's dtypes."""


class RequestError(Exception):
    """A request that cannot be answered: one sentence, and an HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status

    def answer(self) -> tuple[int, bytes]:
        return self.status, json.dumps({"error": str(self)}).encode()


class Tensor(NamedTuple):
    """An input or output; None stands for any size, and a shape of None for any shape."""

    shape: tuple[int | None, ...] | None
    dtype: str


class Signature(NamedTuple):
    """The named inputs and outputs of one function of a model."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


class Request(NamedTuple):
    """What to compute: a signature and its inputs. `rows` tells which of the two formats to answer in."""

    signature: str
    inputs: dict[str, np.ndarray]
    rows: bool


def route(method: str, path: str, models: Iterable[str]) -> tuple[str, str, str]:
    """The model, the version ("" for the newest) and one of "status", "metadata", "predict" that a request asks for."""
    match, received = PATH.fullmatch(path), f"received {method} {path[:200]}."
    if match is None or match[1] not in models:
        expected = f"/v1/models/NAME, NAME/metadata or NAME:predict for {', '.join(models)}"
        raise RequestError(f"Expected {expected}, {received}", 404)
    what = (match[3] or "status").lstrip("/:")
    if method != ("POST" if what == "predict" else "GET"):
        raise RequestError(f"Expected POST for predict and GET for the rest, {received}", 405)
    return match[1], match[2] or "", what


def read_signatures(definitions: Mapping[str, Any]) -> dict[str, Signature]:
    """Signatures from their definitions in the answer to `/metadata`, which are those of the file saved_model.pb."""

    def tensors(specs: Mapping[str, Any]) -> dict[str, Tensor]:
        found = {}
        for key, spec in sorted(specs.items()):
            if spec["dtype"] not in DTYPES:
                raise ValueError(f"Expected signatures with numbers, truth values or text, received {spec['dtype']}")
            shape = spec.get("tensor_shape", {})
            sizes = tuple(None if int(dim["size"]) < 0 else int(dim["size"]) for dim in shape.get("dim", ()))
            found[key] = Tensor(None if shape.get("unknown_rank") else sizes, DTYPES[spec["dtype"]])
        return found

    functions = {name: definition for name, definition in definitions.items() if not name.startswith("__")}
    return {name: Signature(tensors(f.get("inputs", {})), tensors(f.get("outputs", {}))) for name, f in functions.items()}


def check_size(body: bytes) -> None:
    """Refuse what would take gigabytes as Python objects, before it is parsed: 31 MB of `[],` are ten million lists."""
    received = 1 + body.count(b",") + body.count(b"[") + 10 * body.count(b"{")  # at least as many as there are
    if received > MOST_PARTS:
        raise RequestError(f"Expected at most {MOST_PARTS} values and lists, an object counted as ten, received {received}.")


def parse(body: bytes, signatures: Mapping[str, Signature], max_batch: int) -> Request:
    """Read a prediction of at most `max_batch` rows for one of `signatures`, or raise a `RequestError`."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"Expected JSON, received something else: {error}.") from error
    formats = [key for key in ("instances", "inputs") if isinstance(content, dict) and key in content]
    if len(formats) != 1:
        received = "both" if formats else _received(content)
        raise RequestError(f"Expected a JSON object with one of 'instances' and 'inputs', received {received}.")
    name = content.get("signature_name")
    name = "serving_default" if name in (None, "") else name
    if not isinstance(name, str) or name not in signatures:
        raise RequestError(f"Expected a signature_name out of {_quoted(signatures)}, received {str(name)[:200]!r}.")
    expected, rows = signatures[name].inputs, formats == ["instances"]
    arrays = {}
    for key, value in _columns(content[formats[0]], expected, rows).items():
        if isinstance(value, list) and len(value) > max_batch:
            raise RequestError(f"Input {key!r}: expected at most {max_batch} rows, received {len(value)}.")
        arrays[key] = _array(key, value, expected[key])
    # A scalar `n` asks for that many rows, as in `sample`.
    if (n := arrays.get("n")) is not None and n.ndim == 0 and n.dtype.kind in "iu" and not 1 <= n <= max_batch:
        raise RequestError(f"Input 'n': expected a number from 1 to {max_batch}, received {n}.")
    return Request(name, arrays, rows)


def answer(request: Request, outputs: Mapping[str, np.ndarray]) -> bytes:
    """The JSON that answers a request, in its format."""
    values = {key: _plain(outputs[key]) for key in sorted(outputs)}
    only = next(iter(values.values())) if len(values) == 1 else None
    if not request.rows:
        return json.dumps({"outputs": values if only is None else only}).encode()
    sizes = {np.shape(array)[:1] for array in outputs.values()}
    if len(sizes) != 1 or () in sizes:
        raise RequestError("The outputs have no common number of rows: ask with 'inputs' instead of 'instances'.")
    rows = only if only is not None else [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    return json.dumps({"predictions": rows}).encode()


def status(states: Mapping[str, str]) -> bytes:
    """The JSON of `GET /v1/models/NAME`: every version with "" if it is served, or with the reason why it is not."""
    found = []
    for version, reason in states.items():
        code = {"error_code": "UNKNOWN" if reason else "OK", "error_message": reason}
        found.append({"version": version, "state": "END" if reason else "AVAILABLE", "status": code})
    return json.dumps({"model_version_status": found}).encode()


def metadata(name: str, version: str, definitions: Mapping[str, Any]) -> bytes:
    """The JSON of `GET /v1/models/NAME/metadata`, which `read_signatures` reads."""
    spec = {"name": name, "signature_name": "", "version": version}
    return json.dumps({"model_spec": spec, "metadata": {"signature_def": {"signature_def": definitions}}}).encode()


def _columns(value: Any, expected: Mapping[str, Tensor], rows: bool) -> dict[str, Any]:
    """A value for each input, from rows or columns; that of an only input needs no name."""
    if rows:
        if not isinstance(value, list) or not value:
            raise RequestError(f"Expected 'instances' to be a list with at least one row, received {_received(value)}.")
        if scalars := [key for key, spec in expected.items() if spec.shape == ()]:
            raise RequestError(f"Expected 'inputs' instead of 'instances', because there are no rows in {_quoted(scalars)}.")
        if any(isinstance(row, dict) for row in value):
            for number, row in enumerate(value):
                _check_names(row, expected, f" in row {number}")
            return {key: [row[key] for row in value] for key in expected}
    named = {next(iter(expected)): value} if len(expected) == 1 and not isinstance(value, dict) else value
    _check_names(named, expected)
    return named


def _check_names(value: Any, expected: Mapping[str, Tensor], where: str = "") -> None:
    if not isinstance(value, dict) or value.keys() != expected.keys():
        raise RequestError(f"Expected an object with the inputs {_quoted(expected)}{where}, received {_received(value)}.")


def _array(name: str, value: Any, spec: Tensor) -> np.ndarray:
    """The value of an input as an array, if it has its dtype and shape."""
    found, kind = np.array(value, object), "O" if spec.dtype == "string" else np.dtype(spec.dtype).kind
    types, shape = set(map(type, found.ravel())), found.shape if spec.shape is None else spec.shape
    if list in types:
        received = "lists of different lengths"
    elif wrong := types - ALLOWED[kind]:
        received = " and ".join(sorted(KINDS.get(item, "null") for item in wrong))
    elif len(shape) != found.ndim or any(size not in (None, real) for size, real in zip(shape, found.shape, strict=True)):
        received = f"shape {found.shape}"
    else:
        with contextlib.suppress(OverflowError), np.errstate(over="ignore"):
            result = found if kind == "O" else found.astype(spec.dtype)
            # Whole numbers must come back as they were, and what was finite must stay so.
            same = (np.isinf(result), np.isinf(found.astype("float64"))) if kind == "f" else (result, found)
            if np.array_equal(*same):
                return result
        received = "a number out of its range"
    expected = "any shape" if spec.shape is None else f"shape {spec.shape}"
    raise RequestError(f"Input {name!r}: expected {spec.dtype} of {expected}, received {received}.")


def _plain(array: np.ndarray) -> Any:
    """Numbers, or text, as nested lists."""
    if np.asarray(array).dtype.kind not in "OS":
        return np.asarray(array).tolist()
    return np.vectorize(lambda item: item.decode(errors="replace"), otypes=[object])(array).tolist() if np.size(array) else []


def _received(value: Any) -> str:
    """The names in an object, or the kind of anything else."""
    if isinstance(value, dict):
        return _quoted(value) or "an empty object"
    return "an empty list" if value == [] else KINDS.get(type(value), "null")


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))[:300]
