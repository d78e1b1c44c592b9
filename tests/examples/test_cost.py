import json
import time

import numpy as np
import pytest

from server import protocol
from server.cost import ALLOWANCE, FREE, most_parts, parts
from server.protocol import RequestError, Signature, Tensor

SHAPES = [(), (None,), (None, 1), (None, 5), (None, 3, 4, 2), (2, 3), (None, 0)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("batch", [2, 7, 100])
def test_every_request_that_a_signature_takes_is_within_its_limit(shape, count, batch):
    signature = Signature({f"a long name {i}, with [commas]"[: 1 + 30 * i]: Tensor(shape, "int64") for i in range(count)}, {})
    limit = most_parts([signature.inputs.values()], batch) - ALLOWANCE
    arrays = {key: np.ones([batch if size is None else size for size in shape], int).tolist() for key in signature.inputs}
    bodies = [json.dumps({"signature_name": "serving_default", "inputs": arrays})]
    if shape and shape[0] is None:
        rows = [dict(zip(arrays, row, strict=True)) for row in zip(*arrays.values(), strict=True)]
        bodies.append(json.dumps({"instances": rows}))
    for body in bodies:
        # Without the allowance, but for three entries of the request itself and the commas in names.
        assert parts(body.encode()) <= limit + 5 + 2 * batch * (count - 1) + 4
        if "[commas]" not in body:
            protocol.parse(body.encode(), {"serving_default": signature}, batch)


def test_an_open_shape_or_text_has_a_general_limit():
    for tensor in (Tensor(None, "float32"), Tensor((None, None, 2), "float32"), Tensor((None,), "string")):
        assert most_parts([[tensor]], 8) == ALLOWANCE + 2 * FREE
    assert most_parts([[Tensor((None, 3), "int8")], [Tensor(None, "int8")]], 8) > FREE  # the signature is not known yet
    assert most_parts([], 8) == ALLOWANCE


@pytest.mark.parametrize("shape", [(None, 3), None])
def test_what_no_signature_takes_is_not_parsed(shape, monkeypatch):
    signatures = {"serving_default": Signature({"x": Tensor(shape, "float32")}, {})}
    monkeypatch.setattr(json, "loads", lambda body: pytest.fail("parsed"))
    for part in (b"[],", b"0,", b"{},", b"[[[]]],"):
        body = b'{"instances": [' + part * (31 * 2**20 // len(part)) + b"]}"
        started = time.perf_counter()
        with pytest.raises(RequestError, match=r"Expected at most \d+ values, lists and objects for 8 rows, received \d+"):
            protocol.parse(body, signatures, 8)
        assert time.perf_counter() - started < 2
