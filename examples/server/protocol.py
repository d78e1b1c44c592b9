"""TensorFlow Serving's REST protocol for `predict`: JSON to arrays, arrays to JSON, and a clear refusal of anything else.

Nothing here knows of a server or of TensorFlow, so all of it can be tested in milliseconds. A request is

    {"signature_name": optional, "instances": [row, …]}                    answered by {"predictions": [row, …]}
    {"signature_name": optional, "inputs": value, or {name: value, …}}     answered by {"outputs": value, or {name: value, …}}

A row is the value of the only input, or {name: value} for each. A signature with several outputs answers with {name: value}.

NaN, Infinity and -Infinity are written and read as these bare words, as TensorFlow Serving does: the log-likelihood of an
impossible image is an answer, not an error. Python's json reads them; a parser that holds to RFC 8259, such as JavaScript's, does
not.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .cost import most_parts, parts

DTYPES = {
    "float16": "DT_HALF",
    "float32": "DT_FLOAT",
    "float64": "DT_DOUBLE",
    "int8": "DT_INT8",
    "int16": "DT_INT16",
    "int32": "DT_INT32",
    "int64": "DT_INT64",
    "uint8": "DT_UINT8",
    "uint16": "DT_UINT16",
    "uint32": "DT_UINT32",
    "uint64": "DT_UINT64",
    "bool": "DT_BOOL",
    "string": "DT_STRING",
}
"""What goes through JSON, by the name in NumPy, with the name in the protocol."""
DEFAULT_SIGNATURE = "serving_default"
COUNT = "n"
"""A scalar whole number of this name asks for that many rows, as in `sample`: it is held to the limit on rows."""


class RequestError(Exception):
    """A request that cannot be answered: an HTTP status and one sentence."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.status = message, status

    def __reduce__(self) -> tuple[Any, ...]:
        # An engine may carry it from one process to another.
        return type(self), (self.message, self.status)


@dataclass(frozen=True)
class Tensor:
    """Shape and dtype of an input or output; None stands for any size, and a shape of None for any shape."""

    shape: tuple[int | None, ...] | None
    dtype: str

    def accepts(self, shape: tuple[int, ...]) -> bool:
        if self.shape is None:
            return True
        return len(shape) == len(self.shape) and all(a in (None, b) for a, b in zip(self.shape, shape, strict=True))


@dataclass(frozen=True)
class Signature:
    """The named inputs and outputs of one function of a model."""

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]


@dataclass(frozen=True)
class Request:
    """What to compute: the name of a signature and its inputs; `rows` tells which of the two formats to answer in."""

    signature: str
    inputs: dict[str, np.ndarray]
    rows: bool


def parse(body: bytes | bytearray, signatures: Mapping[str, Signature], max_batch: int) -> Request:
    """Read a request for one of `signatures`, of at most `max_batch` rows, or raise a `RequestError`."""
    most = most_parts((signature.inputs.values() for signature in signatures.values()), max_batch)
    if (received := parts(body)) > most:
        raise RequestError(f"Expected at most {most} values, lists and objects for {max_batch} rows, received {received}.")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"Expected JSON, received something else: {error}.") from error
    if not isinstance(content, dict):
        raise RequestError(f"Expected a JSON object with 'instances' or 'inputs', received {_kind(content)}.")
    formats = [key for key in ("instances", "inputs") if key in content]
    if len(formats) != 1:
        received = "both" if formats else f"neither, but {_names(content) or 'an empty object'}"
        raise RequestError(f"Expected one of 'instances' and 'inputs', received {received}.")
    name = content.get("signature_name", "") or DEFAULT_SIGNATURE
    if not isinstance(name, str) or name not in signatures:
        raise RequestError(f"Expected a signature_name out of {_names(signatures)}, received {name!r}.")
    expected = signatures[name].inputs
    rows = formats == ["instances"]
    values = _columns(content["instances"], expected) if rows else _named(content["inputs"], expected)
    for key in expected:
        if isinstance(values[key], list) and len(values[key]) > max_batch:
            raise RequestError(f"Input {key!r}: expected at most {max_batch} rows, received {len(values[key])}.")
    arrays = {key: _array(key, values[key], spec) for key, spec in expected.items()}
    if COUNT in arrays:
        _limit_count(arrays[COUNT], max_batch)
    return Request(name, arrays, rows)


def answer(request: Request, outputs: Mapping[str, np.ndarray]) -> bytes:
    """The JSON that answers a request, in its format."""
    values = {key: _plain(outputs[key]) for key in sorted(outputs)}
    if not request.rows:
        content: Any = next(iter(values.values())) if len(values) == 1 else values
        return json.dumps({"outputs": content}).encode()
    sizes = {key: np.shape(array)[:1] for key, array in outputs.items()}
    if len(set(sizes.values())) != 1 or () in sizes.values():
        raise RequestError("The outputs have no common number of rows: ask with 'inputs' in the place of 'instances'.")
    if len(values) == 1:
        return json.dumps({"predictions": next(iter(values.values()))}).encode()
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    return json.dumps({"predictions": rows}).encode()


def error(message: str) -> bytes:
    """The JSON of a refusal."""
    return json.dumps({"error": message}).encode()


def status(version: int) -> bytes:
    """The JSON of `GET /v1/models/NAME` for a model that is ready."""
    state = {"version": str(version), "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
    return json.dumps({"model_version_status": [state]}).encode()


def metadata(name: str, version: int, signatures: Mapping[str, Signature]) -> bytes:
    """The JSON of `GET /v1/models/NAME/metadata`: every signature, as TensorFlow Serving writes it."""

    def tensors(specs: Mapping[str, Tensor]) -> dict[str, Any]:
        return {
            key: {"dtype": DTYPES[spec.dtype], "tensor_shape": _shape_json(spec.shape), "name": key}
            for key, spec in specs.items()
        }

    definitions = {
        key: {"inputs": tensors(s.inputs), "outputs": tensors(s.outputs), "method_name": "tensorflow/serving/predict"}
        for key, s in signatures.items()
    }
    spec = {"name": name, "signature_name": "", "version": str(version)}
    return json.dumps({"model_spec": spec, "metadata": {"signature_def": {"signature_def": definitions}}}).encode()


def read_metadata(content: Any) -> dict[str, Signature]:
    """The signatures in the answer of `metadata`, or in TensorFlow Serving's."""
    names = {value: key for key, value in DTYPES.items()}

    def tensors(specs: Mapping[str, Any]) -> dict[str, Tensor]:
        found = {}
        for key, spec in specs.items():
            shape = spec.get("tensor_shape", {})
            sizes = tuple(None if int(dim["size"]) < 0 else int(dim["size"]) for dim in shape.get("dim", ()))
            found[key] = Tensor(None if shape.get("unknown_rank") else sizes, names.get(spec["dtype"], spec["dtype"]))
        return found

    definitions = content["metadata"]["signature_def"]["signature_def"]
    # TensorFlow Serving also lists how the model is initialised, which is no function to call.
    callable_ones = {key: s for key, s in definitions.items() if not key.startswith("__")}
    return {key: Signature(tensors(s.get("inputs", {})), tensors(s.get("outputs", {}))) for key, s in callable_ones.items()}


def _columns(rows: Any, expected: Mapping[str, Tensor]) -> dict[str, Any]:
    """Rows as one list for each input."""
    if not isinstance(rows, list) or not rows:
        raise RequestError(f"Expected 'instances' to be a list with at least one row, received {_kind(rows)}.")
    scalars = [key for key, spec in expected.items() if spec.shape == ()]
    if scalars:
        raise RequestError(f"Expected 'inputs' in the place of 'instances', because there are no rows in {_names(scalars)}.")
    if not any(isinstance(row, dict) for row in rows):
        return _named(rows, expected)
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise RequestError(f"Expected every row to be an object like the others, received {_kind(row)} in row {number}.")
        _check_names(row, expected, f" in row {number}")
    return {key: [row[key] for row in rows] for key in expected}


def _named(value: Any, expected: Mapping[str, Tensor]) -> dict[str, Any]:
    """A value for each input, where that of an only input needs no name."""
    if isinstance(value, dict):
        _check_names(value, expected)
        return value
    if len(expected) != 1:
        raise RequestError(f"Expected an object with {_names(expected)}, received {_kind(value)}.")
    return {next(iter(expected)): value}


def _check_names(received: Mapping[str, Any], expected: Mapping[str, Any], where: str = "") -> None:
    if set(received) != set(expected):
        raise RequestError(f"Expected the inputs {_names(expected)}{where}, received {_names(received) or 'none'}.")


def _array(name: str, value: Any, spec: Tensor) -> np.ndarray:
    """The value of an input as an array, if it has its dtype and shape."""
    kind = "O" if spec.dtype == "string" else np.dtype(spec.dtype).kind
    allowed, widest = {
        "f": ({int, float}, "float64"),
        "i": ({int}, "int64"),
        "u": ({int}, "uint64"),
        "b": ({bool}, "bool"),
        "O": ({str}, "object"),
    }[kind]
    wrong = sorted(_KINDS[found] for found in _leaves(value) - allowed)
    if wrong:
        raise RequestError(f"Input {name!r}: expected {spec.dtype}, received {' and '.join(wrong)}.")
    try:
        array = np.array(value, widest)
        fits = (
            kind not in "iu"
            or not array.size
            or (array.max() <= np.iinfo(spec.dtype).max and array.min() >= np.iinfo(spec.dtype).min)
        )
        with np.errstate(over="ignore"):
            result = array if kind == "O" else array.astype(spec.dtype)
        fits = fits and (kind != "f" or bool(np.all(np.isinf(result) == np.isinf(array))))
    except OverflowError:
        fits = False
    except ValueError:
        raise RequestError(f"Input {name!r}: expected shape {_shape(spec.shape)}, received lists of different lengths.") from None
    if not fits:
        raise RequestError(f"Input {name!r}: expected {spec.dtype}, received a number out of its range.")
    if not spec.accepts(result.shape):
        raise RequestError(f"Input {name!r}: expected shape {_shape(spec.shape)}, received {_shape(result.shape)}.")
    return result


def _limit_count(n: np.ndarray, max_batch: int) -> None:
    if n.ndim == 0 and n.dtype.kind in "iu" and not 1 <= n <= max_batch:
        raise RequestError(f"Input {COUNT!r}: expected a number from 1 to {max_batch}, received {n}.")


_KINDS = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a fraction",
    type(None): "null",
}


def _kind(value: Any) -> str:
    return "an empty list" if value == [] else _KINDS[type(value)]


def _leaves(value: Any) -> set[type]:
    """The types of everything in nested lists but the lists."""
    found, pending = set(), [value]
    while pending:
        if isinstance(item := pending.pop(), list):
            types = set(map(type, item))
            found |= types - {list}
            pending += [inner for inner in item if type(inner) is list] if list in types else []
        else:
            found.add(type(item))
    return found


def _plain(array: np.ndarray) -> Any:
    """Numbers, or text, as nested lists."""
    array = np.asarray(array)
    if array.dtype.kind in "OS":
        return np.vectorize(lambda item: item.decode(errors="replace"), otypes=[object])(array).tolist() if array.size else []
    return array.tolist()


def _shape(shape: tuple[int | None, ...] | None) -> str:
    return "of any kind" if shape is None else str(tuple(shape))


def _shape_json(shape: tuple[int | None, ...] | None) -> dict[str, Any]:
    sizes = [{"size": str(-1 if size is None else size), "name": ""} for size in shape or ()]
    return {"dim": sizes, "unknown_rank": shape is None}


def _names(names: Any) -> str:
    return ", ".join(repr(name) for name in names)
