"""The protocol of serving, without a server."""

import json

import numpy as np
import pytest

from server import protocol
from server.protocol import RequestError, Signature, Tensor

SIGNATURES = {
    "serving_default": Signature(
        {"x": Tensor((None, 3), "float32")}, {"class": Tensor((None,), "int64"), "p": Tensor((None, 2), "float32")}
    ),
    "double": Signature({"x": Tensor((None, 3), "float32")}, {"y": Tensor((None, 3), "float32")}),
    "two": Signature({"a": Tensor((None,), "int32"), "b": Tensor((None, 2), "float64")}, {"c": Tensor((None,), "float64")}),
    "sample": Signature(
        {"n": Tensor((), "int32"), "seed": Tensor((), "int64"), "t": Tensor((), "float32")}, {"y": Tensor((None,), "float32")}
    ),
    "kinds": Signature({"flag": Tensor((None,), "bool"), "word": Tensor((None,), "string"), "byte": Tensor(None, "uint8")}, {}),
}


def parse(content, max_batch=8):
    return protocol.parse(content if isinstance(content, bytes) else json.dumps(content).encode(), SIGNATURES, max_batch)


def refusal(content):
    with pytest.raises(RequestError) as caught:
        parse(content)
    assert caught.value.status == 400
    return str(caught.value)


def test_rows_of_an_only_input():
    for rows in ([[1, 2, 3], [4, 5, 6.5]], [{"x": [1, 2, 3]}, {"x": [4, 5, 6.5]}]):
        request = parse({"instances": rows})
        assert request.signature == "serving_default"
        assert request.rows
        assert request.inputs["x"].dtype == "float32"
        np.testing.assert_array_equal(request.inputs["x"], [[1, 2, 3], [4, 5, 6.5]])


def test_columns():
    for value in ([[1, 2, 3]], {"x": [[1, 2, 3]]}):
        request = parse({"signature_name": "double", "inputs": value})
        assert (request.signature, request.rows, request.inputs["x"].shape) == ("double", False, (1, 3))
    request = parse({"signature_name": "sample", "inputs": {"n": 3, "seed": 2**40, "t": 1}})
    assert {key: (array.shape, str(array.dtype)) for key, array in request.inputs.items()} == {
        "n": ((), "int32"),
        "seed": ((), "int64"),
        "t": ((), "float32"),
    }
    assert request.inputs["seed"] == 2**40


def test_rows_of_several_inputs_become_columns():
    request = parse({"signature_name": "two", "instances": [{"a": 1, "b": [1, 2]}, {"b": [3, 4], "a": 2}]})
    np.testing.assert_array_equal(request.inputs["a"], [1, 2])
    np.testing.assert_array_equal(request.inputs["b"], [[1, 2], [3, 4]])


def test_truth_values_text_and_any_shape():
    request = parse({"signature_name": "kinds", "inputs": {"flag": [True, False], "word": ["a", "ä"], "byte": [[255]]}})
    assert [str(array.dtype) for array in request.inputs.values()] == ["bool", "object", "uint8"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{", "Expected JSON"),
        (b"", "Expected JSON"),
        (b'{"instances": [[1, 2, 3]', "Expected JSON"),
        (b"\xff\xfe\xfa", "Expected JSON"),
        (b"[" * 100_000, "Expected JSON"),
        (b'{"instances": [' + b"1" * 5000 + b"]}", "Expected JSON"),
        ([1], "Expected a JSON object with 'instances' or 'inputs', received a list"),
        ({}, "received neither, but an empty object"),
        ({"instance": [[1, 2, 3]]}, "received neither, but 'instance'"),
        ({"instances": [[1, 2, 3]], "inputs": [[1, 2, 3]]}, "received both"),
        (
            {"signature_name": "no", "instances": [[1, 2, 3]]},
            "out of 'serving_default', 'double', 'two', 'sample', 'kinds', received 'no'",
        ),
        ({"signature_name": ["double"], "instances": [[1, 2, 3]]}, "received ['double']"),
        ({"instances": []}, "at least one row, received an empty list"),
        ({"instances": 1.5}, "received a fraction"),
        ({"instances": [{"y": [1, 2, 3]}]}, "Expected the inputs 'x' in row 0, received 'y'"),
        ({"instances": [{"x": [1, 2, 3]}, [1, 2, 3]]}, "received a list in row 1"),
        ({"instances": [{"x": [1, 2, 3]}, {"x": [1, 2, 3], "y": 1}]}, "in row 1, received 'x', 'y'"),
        ({"inputs": {}}, "Expected the inputs 'x', received none"),
        ({"inputs": {"x": [[1, 2, 3]], "y": 1}}, "Expected the inputs 'x', received 'x', 'y'"),
        ({"signature_name": "two", "inputs": [1]}, "Expected an object with 'a', 'b', received a list"),
        ({"signature_name": "two", "instances": [1]}, "Expected an object with 'a', 'b', received a list"),
        (
            {"signature_name": "sample", "instances": [{"n": 1, "seed": 1, "t": 1}]},
            "Expected 'inputs' in the place of 'instances'",
        ),
        ({"instances": [[1, 2]]}, "Input 'x': expected shape (None, 3), received (1, 2)"),
        ({"instances": [1, 2, 3]}, "Input 'x': expected shape (None, 3), received (3,)"),
        ({"instances": [[[1, 2, 3]]]}, "expected shape (None, 3), received (1, 1, 3)"),
        ({"instances": [[1, 2, 3], [1, 2]]}, "expected shape (None, 3), received lists of different lengths"),
        ({"instances": [[1, 2, [3]]]}, "expected shape (None, 3), received lists of different lengths"),
        ({"instances": [["1", 2, 3]]}, "Input 'x': expected float32, received text"),
        ({"instances": [[None, True, 3]]}, "Input 'x': expected float32, received null and true or false"),
        ({"instances": [[1, 2, {"b64": "AA=="}]]}, "expected float32, received an object"),
        ({"instances": [[1, 2, 1e39]]}, "expected float32, received a number out of its range"),
        ({"instances": [[1, 2, 10**400]]}, "expected float32, received a number out of its range"),
        ({"signature_name": "sample", "inputs": {"n": 1.0, "seed": 1, "t": 1}}, "Input 'n': expected int32, received a fraction"),
        (
            {"signature_name": "sample", "inputs": {"n": 1, "seed": 2**70, "t": 1}},
            "Input 'seed': expected int64, received a number out",
        ),
        ({"signature_name": "two", "inputs": {"a": [2**40], "b": [[1, 2]]}}, "Input 'a': expected int32, received a number out"),
        (
            {"signature_name": "kinds", "inputs": {"flag": [1], "word": [], "byte": 0}},
            "Input 'flag': expected bool, received a number",
        ),
        (
            {"signature_name": "kinds", "inputs": {"flag": [], "word": [1], "byte": 0}},
            "Input 'word': expected string, received a number",
        ),
        (
            {"signature_name": "kinds", "inputs": {"flag": [], "word": [], "byte": -1}},
            "Input 'byte': expected uint8, received a number out",
        ),
        ({"instances": [[1, 2, 3]] * 9}, "Input 'x': expected at most 8 rows, received 9"),
        (
            {"signature_name": "sample", "inputs": {"n": 9, "seed": 1, "t": 1}},
            "Input 'n': expected a number from 1 to 8, received 9",
        ),
        (
            {"signature_name": "sample", "inputs": {"n": 0, "seed": 1, "t": 1}},
            "Input 'n': expected a number from 1 to 8, received 0",
        ),
    ],
)
def test_a_refusal_says_what_was_expected_and_what_was_received(content, expected):
    message = refusal(content)
    assert expected in message
    assert message.startswith(("Expected", "Input"))
    assert message.endswith(".")
    assert set(json.loads(protocol.error(message))) == {"error"}


def test_answers():
    outputs = {"p": np.array([[0.25, 0.75], [1, 0]], "float32"), "class": np.array([1, 0])}
    rows, columns = (protocol.Request("serving_default", {}, rows) for rows in (True, False))
    assert json.loads(protocol.answer(rows, outputs)) == {
        "predictions": [{"class": 1, "p": [0.25, 0.75]}, {"class": 0, "p": [1, 0]}]
    }
    assert json.loads(protocol.answer(columns, outputs)) == {"outputs": {"class": [1, 0], "p": [[0.25, 0.75], [1, 0]]}}
    only = {"y": np.array([1.5, 2.5])}
    assert json.loads(protocol.answer(rows, only)) == {"predictions": [1.5, 2.5]}
    assert json.loads(protocol.answer(columns, only)) == {"outputs": [1.5, 2.5]}
    assert json.loads(protocol.answer(columns, {"y": np.array(2.0)})) == {"outputs": 2.0}
    assert json.loads(protocol.answer(columns, {"y": np.array([b"a", "ä".encode()], object)})) == {"outputs": ["a", "ä"]}
    for uneven in ({"a": np.zeros(2), "b": np.zeros(3)}, {"a": np.array(1.0)}):
        with pytest.raises(RequestError, match="'inputs'"):
            protocol.answer(rows, uneven)


def test_a_float32_comes_back_as_it_was(rng):
    values = rng.normal(size=100).astype("float32") * np.float32(10) ** rng.integers(-30, 30, 100).astype("float32")
    answer = json.loads(protocol.answer(protocol.Request("", {}, False), {"y": values}))["outputs"]
    np.testing.assert_array_equal(np.array(answer, "float32"), values)


def test_not_a_number_and_infinity_go_both_ways_as_bare_words():
    body = protocol.answer(protocol.Request("", {}, False), {"y": np.array([np.nan, np.inf, -np.inf], "float32")})
    assert body == b'{"outputs": [NaN, Infinity, -Infinity]}'
    request = parse(b'{"instances": [[NaN, Infinity, -Infinity]]}')
    np.testing.assert_array_equal(request.inputs["x"], [[np.nan, np.inf, -np.inf]])


def test_status_and_metadata():
    assert json.loads(protocol.status(3))["model_version_status"][0]["version"] == "3"
    content = json.loads(protocol.metadata("m", 3, SIGNATURES))
    assert content["model_spec"] == {"name": "m", "signature_name": "", "version": "3"}
    definition = content["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert definition["method_name"] == "tensorflow/serving/predict"
    assert definition["inputs"]["x"]["dtype"] == "DT_FLOAT"
    assert [dim["size"] for dim in definition["inputs"]["x"]["tensor_shape"]["dim"]] == ["-1", "3"]
    assert protocol.read_metadata(content) == SIGNATURES
