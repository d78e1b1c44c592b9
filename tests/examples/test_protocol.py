"""The protocol of serving, without a server."""

import json

import numpy as np
import pytest
from tensorflow import TensorSpec

from tests.examples.conftest import load

protocol = load("protocol")
RequestError = protocol.RequestError


SIGNATURES = {
    "serving_default": {"x": TensorSpec((None, 3), "float32")},
    "double": {"x": TensorSpec((None, 3), "float32")},
    "two": {"a": TensorSpec((None,), "int32"), "b": TensorSpec((None, 2), "float64")},
    "sample": {"n": TensorSpec((), "int32"), "seed": TensorSpec((), "int64"), "t": TensorSpec((), "float32")},
    "kinds": {"flag": TensorSpec((None,), "bool"), "word": TensorSpec((None,), "string"), "byte": TensorSpec(None, "uint8")},
}


def parse(content, max_batch=8):
    return protocol.parse(content if isinstance(content, bytes) else json.dumps(content).encode(), SIGNATURES, max_batch)


def refusal(content):
    with pytest.raises(RequestError) as caught:
        parse(content)
    status, body = caught.value.answer()
    assert (status, set(json.loads(body))) == (400, {"error"})
    return json.loads(body)["error"]


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
        ([1], "Expected a JSON object with one of 'instances' and 'inputs', received a list"),
        ({}, "with one of 'instances' and 'inputs', received an empty object"),
        ({"instance": [[1, 2, 3]]}, "with one of 'instances' and 'inputs', received 'instance'"),
        ({"instances": [[1, 2, 3]], "inputs": [[1, 2, 3]]}, "received both"),
        (
            {"signature_name": "no", "instances": [[1, 2, 3]]},
            "out of 'serving_default', 'double', 'two', 'sample', 'kinds', received 'no'",
        ),
        ({"signature_name": ["double"], "instances": [[1, 2, 3]]}, "received \"['double']\""),
        ({"signature_name": 0, "instances": [[1, 2, 3]]}, "received '0'"),
        ({"signature_name": False, "instances": [[1, 2, 3]]}, "received 'False'"),
        ({"instances": []}, "at least one row, received an empty list"),
        ({"instances": 1.5}, "received a fraction"),
        ({"instances": [{"y": [1, 2, 3]}]}, "Expected an object with the inputs 'x' in row 0, received 'y'"),
        ({"instances": [{"x": [1, 2, 3]}, [1, 2, 3]]}, "'x' in row 1, received a list"),
        ({"instances": [{"x": [1, 2, 3]}, {"x": [1, 2, 3], "y": 1}]}, "in row 1, received 'x', 'y'"),
        ({"inputs": {}}, "Expected an object with the inputs 'x', received an empty object"),
        ({"inputs": {"x": [[1, 2, 3]], "y": 1}}, "Expected an object with the inputs 'x', received 'x', 'y'"),
        ({"signature_name": "two", "inputs": [1]}, "Expected an object with the inputs 'a', 'b', received a list"),
        ({"signature_name": "two", "instances": [1]}, "Expected an object with the inputs 'a', 'b', received a list"),
        (
            {"signature_name": "sample", "instances": [{"n": 1, "seed": 1, "t": 1}]},
            "Expected 'inputs' instead of 'instances'",
        ),
        ({"instances": [[1, 2]]}, "Input 'x': expected float32 of shape (None, 3), received shape (1, 2)"),
        ({"instances": [1, 2, 3]}, "Input 'x': expected float32 of shape (None, 3), received shape (3,)"),
        ({"instances": [[[1, 2, 3]]]}, "of shape (None, 3), received shape (1, 1, 3)"),
        ({"instances": [[1, 2, 3], [1, 2]]}, "of shape (None, 3), received lists of different lengths"),
        ({"instances": [[1, 2, [3]]]}, "of shape (None, 3), received lists of different lengths"),
        ({"instances": [["1", 2, 3]]}, "Input 'x': expected float32 of shape (None, 3), received text"),
        ({"instances": [[None, True, 3]]}, "Input 'x': expected float32 of shape (None, 3), received null and true or false"),
        ({"instances": [[1, 2, {"b64": "AA=="}]]}, "expected float32 of shape (None, 3), received an object"),
        ({"instances": [[1, 2, 1e39]]}, "expected float32 of shape (None, 3), received a number out of its range"),
        ({"instances": [[1, 2, 10**400]]}, "expected float32 of shape (None, 3), received a number out of its range"),
        (
            {"signature_name": "sample", "inputs": {"n": 1.0, "seed": 1, "t": 1}},
            "Input 'n': expected int32 of shape (), received a fraction",
        ),
        ({"signature_name": "sample", "inputs": {"n": True, "seed": 1, "t": 1}}, "received true or false"),
        (b'{"inputs": ' + b"[" * 200 + b"]" * 200 + b"}", "received lists of different lengths"),
        (
            {"signature_name": "sample", "inputs": {"n": 1, "seed": 2**70, "t": 1}},
            "Input 'seed': expected int64 of shape (), received a number out",
        ),
        (
            {"signature_name": "two", "inputs": {"a": [2**40], "b": [[1, 2]]}},
            "Input 'a': expected int32 of shape (None,), received a number out",
        ),
        (
            {"signature_name": "kinds", "inputs": {"flag": [1], "word": [], "byte": 0}},
            "Input 'flag': expected bool of shape (None,), received a number",
        ),
        (
            {"signature_name": "kinds", "inputs": {"flag": [], "word": [1], "byte": 0}},
            "Input 'word': expected string of shape (None,), received a number",
        ),
        (
            {"signature_name": "kinds", "inputs": {"flag": [], "word": [], "byte": -1}},
            "Input 'byte': expected uint8 of any shape, received a number out",
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
    assert json.loads(protocol.status({"3": "", "4": "it is cut off"}))["model_version_status"] == [
        {"version": "3", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}},
        {"version": "4", "state": "END", "status": {"error_code": "UNKNOWN", "error_message": "it is cut off"}},
    ]
    content = json.loads(protocol.metadata("m", "3", {"f": {"inputs": {}}}))
    assert content["model_spec"] == {"name": "m", "signature_name": "", "version": "3"}
    assert content["metadata"]["signature_def"]["signature_def"] == {"f": {"inputs": {}}}


def test_paths():
    for path, expected in {
        "/v1/models/m": ("m", "", "status"),
        "/v1/models/m/metadata": ("m", "", "metadata"),
        "/v1/models/m/versions/12": ("m", "12", "status"),
        "/v1/models/m/versions/12/metadata": ("m", "12", "metadata"),
    }.items():
        assert protocol.route("GET", path, ["m", "n"]) == expected
    assert protocol.route("POST", "/v1/models/n:predict", ["m", "n"]) == ("n", "", "predict")
    assert protocol.route("POST", "/v1/models/n/versions/3:predict", ["m", "n"]) == ("n", "3", "predict")


@pytest.mark.parametrize(
    ("status", "method", "path"),
    [
        (404, "GET", "/"),
        (404, "GET", "/docs"),
        (404, "GET", "/v1/models"),
        (404, "GET", "/v1/models/"),
        (404, "GET", "/v1/models/other"),
        (404, "GET", "/v1/models/m/"),
        (404, "GET", "/v1/models/m/versions/"),
        (404, "GET", "/v1/models/m/versions/-1"),
        (404, "GET", "/v1/models/m/versions/١"),
        (404, "GET", "/v1/models/m\n"),
        (404, "POST", "/v1/models/m:classify"),
        (404, "POST", "/v1/models/m:predict/"),
        (404, "POST", "/" * 10_000),
        (405, "GET", "/v1/models/m:predict"),
        (405, "POST", "/v1/models/m"),
        (405, "DELETE", "/v1/models/m"),
        (405, "HEAD", "/v1/models/m/metadata"),
    ],
)
def test_other_paths_and_methods_are_refused(status, method, path):
    with pytest.raises(RequestError, match="Expected") as caught:
        protocol.route(method, path, ["m"])
    assert caught.value.status == status
    assert len(str(caught.value)) < 400
    assert path[:20] in str(caught.value)


def test_a_refusal_is_short_whatever_was_received():
    for content in ({"x" * 10**5: 1}, {"inputs": {"y" * 10**5: 1}}, {"signature_name": "z" * 10**5, "inputs": 1}):
        assert len(refusal(content)) < 1000


def test_what_would_take_gigabytes_is_refused_by_a_count():
    for part in (b"[],", b"0,", b"{},", b"[[[]]],", b'{"a":1},'):
        body = b'{"instances": [' + part * (31 * 2**20 // len(part)) + b"]}"
        with pytest.raises(
            RequestError, match=r"Expected at most 5000000 values and lists, an object counted as ten, received \d+"
        ):
            protocol.check_size(body)


def test_the_count_has_room_for_a_thousand_images():
    protocol.check_size(json.dumps({"inputs": np.zeros((1024, 32, 32, 3), int).tolist()}).encode())
