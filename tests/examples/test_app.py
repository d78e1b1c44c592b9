"""One replica in this process, over sockets, with a model that needs no TensorFlow: what it answers and what it refuses."""

import contextlib
import http.client
import json
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from server import protocol
from server.protocol import RequestError, Signature, Tensor

uvicorn = pytest.importorskip("uvicorn", reason="pip install 'keras-auxref[serve]'")
pytest.importorskip("starlette", reason="pip install 'keras-auxref[serve]'")

from server import app as server_app  # noqa: E402
from server import connections  # noqa: E402

PREDICT, MEGABYTE = "/v1/models/double:predict", 2**20


class Double:
    """y = 2x; 6 MB for -1, a refusal for -2, a fault for -3."""

    folder, version = Path("double"), 7
    signatures = {"serving_default": Signature({"x": Tensor((None, 2), "float32")}, {"y": Tensor((None, 2), "float32")})}  # noqa: RUF012

    def run(self, request):
        x = request.inputs["x"]
        if x[0, 0] == -1:
            return {"y": np.zeros((1, 300_000), "float32") + 0.123}
        if x[0, 0] == -2:
            raise RequestError("The model refused its inputs.")
        if x[0, 0] == -3:
            raise RuntimeError("fault")
        return {"y": 2 * x}


@contextlib.contextmanager
def running(max_bytes=MEGABYTE, **options):
    app = server_app.application([Double()], 8, max_bytes)
    server = uvicorn.Server(uvicorn.Config(app, port=0, **{**server_app.OPTIONS, **options}))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture
def port():
    with running() as number:
        yield number


def call(port, path, content=None, method=None, headers=None):
    body = content if content is None or isinstance(content, bytes) else json.dumps(content).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request(method or ("GET" if body is None else "POST"), path, body, headers or {})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def connect(port, data=b""):
    connection = socket.socket()
    connection.settimeout(20)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)  # little waits on the way
    connection.connect(("127.0.0.1", port))
    connection.sendall(data)
    return connection


def read_all(connection):
    """Until the server closes."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(2**16):
            parts.append(part)
    return b"".join(parts)


def request(content, head=b""):
    body = json.dumps(content).encode()
    return b"POST %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%s" % (PREDICT.encode(), head, len(body), body)


def test_every_route(port):
    assert call(port, "/") == (200, {"status": "alive"})
    assert call(port, "/v2/health/live") == (200, {"live": True})
    assert call(port, "/v2/health/ready") == (200, {"ready": True})
    for path in ("/v1/models/double", "/v1/models/double/versions/7"):
        assert call(port, path)[1]["model_version_status"][0]["version"] == "7"
        assert protocol.read_metadata(call(port, f"{path}/metadata")[1]) == Double.signatures
        assert call(port, f"{path}:predict", {"instances": [[1, 2]]}) == (200, {"predictions": [[2, 4]]})


@pytest.mark.parametrize(
    ("wanted", "path", "content", "method"),
    [
        (400, PREDICT, b"{", None),
        (400, PREDICT, {"instances": [[-2, 0]]}, None),
        (404, "/v1/models/double/versions/8:predict", {}, None),
        (404, f"/v1/models/double/versions/{'9' * 4301}:predict", {}, None),
        (404, f"/v1/models/double/versions/{'9' * 4301}", None, None),
        (404, "/v1/models/double:classify", {}, None),
        (404, "/v1/models/double/", None, None),
        (404, "/v1/models/no", None, None),
        (404, "/docs", None, None),
        (405, PREDICT, None, "GET"),
        (405, "/v1/models/double", {}, None),
        (405, "/v1/models/double", None, "DELETE"),
        (413, PREDICT, b" " * (MEGABYTE + 1), None),
        (413, PREDICT, b" " * (16 * MEGABYTE), None),
    ],
)
def test_every_refusal_is_json(port, wanted, path, content, method):
    status, answer = call(port, path, content, method)
    assert (status, set(answer)) == (wanted, {"error"})
    assert len(answer["error"]) < 500


def test_a_fault_is_the_servers_and_in_its_log(port, caplog):
    assert call(port, PREDICT, {"instances": [[-3, 0]]}) == (
        500,
        {"error": "The server has made a mistake, which is in its log."},
    )
    assert call(port, PREDICT, {"instances": [[1, 0]]})[0] == 200


@pytest.mark.parametrize("upgrade", ["websocket", "h2c", "nothing"])
def test_a_request_for_another_protocol_is_answered_in_this_one(port, upgrade):
    headers = {
        "Connection": "Upgrade",
        "Upgrade": upgrade,
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
        "Sec-WebSocket-Version": "13",
    }
    assert call(port, PREDICT, {"instances": [[1, 2]]}, headers=headers) == (200, {"predictions": [[2, 4]]})
    assert call(port, "/v1/models/double", headers=headers)[0] == 200


# Clients that close one side


@pytest.mark.parametrize("pause", [0, 0.1])
def test_who_closes_after_a_whole_request_gets_the_answer(port, pause):
    for sent, expected in (
        (request({"instances": [[1, 2]]}), b'{"predictions": [[2.0, 4.0]]}'),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b'{"status": "alive"}'),
        (2 * request({"instances": [[1, 2]]}), b'{"predictions": [[2.0, 4.0]]}'),
        (request({"instances": [[-1, 0]]}), b"0.12300000339746475]]}"),
    ):
        with connect(port, sent) as connection:
            time.sleep(pause)
            connection.shutdown(socket.SHUT_WR)
            received = read_all(connection)
            assert received.startswith(b"HTTP/1.1 200 OK")
            assert received.endswith(expected)
            assert received.count(b"HTTP/1.1 200 OK") == sent.count(b"HTTP/1.1")


def test_who_closes_in_the_middle_of_a_request_is_let_go(port):
    for sent in (b"", b"POST / HT", request({"instances": [[1, 2]]})[:-3]):
        with connect(port, sent) as connection:
            connection.shutdown(socket.SHUT_WR)
            started = time.perf_counter()
            assert b"200 OK" not in read_all(connection)
            assert time.perf_counter() - started < 5
    assert call(port, "/")[0] == 200


# Clients that take their time


@pytest.mark.parametrize("before", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_head_that_comes_byte_by_byte_is_cut_off(port, before, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    with connect(port, before) as connection:
        started = time.perf_counter()
        with contextlib.suppress(ConnectionError):
            for byte in b"POST / HTTP/1.1\r\n" + 100 * b"X: y\r\n":
                connection.sendall(bytes([byte]))
                time.sleep(0.05)
        assert time.perf_counter() - started < 5


def test_a_body_that_does_not_come_is_refused(port, monkeypatch):
    monkeypatch.setattr(server_app, "BODY_SECONDS", 0.3)
    with connect(port, request({"instances": [[1, 2]]})[:-3]) as connection:
        received = read_all(connection)  # the server closes
    assert received.startswith(b"HTTP/1.1 408")
    assert b"Expected the whole request within 0.3 s" in received


def test_a_long_answer_has_the_time_that_it_takes_to_read(port, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.4)
    with connect(port, request({"instances": [[-1, 0]]}, b"Connection: close\r\n")) as connection:
        size, started = 0, time.perf_counter()
        while part := connection.recv(2**16):
            size += len(part)
            time.sleep(0.02)
    assert size > 6e6
    assert time.perf_counter() - started > 1


def test_who_does_not_read_the_answer_is_cut_off(port, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.4)
    with connect(port, request({"instances": [[-1, 0]]})) as connection:
        time.sleep(3)
        assert len(read_all(connection)) < 6e6


def test_connections_without_a_request_shut_nobody_out(monkeypatch):
    monkeypatch.setattr(connections, "WAITING", 20)
    with running(limit_concurrency=40) as port, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(port, b"POST / HTTP/1.1\r\nX: ")) for _ in range(150)]
        for _ in range(5):
            assert call(port, PREDICT, {"instances": [[1, 2]]}) == (200, {"predictions": [[2, 4]]})
            slow.append(stack.enter_context(connect(port, b"POST / HTTP/1.1\r\nX: ")))
        time.sleep(0.2)
        assert sum(map(_is_open, slow)) <= 20


def _is_open(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


# What requests cost


def test_eight_bodies_of_brackets_cost_next_to_nothing(monkeypatch):
    """They took a gigabyte and five seconds each to parse."""
    body = b'{"instances": [' + b"[]," * (31 * MEGABYTE // 3) + b"[]]}"
    answers = []
    with running(max_bytes=32 * MEGABYTE) as port:
        threads = [threading.Thread(target=lambda: answers.append(call(port, PREDICT, body))) for _ in range(8)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.perf_counter() - started < 20
    assert [status for status, _ in answers] == [400] * 8
    assert "Expected at most" in answers[0][1]["error"]


def test_one_body_is_parsed_at_a_time(port, monkeypatch):
    parse, now, most = protocol.parse, [], []

    def slowly(*arguments):
        now.append(1)
        most.append(len(now))
        time.sleep(0.05)
        now.pop()
        return parse(*arguments)

    monkeypatch.setattr(protocol, "parse", slowly)
    threads = [threading.Thread(target=call, args=(port, PREDICT, {"instances": [[1, 2]]})) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 6


def test_only_so_many_bytes_are_kept(port, monkeypatch):
    monkeypatch.setattr(server_app, "BODIES_AT_ONCE", 1)
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\n" % PREDICT.encode()
    with connect(port, head + b" " * 800_000) as connection:
        time.sleep(0.3)
        status, answer = call(port, PREDICT, b" " * 500_000)
        assert (status, answer) == (503, {"error": "Expected fewer large requests at once: ask again."})
        assert call(port, PREDICT, {"instances": [[1, 2]]})[0] == 200
        connection.sendall(b" " * 100_000)
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert call(port, PREDICT, b" " * 500_000)[0] == 400
