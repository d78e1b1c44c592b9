"""Serving: the SavedModels, the client against a server of a few lines, and the real server. The protocol: test_protocol.py."""

import argparse
import contextlib
import http.client
import importlib.util
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import client
import serve
from server import protocol
from server.model import ModelError, SavedModel, describe, latest_version
from server.protocol import RequestError, Tensor

ROOT = Path(__file__).resolve().parents[2]


# SavedModels


class Classifier(tf.Module):
    def __init__(self, scale):
        super().__init__()
        self.w = tf.Variable(scale * tf.reshape(tf.linspace(-1.0, 1.0, 64 * 10), (64, 10)))

    @tf.function(input_signature=[tf.TensorSpec([None, 64], tf.float32, name="x")])
    def classify(self, x):
        p = tf.nn.softmax(x @ self.w)
        return {"probabilities": p, "class": tf.argmax(p, -1)}


class Flow(tf.Module):
    """Uniform on [0, 2/3]⁴⁸, so that an image outside has a log-likelihood of -Infinity."""

    def __init__(self):
        super().__init__()
        self.scale = tf.Variable(1.5)

    @tf.function(input_signature=[tf.TensorSpec([None, 4, 4, 3], tf.float32, name="images")])
    def log_prob(self, images):
        inside = tf.reduce_all((images >= 0) & (images * self.scale <= 1), (1, 2, 3))
        return {"log_prob": tf.where(inside, 48 * tf.math.log(self.scale), -math.inf)}

    @tf.function(input_signature=[tf.TensorSpec([None, 4, 4, 3], tf.float32, name="images")])
    def encode(self, images):
        log_det = tf.fill(tf.shape(images)[:1], 48 * tf.math.log(self.scale))
        return {"z": tf.reshape(self.scale * images, (-1, 48)), "log_det": log_det}

    @tf.function(input_signature=[tf.TensorSpec([None, 48], tf.float32, name="z")])
    def decode(self, z):
        return {"images": tf.reshape(z / self.scale, (-1, 4, 4, 3))}

    @tf.function(
        input_signature=[
            tf.TensorSpec([], tf.int32, name="n"),
            tf.TensorSpec([], tf.int64, name="seed"),
            tf.TensorSpec([], tf.float32, name="temperature"),
        ]
    )
    def sample(self, n, seed, temperature):
        with tf.control_dependencies([tf.debugging.assert_non_negative(temperature, "temperature is negative")]):
            images = tf.random.stateless_uniform(tf.stack([n, 4, 4, 3]), tf.stack([seed, 0]))
        return {"images": temperature * images / self.scale}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for version in (2, 10):
        model = Classifier(version)
        tf.saved_model.save(model, str(root / "digits" / str(version)), {"serving_default": model.classify})
    (root / "digits" / "11").mkdir()  # not written yet
    flow = Flow()
    functions = {name: getattr(flow, name) for name in ("log_prob", "encode", "decode", "sample")}
    tf.saved_model.save(flow, str(root / "flow" / "1"), {"serving_default": flow.log_prob, **functions})
    return [root / "digits", root / "flow"]


def test_the_highest_version_is_described(folders, tmp_path):
    digits, flow = describe(folders)
    assert (digits.name, digits.version) == ("digits", 10)
    assert digits.signatures["serving_default"].inputs == {"x": Tensor((None, 64), "float32")}
    assert set(flow.signatures) == {"serving_default", "log_prob", "encode", "decode", "sample"}
    assert flow.signatures["sample"].inputs["n"] == Tensor((), "int32")
    with pytest.raises(ModelError, match=r"digits/1/saved_model.pb"):
        latest_version(tmp_path / "digits")
    broken = tmp_path / "broken" / "1" / "saved_model.pb"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"?")
    with pytest.raises(ModelError, match="does not load"):
        describe([tmp_path / "broken"])


def test_every_signature_is_computed(folders):
    flow = SavedModel(folders[1], 1)
    flow.warm_up()
    request = protocol.parse(
        b'{"signature_name": "sample", "inputs": {"n": 3, "seed": 1, "temperature": 0.5}}', flow.signatures, 8
    )
    images = flow.run(request)["images"]
    assert images.shape == (3, 4, 4, 3)
    encoded = flow.run(protocol.Request("encode", {"images": images}, True))
    np.testing.assert_allclose(flow.run(protocol.Request("decode", {"z": encoded["z"]}, True))["images"], images, rtol=1e-6)
    outside = flow.run(protocol.Request("serving_default", {"images": images + 9}, True))
    assert b"-Infinity" in protocol.answer(request, outside)
    request.inputs["temperature"] = np.float32(-1)
    with pytest.raises(RequestError, match="temperature is negative") as caught:
        flow.run(request)
    assert caught.value.status == 400


# The scripts, without the engine


def handler(models):
    """TensorFlow Serving in miniature, for the client: no limits, no versions, no care."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        busy = 1

        def reply(self, status, body):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            model = models[self.path.split("/")[3]]
            self.reply(200, protocol.metadata(model.folder.name, model.version, model.signatures))

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if Handler.busy:
                Handler.busy -= 1
                self.reply(503, b"busy")
                return
            model = models[self.path.split("/")[3].partition(":")[0]]
            try:
                request = protocol.parse(body, model.signatures, 16)
                self.reply(200, protocol.answer(request, model.run(request)))
            except RequestError as error:
                self.reply(error.status, protocol.error(error.message))

        def log_message(self, *_):
            pass

    return Handler


@pytest.fixture
def url(folders):
    models = {folder.name: SavedModel(folder, latest_version(folder)) for folder in folders}
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(models))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_client_calls_every_signature_and_draws(example, url, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((5, 64)))
    done = example("client.py", "digits", "flow", "--url", url, "--input", "x=x.npy")
    assert done.returncode == 0, done.stderr
    for line in (
        "digits, version 10",
        "serving_default(x (5, 64))",
        "class (5,) from 0 to 0",
        "decode(z (4, 48))",
        "sample(n=16, seed=1",
    ):
        assert line in done.stdout
    assert "e-08 from those before" in done.stdout or "0.0e+00 from those before" in done.stdout
    pixels = tf.io.decode_png((tmp_path / "flow-samples.png").read_bytes()).numpy()
    assert pixels.shape[0] >= 400
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 100


def test_client_reads_what_the_model_says(url, folders):
    answers = client.call_all(f"{url}/v1/models/flow", {}, rows=3)
    images = np.random.default_rng(0).uniform(size=(3, 4, 4, 3)).astype("float32")
    np.testing.assert_allclose(answers["decode"]["images"], images, rtol=1e-5)
    assert answers["log_prob"]["log_prob"].tolist() == [-math.inf] * 3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("digits", "--rows", "17"), "answered 400, Input 'x': expected at most 16 rows, received 17."),
        (("digits", "--url", "http://127.0.0.1:9"), "did not answer in 4 attempts"),
        (("digits", "--input", "x=none.npy"), "expected NAME=FILE.npy"),
    ],
)
def test_client_fails_in_one_sentence(example, url, options, expected):
    done = example("client.py", "--url", url, *options)
    assert done.returncode in (1, 2)
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_refuses_at_once_what_cannot_be_served(example, folders, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, expected in (
            ([tmp_path / "none"], "Expected SavedModels in numbered folders"),
            ([folders[0], folders[0]], "Expected folders of different names, received digits, digits"),
            ([*folders, "--port", port], f"Expected a free address, received 127.0.0.1:{port}"),
            ([*folders, "--replicas", "0"], "expected a whole number of at least 1"),
        ):
            done = example("serve.py", *map(str, options))
            assert done.returncode in (1, 2)
            assert expected in done.stderr
            assert "Traceback" not in done.stderr


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_serve_says_what_to_install(folders, missing, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else name)
    with pytest.raises(ModelError, match=r"Starlette and uvicorn: pip install 'keras-auxref\[serve\]'"):
        serve.check(argparse.Namespace(folders=list(folders), host="127.0.0.1", port=port))


def test_a_name_that_would_be_part_of_a_path_is_refused(folders):
    with pytest.raises(ModelError, match=r"received 'a\{b\}'"):
        serve.check(argparse.Namespace(folders=[folders[0].with_name("a{b}")], host="127.0.0.1", port=1))


def test_documentation_names_every_option(example):
    text = (ROOT / "docs" / "serving.md").read_text()
    for option in ("--host", "--port", "--replicas", "--max-batch", "--max-megabytes"):
        assert option in text


# The real server


class Caller:
    """Requests to one server."""

    def __init__(self, port):
        self.port = port

    def __call__(self, path, content=None, method=None, headers=None):
        body = content if content is None or isinstance(content, bytes) else json.dumps(content).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method or ("GET" if body is None else "POST"), path, body, headers or {})
        response = connection.getresponse()
        status, answer = response.status, response.read()
        connection.close()
        return status, json.loads(answer)


@pytest.mark.slow
def test_the_whole_server(folders, example, tmp_path):
    pytest.importorskip("uvicorn", reason="pip install 'keras-auxref[serve]'")
    from server.process import Server

    options = ("--max-batch", "16", "--max-megabytes", "1")
    with Server(folders, replicas=2, options=options) as server:
        server.wait_ready(2)
        call = Caller(server.port)
        predict, x = "/v1/models/digits:predict", [[0.5] * 64]

        # Health, status, metadata, and every signature in both formats.
        assert call("/") == (200, {"status": "alive"})
        assert call("/v2/health/ready") == (200, {"ready": True})
        assert call("/v1/models/digits")[1]["model_version_status"][0] == {
            "version": "10",
            "state": "AVAILABLE",
            "status": {"error_code": "OK", "error_message": ""},
        }
        assert protocol.read_metadata(call("/v1/models/flow/metadata")[1]) == SavedModel(folders[1], 1).signatures
        expected = SavedModel(folders[0], 10).run(
            protocol.Request("serving_default", {"x": np.full((1, 64), 0.5, "float32")}, True)
        )
        for path in (predict, "/v1/models/digits/versions/10:predict"):
            status, answer = call(path, {"instances": x})
            assert status == 200
            np.testing.assert_allclose(answer["predictions"][0]["probabilities"], expected["probabilities"][0], rtol=1e-5)
            assert answer["predictions"][0]["class"] == expected["class"][0]
        assert set(call(predict, {"inputs": {"x": x}})[1]["outputs"]) == {"class", "probabilities"}
        assert call(predict, {"instances": x}, headers={"Content-Type": "application/x-www-form-urlencoded"})[0] == 200
        assert call("/v1/models/flow:predict", {"inputs": np.full((1, 4, 4, 3), 9).tolist()}) == (200, {"outputs": [-math.inf]})
        done = example("client.py", "digits", "flow", "--url", f"http://127.0.0.1:{server.port}")
        assert done.returncode == 0, done.stderr

        # Every refusal, as JSON with an error.
        sample = {"n": 17, "seed": 1, "temperature": 1}
        for wanted, path, content, method in (
            (400, predict, b"{", None),
            (400, predict, {"instances": [[1.0] * 63]}, None),
            (400, predict, {"instances": [["a"] * 64]}, None),
            (400, predict, {"instances": x, "inputs": x}, None),
            (400, predict, {}, None),
            (400, predict, {"inputs": {"y": x}}, None),
            (400, predict, {"instances": x, "signature_name": "no"}, None),
            (400, predict, {"instances": x * 17}, None),
            (400, "/v1/models/flow:predict", {"signature_name": "sample", "inputs": sample}, None),
            (400, "/v1/models/flow:predict", {"signature_name": "sample", "inputs": {**sample, "n": 1, "temperature": -1}}, None),
            (404, "/v1/models/no:predict", {"instances": x}, None),
            (404, "/v1/models/digits/versions/2:predict", {"instances": x}, None),
            (404, "/v1/models/digits:classify", {"instances": x}, None),
            (404, "/v2/repository/models/digits/unload", {}, None),
            (404, "/docs", None, None),
            (405, predict, None, "GET"),
            (413, predict, b" " * (2**20 + 1), None),
            (413, predict, b" " * 2**24, None),
        ):
            status, answer = call(path, content, method)
            assert (status, set(answer)) == (wanted, {"error"}), (path, content, answer)

        # Only this machine reaches it.
        import psutil

        listening = {c.laddr for c in psutil.net_connections("inet") if c.status == "LISTEN" and c.laddr.port == server.port}
        assert {address.ip for address in listening} == {"127.0.0.1"}

        # Those who keep connections open without a request shut nobody out.
        room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200
        with contextlib.ExitStack() as stack:
            for _ in range(min(1400, room)):
                slow = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
                slow.sendall(b"POST / HTTP/1.1\r\nX: ")
            for _ in range(20):
                assert call(predict, {"instances": x})[0] == 200

        # A killed replica is replaced, and the other answers meanwhile.
        before = server.replicas()
        assert len(before) == 2
        os.kill(before[0], signal.SIGKILL)
        for _ in range(20):
            client.call(f"http://127.0.0.1:{server.port}{predict}", {"instances": x})
        server.wait_ready(3)
        assert len(set(server.replicas()) - set(before)) == 1
        assert call(predict, {"instances": x})[0] == 200

        assert "Traceback" not in "".join(server.output)
        assert server.stop() < 30
        assert server.process.returncode == 0
        assert server.left() == []


@pytest.mark.slow
def test_replicas_end_with_a_killed_parent(folders):
    pytest.importorskip("uvicorn", reason="pip install 'keras-auxref[serve]'")
    from server.process import Server

    with Server(folders[:1], replicas=2) as server:
        server.wait_ready(2)
        server.stop(signal.SIGKILL)
        assert server.left(15) == []


@pytest.mark.slow
def test_benchmark(folders, tmp_path):
    pytest.importorskip("uvicorn", reason="pip install 'keras-auxref[serve]'")
    command = [
        sys.executable,
        "-m",
        "benchmarks.serving",
        *map(str, folders),
        "--quick",
        "--output",
        str(tmp_path / "r.json"),
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["requests"] == 200
    assert content["lost"] == content["processes_left"] == 0
    assert str(tmp_path) not in json.dumps(content)
