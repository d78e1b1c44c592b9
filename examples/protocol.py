"""TensorFlow Serving's REST protocol: paths, JSON to arrays, arrays to JSON, and a clear refusal of anything else.

Nothing here knows of a server; inputs are described by TensorFlow's TensorSpec. The body of a prediction is

    {"signature_name": optional, "instances": [row, …]}                    answered by {"predictions": [row, …]}
    {"signature_name": optional, "inputs": value, or {name: value, …}}     answered by {"outputs": value, or {name: value, …}}

A row is the value of the only input, or {name: value} for each. A signature with several outputs answers with {name: value}.
NaN, Infinity and -Infinity are bare words in both directions: an impossible image has a log-likelihood.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

PATH = re.compile(r"/v1/models/([^/:]+)(?:/versions/([0-9]+))?(/metadata|:predict)?")
MOST_PARTS = 5_000_000  # 1,024 images of 32 × 32 × 3 have 4.2 million
WORDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a fraction"}
ALLOWED = {"f": {int, float}, "i": {int}, "u": {int}, "b": {bool}, "O": {str}}  # by the kinds of NumPy's dtypes


class RequestError(Exception):
    """A request that cannot be answered: one sentence, and an HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status

    def answer(self) -> tuple[int, bytes]:
        return self.status, _json({"error": str(self)})


class Request(NamedTuple):
    """What to compute: a signature and its inputs. `rows` tells which of the two formats to answer in."""

    signature: str
    inputs: dict[str, np.ndarray]
    rows: bool


def route(method: str, path: str, models: Iterable[str]) -> tuple[str, str, str]:
    """The model, the version ("" for the newest) and one of "status", "metadata", "predict" that a request asks for."""
    match, received = PATH.fullmatch(path), f"received {method} {path[:200]}."
    if match is None or match[1] not in models:
        paths = f"/v1/models/NAME, NAME/metadata or NAME:predict for {', '.join(models)}"
        raise RequestError(f"Expected {paths}, {received}", 404)
    what = (match[3] or "status").lstrip("/:")
    if method != ("POST" if what == "predict" else "GET"):
        raise RequestError(f"Expected POST for predict and GET for the rest, {received}", 405)
    return match[1], match[2] or "", what


def check_dtypes(specs: Mapping[str, Any]) -> None:
    """Refuse inputs and outputs of a model that JSON has no words for."""
    if wrong := [spec.dtype.name for spec in specs.values() if np.dtype(spec.dtype.as_numpy_dtype).kind not in ALLOWED]:
        raise ValueError(f"Expected signatures with numbers, truth values or text, received {wrong[0]}")


def check_size(body: bytes) -> None:
    """Refuse what would take gigabytes as Python objects, before it is parsed: 31 MB of `[],` are ten million lists."""
    received = 1 + body.count(b",") + body.count(b"[") + 10 * body.count(b"{")  # at least as many as there are
    if received > MOST_PARTS:
        raise RequestError(f"Expected at most {MOST_PARTS} values and lists, an object counted as ten, received {received}.")


def parse(body: bytes, signatures: Mapping[str, Mapping[str, Any]], max_batch: int) -> Request:
    """Read a prediction of at most `max_batch` rows for one of `signatures`, whose inputs are given, or refuse it."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"Expected JSON, received something else: {error}.") from error
    formats = [key for key in ("instances", "inputs") if isinstance(content, dict) and key in content]
    if len(formats) != 1:
        received = "both" if formats else _received(content)
        raise RequestError(f"Expected a JSON object with one of 'instances' and 'inputs', received {received}.")
    name, rows = content.get("signature_name"), formats == ["instances"]
    name = "serving_default" if name in (None, "") else name
    if not isinstance(name, str) or name not in signatures:
        raise RequestError(f"Expected a signature_name out of {_quoted(signatures)}, received {str(name)[:200]!r}.")
    arrays = {}
    for key, value in _columns(content[formats[0]], signatures[name], rows).items():
        if isinstance(value, list) and len(value) > max_batch:
            raise RequestError(f"Input {key!r}: expected at most {max_batch} rows, received {len(value)}.")
        arrays[key] = _array(key, value, signatures[name][key])
    n = arrays.get("n", np.array(1.0))  # a whole number asks for that many rows, as in `sample`
    if n.shape == () and n.dtype.kind in "iu" and not 1 <= n <= max_batch:
        raise RequestError(f"Input 'n': expected a number from 1 to {max_batch}, received {n}.")
    return Request(name, arrays, rows)


def answer(request: Request, outputs: Mapping[str, np.ndarray]) -> bytes:
    """The JSON that answers a request, in its format."""
    lists = {key: np.asarray(outputs[key]).tolist() for key in sorted(outputs)}
    only = next(iter(lists.values())) if len(lists) == 1 else None
    if not request.rows:
        return _json({"outputs": lists if only is None else only})
    sizes = {np.shape(array)[:1] for array in outputs.values()}
    if len(sizes) != 1 or () in sizes:
        raise RequestError("The outputs have no common number of rows: ask with 'inputs' instead of 'instances'.")
    rows = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)] if only is None else only
    return _json({"predictions": rows})


def status(states: Mapping[str, str]) -> bytes:
    """The JSON of `GET /v1/models/NAME`: every version with "" if it is served, or with the reason why it is not."""
    found = []
    for version, reason in states.items():
        code = {"error_code": "UNKNOWN" if reason else "OK", "error_message": reason}
        found.append({"version": version, "state": "END" if reason else "AVAILABLE", "status": code})
    return _json({"model_version_status": found})


def metadata(name: str, version: str, definitions: Mapping[str, Any]) -> bytes:
    """The JSON of `GET /v1/models/NAME/metadata`, with the definitions of the signatures from the file saved_model.pb."""
    spec = {"name": name, "signature_name": "", "version": version}
    return _json({"model_spec": spec, "metadata": {"signature_def": {"signature_def": definitions}}})


def _columns(value: Any, inputs: Mapping[str, Any], rows: bool) -> dict[str, Any]:
    """A value for each input, from rows or columns; that of an only input needs no name."""

    def checked(value: Any, where: str = "") -> dict[str, Any]:
        if not isinstance(value, dict) or value.keys() != inputs.keys():
            raise RequestError(f"Expected an object with the inputs {_quoted(inputs)}{where}, received {_received(value)}.")
        return value

    if rows and (not isinstance(value, list) or not value):
        raise RequestError(f"Expected 'instances' to be a list with at least one row, received {_received(value)}.")
    if rows and (scalars := [key for key, spec in inputs.items() if spec.shape.rank == 0]):
        raise RequestError(f"Expected 'inputs' instead of 'instances', because there are no rows in {_quoted(scalars)}.")
    if rows and any(isinstance(row, dict) for row in value):
        named = [checked(row, f" in row {number}") for number, row in enumerate(value)]
        return {key: [row[key] for row in named] for key in inputs}
    return {next(iter(inputs)): value} if len(inputs) == 1 and not isinstance(value, dict) else checked(value)


def _array(name: str, value: Any, spec: Any) -> np.ndarray:
    """The value of an input as an array, if it has its dtype and shape."""
    found, dtype = np.array(value, object), np.dtype(spec.dtype.as_numpy_dtype)
    types = set(map(type, found.ravel()))
    if list in types:
        received = "lists of different lengths"
    elif wrong := types - ALLOWED[dtype.kind]:
        received = " and ".join(sorted(WORDS.get(item, "null") for item in wrong))
    elif not spec.shape.is_compatible_with(found.shape):
        received = f"shape {found.shape}"
    else:
        with contextlib.suppress(OverflowError), np.errstate(over="ignore"):
            result = found.astype(dtype)
            # Whole numbers must come back as they were, and what was finite must stay so.
            same = (np.isinf(result), np.isinf(found.astype("float64"))) if dtype.kind == "f" else (result, found)
            if np.array_equal(*same):
                return result
        received = "a number out of its range"
    shape = "any shape" if spec.shape.rank is None else f"shape {spec.shape}"
    raise RequestError(f"Input {name!r}: expected {spec.dtype.name} of {shape}, received {received}.")


def _received(value: Any) -> str:
    """The names in an object, or the kind of anything else."""
    if isinstance(value, dict):
        return _quoted(value) or "an empty object"
    return "an empty list" if value == [] else WORDS.get(type(value), "null")


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))[:300]


def _json(content: Any) -> bytes:
    return json.dumps(content, default=lambda text: text.decode(errors="replace")).encode()
