"""Serving without Ray: models, limits of the gateway, the client, the command line. With Ray: test_ray.py."""

import asyncio
import json
import math
import re
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import types_pb2

from tests.examples import nginx
from tests.examples.conftest import EXAMPLES, load
from tests.examples.models import write_classifier, write_flow
from tests.examples.plain import serving

serve, client = load("serve"), load("client")
RequestError, MEGABYTE = serve.RequestError, 2**20
ROOT = EXAMPLES.parent


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for version in (2, 10):
        write_classifier(root / "digits", version)
    (root / "digits" / "11").mkdir()  # not written yet
    write_flow(root / "flow")
    return [root / "digits", root / "flow"]


def ask(model, what, version="", content=None):
    status, body = asyncio.run(model(what, version, b"" if content is None else json.dumps(content).encode()))
    return status, json.loads(body)


# Models


@pytest.fixture(scope="module")
def flow(folders):
    return serve.Model(str(folders[1]), max_batch=16)


def test_every_signature_is_computed_in_both_formats(flow):
    inputs = {"n": 3, "seed": 1, "temperature": 0.5}
    status, answer = ask(flow, "predict", content={"signature_name": "sample", "inputs": inputs})
    images = np.array(answer["outputs"])
    assert (status, images.shape) == (200, (3, 4, 4, 3))
    encoded = ask(flow, "predict", content={"signature_name": "encode", "instances": images.tolist()})[1]["predictions"]
    z = [row["z"] for row in encoded]
    decoded = ask(flow, "predict", content={"signature_name": "decode", "instances": z})[1]["predictions"]
    np.testing.assert_allclose(decoded, images, rtol=1e-6)
    assert ask(flow, "predict", content={"instances": (images + 9).tolist()}) == (200, {"predictions": [-math.inf] * 3})


def test_what_only_the_model_knows_is_refused(flow):
    inputs = {"n": 3, "seed": 1, "temperature": -1}
    status, answer = ask(flow, "predict", content={"signature_name": "sample", "inputs": inputs})
    assert status == 400
    assert "The model refused its inputs" in answer["error"]
    assert "temperature is negative" in answer["error"]


def test_whatever_tensorflow_refuses_is_a_bad_request(tmp_path):
    """Half a character of UTF-16, a file that is not there, more than there is memory for: 400, and no reason not to serve."""

    def function(compute, *spec):
        return tf.function(compute, input_signature=[tf.TensorSpec(*spec)], autograph=False)

    module = tf.Module()
    module.functions = {
        "text": function(lambda x: {"y": x}, [None], tf.string, "x"),
        "file": function(lambda x: {"y": tf.io.read_file(x[0])}, [None], tf.string, "x"),
        "zeros": function(lambda n: {"y": tf.zeros(tf.stack([n, n, n]))}, [], tf.int64, "n"),
    }
    tf.saved_model.save(module, str(tmp_path / "all" / "1"), module.functions)
    model = serve.Model(str(tmp_path / "all"), max_batch=2**20)
    for name, value, expected in (
        ("text", ["\ud800"], "Unable to convert element to UTF-8"),
        ("file", ["/none"], "inputs: /none; No such file or directory."),
        ("zeros", 2**20, "inputs: OOM when allocating tensor with shape[1048576,1048576,1048576]"),
    ):
        status, answer = ask(model, "predict", content={"signature_name": name, "inputs": value})
        assert status == 400
        assert "The model refused its inputs: " in answer["error"]
        assert expected in answer["error"]


def test_signatures_are_those_of_the_saved_model(flow):
    definitions = ask(flow, "metadata")[1]["metadata"]["signature_def"]["signature_def"]
    found, Tensor = client.read_signatures(definitions), client.Tensor
    assert set(found) == {"serving_default", "log_prob", "encode", "decode", "sample"}
    assert found["sample"].inputs == {"n": Tensor((), "int32"), "seed": Tensor((), "int64"), "temperature": Tensor((), "float32")}
    assert found["encode"].outputs == {"log_det": Tensor((None,), "float32"), "z": Tensor((None, 48), "float32")}
    # What TensorFlow Serving writes too, although it is what Protocol Buffers leave out.
    assert definitions["sample"]["inputs"]["n"]["tensor_shape"] == {"dim": [], "unknown_rank": False}


def test_client_reads_signatures():
    rows = {"dtype": "DT_FLOAT", "tensor_shape": {"dim": [{"size": "-1", "name": ""}, {"size": "3", "name": ""}]}}
    definitions = {
        "f": {"inputs": {"x": rows}, "outputs": {"any": {"dtype": "DT_UINT8", "tensor_shape": {"unknown_rank": True}}}},
        "g": {"inputs": {"n": {"dtype": "DT_HALF", "tensor_shape": {}}}},
        "__saved_model_init_op": {"outputs": {"op": {"dtype": "DT_INVALID"}}},
    }
    assert client.read_signatures(definitions) == {
        "f": client.Signature({"x": client.Tensor((None, 3), "float32")}, {"any": client.Tensor(None, "uint8")}),
        "g": client.Signature({"n": client.Tensor((), "float16")}, {}),
    }
    with pytest.raises(client.CallError, match="Expected signatures with numbers, truth values or text, received DT_COMPLEX64"):
        client.read_signatures({"f": {"inputs": {"x": {"dtype": "DT_COMPLEX64"}}}})
    for expected, name in client.DTYPES.items():
        assert types_pb2.DataType.Name(tf.dtypes.as_dtype(name).as_datatype_enum) == expected


def test_the_server_knows_the_inputs_of_every_signature(flow):
    """From TensorFlow; they are those that the client reads from the metadata."""
    definitions = ask(flow, "metadata")[1]["metadata"]["signature_def"]["signature_def"]
    for name, signature in client.read_signatures(definitions).items():
        inputs = {key: (tuple(spec.shape), spec.dtype.name) for key, spec in flow.served["1"].inputs[name].items()}
        assert inputs == signature.inputs


def test_every_signature_has_been_called_before_a_model_is_served(flow):
    """The first call of a function makes TensorFlow optimise its graph, which took tens of seconds on a loaded machine."""
    seen = []

    class Watched(serve.SavedModel):
        def run(self, request):
            seen.append(request.signature)
            return super().run(request)

    Watched(flow.folder / "1")
    assert sorted(seen) == sorted(flow.served["1"].inputs)


def test_versions_come_stay_and_go_back(tmp_path):
    folder = tmp_path / "digits"
    row, path = [[0.01] * 64], "predict"

    def newest():
        return ask(model, "metadata")[1]["model_spec"]["version"]

    def probabilities(version=""):
        status, answer = ask(model, path, version, {"instances": row})
        return status, answer.get("predictions", [{}])[0].get("probabilities")

    write_classifier(folder, 1)
    model = serve.Model(str(folder), keep=2)
    first = probabilities()
    write_classifier(folder, 9)
    model.refresh()
    second = probabilities()
    assert newest() == "9"
    assert second[0] == 200
    assert second != first
    assert probabilities("1") == first  # beside the new one
    assert [state["version"] for state in ask(model, "status")[1]["model_version_status"]] == ["9", "1"]

    (folder / "12").mkdir()
    (folder / "12" / "saved_model.pb").write_bytes(b"?")  # cut off
    model.refresh()
    assert probabilities() == second
    states = {state["version"]: state["state"] for state in ask(model, "status")[1]["model_version_status"]}
    assert states == {"9": "AVAILABLE", "1": "AVAILABLE", "12": "END"}
    shutil.rmtree(folder / "12")

    write_classifier(folder, 10)
    assert probabilities("10")[0] == 200  # asked for before the next look at the folder
    assert newest() == "10"
    assert probabilities("1")[0] == 404

    for version in (10, 9):
        (folder / str(version)).rename(folder / f"{version}.bad")
    model.refresh()
    assert newest() == "1"
    assert probabilities() == first

    shutil.rmtree(folder)
    model.refresh()
    assert probabilities() == first  # better an old model than none


@pytest.mark.parametrize("version", ["3", "01", "9" * 4301, "18446744073709551616"])
def test_a_version_that_is_not_there(flow, version):
    status, answer = ask(flow, "predict", version, {"instances": []})
    assert status == 404
    assert answer["error"].startswith("Expected version 1 of flow, received")
    assert len(answer["error"]) < 200


def test_a_folder_without_a_model_that_loads(tmp_path):
    file = tmp_path / "broken" / "1" / "saved_model.pb"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"?")
    with pytest.raises(RuntimeError, match="Expected a SavedModel that loads"):
        serve.Model(str(tmp_path / "broken"))
    module = tf.Module()
    module.f = tf.function(lambda x: {"y": x}, input_signature=[tf.TensorSpec([None], tf.complex64, name="x")])
    tf.saved_model.save(module, str(tmp_path / "complex" / "1"), {"serving_default": module.f})
    with pytest.raises(RuntimeError, match="Expected signatures with numbers"):
        serve.Model(str(tmp_path / "complex"))


# The gateway


class Gateway(serve.Gateway):
    """Its answers are those of no model, but how many bytes it got."""

    async def ask(self, model, *question):
        return 200, b"%d" % len(question[2])


async def post(gateway, *parts, method="POST", path="/v1/models/m:predict"):
    """What the gateway answers to a body that comes in parts; None stands for one that does not come."""
    pytest.importorskip("starlette", reason="pip install -e '.[serve]'")
    left, sent = list(parts), []

    async def receive():
        part = left.pop(0) if left else b""
        if part is None:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    async def send(message):
        sent.append(message)

    await gateway.respond({"type": "http", "method": method, "path": path}, receive, send)
    assert dict(sent[0]["headers"])[b"content-type"] == b"application/json"
    return sent[0]["status"], sent[1]["body"].decode()


def test_a_body_has_a_largest_size():
    gateway = Gateway(["m"], max_bytes=1000)
    assert asyncio.run(post(gateway, b" " * 600, b" " * 400)) == (200, "1000")
    for sizes in ([1001], [600, 401], [100] * 50, [100] * 500):
        status, body = asyncio.run(post(gateway, *(b" " * size for size in sizes)))
        assert (status, json.loads(body)) == (413, {"error": "Expected a request of at most 1000 bytes, received more."})
    assert gateway.kept == 0


def test_only_so_many_bytes_are_kept():
    gateway = Gateway(["m"], max_bytes=1000)

    async def together():
        slow = asyncio.create_task(post(gateway, *[b" " * 10] * 100, None))
        others = [asyncio.create_task(post(gateway, b" " * 1000, None)) for _ in range(7)]
        await asyncio.sleep(0.1)
        refused = await post(gateway, b" " * 1000)
        for task in (slow, *others):
            task.cancel()
        await asyncio.gather(slow, *others, return_exceptions=True)
        return refused, await post(gateway, b" " * 1000)

    refused, taken = asyncio.run(together())
    assert (refused[0], taken[0], gateway.kept) == (503, 200, 0)


def test_a_body_that_does_not_come_is_refused():
    status, body = asyncio.run(post(gateway := Gateway(["m"], seconds=0.1), b"{", None))
    assert status == 408
    assert "Expected the whole request within 0.1 s" in body
    assert gateway.kept == 0


def test_an_answer_that_does_not_come_is_given_up():
    class Stuck(Gateway):
        async def ask(self, model, *question):
            await asyncio.sleep(60)

    status, body = asyncio.run(post(gateway := Stuck(["m"], seconds=0.1), b"{}"))
    assert status == 504
    assert "Expected an answer within 0.1 s" in body
    assert gateway.kept == 0


def test_a_closed_gateway_finishes_what_is_running():
    class Slow(Gateway):
        async def ask(self, model, *question):
            await asyncio.sleep(0.3)
            return 200, b""

    async def together():
        running = asyncio.create_task(post(gateway, b"{}"))
        await asyncio.sleep(0.1)
        closing = asyncio.create_task(gateway.close())
        await asyncio.sleep(0.1)
        refused = await post(gateway, b"{}")
        states = closing.done(), running.done()
        await closing
        return states, refused, running.done() and running.result()

    gateway = Slow(["m"])
    states, refused, finished = asyncio.run(together())
    assert (states, finished) == ((False, False), (200, ""))
    assert refused[0] == 503
    assert "not about to stop" in refused[1]


def test_a_fault_is_the_servers_and_in_its_log(caplog):
    class Broken(Gateway):
        async def ask(self, model, *question):
            raise ZeroDivisionError("here")

    status, body = asyncio.run(post(gateway := Broken(["m"]), b"{}"))
    assert (status, json.loads(body)) == (500, {"error": "The server has made a mistake, which is in its log."})
    assert "ZeroDivisionError: here" in caplog.text
    assert gateway.kept == 0


def test_a_body_of_brackets_goes_no_further():
    status, body = asyncio.run(post(Gateway(["m"]), b'{"instances": [' + b"[]," * (31 * MEGABYTE // 3) + b"[]]}"))
    assert status == 400
    assert "values and lists" in body


def test_paths_and_methods():
    gateway = Gateway(["m"])
    assert asyncio.run(post(gateway, method="GET", path="/v1/models/m")) == (200, "0")
    assert asyncio.run(post(gateway, method="GET", path="/no"))[0] == 404
    assert asyncio.run(post(gateway, method="PUT"))[0] == 405


def test_a_websocket_is_refused():
    pytest.importorskip("starlette", reason="pip install -e '.[serve]'")
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message["type"])

    asyncio.run(Gateway(["m"]).respond({"type": "websocket", "path": "/v1/models/m"}, receive, send))
    assert sent == ["websocket.close"]


# The client, against the models without Ray


@pytest.fixture(scope="module")
def url(folders, flow):
    with serving({"digits": serve.Model(str(folders[0]), max_batch=16), "flow": flow}, failures=[500, 503]) as url:
        yield url


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


def test_client_reads_what_the_model_says(url):
    answers = client.call_all(f"{url}/v1/models/flow", {}, rows=3)
    images = np.random.default_rng(0).uniform(size=(3, 4, 4, 3)).astype("float32")
    np.testing.assert_allclose(answers["decode"]["images"], images, rtol=1e-5)
    assert answers["log_prob"]["log_prob"].tolist() == [-math.inf] * 3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("digits", "--rows", "17"), "answered 400, Input 'x': expected at most 16 rows, received 17."),
        (("digits", "--rows", "0"), "expected at least one of --rows, received 0"),
        (("digits", "--url", "http://127.0.0.1:9"), "did not answer in 5 attempts"),
        (("digits", "--input", "x=none.npy"), "expected NAME=FILE.npy"),
    ],
)
def test_client_fails_in_one_sentence(example, url, options, expected):
    done = example("client.py", "--url", url, *options)
    assert done.returncode in (1, 2)
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


# The command line


def test_serve_refuses_at_once_what_cannot_be_served(example, folders, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, expected in (
            ([tmp_path / "none"], "expected SavedModels in numbered folders"),
            ([folders[0], folders[0]], "expected folders of different names"),
            ([tmp_path / "a:b"], "without a colon, none of them 'gateway', received a:b"),
            ([*folders, "--port", port], f"expected a free address, received 127.0.0.1:{port}"),
            ([*folders, "--port", "70000"], "expected a free address"),
            ([*folders, "--replicas", "0"], "--replicas: expected a whole number of at least 1, received 0"),
        ):
            done = example("serve.py", *map(str, options))
            assert done.returncode == 2
            assert expected in done.stderr
            assert "Traceback" not in done.stderr


def test_serve_says_what_to_install_and_why_ray_does_not_start(folders, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    monkeypatch.setattr("sys.argv", ["serve.py", *map(str, folders), "--port", port])
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit, match=re.escape("pip install -e '.[serve]'")):
        serve.main()

    def init(*_, **__):
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, serve=None))
    with pytest.raises(SystemExit, match="Expected Ray to start, or to run at --address: Could not find any running Ray"):
        serve.main()


def test_documentation_names_every_option(example):
    text, options = (
        (ROOT / "docs" / "serving.md").read_text(),
        set(re.findall(r"--[a-z-]+", example("serve.py", "--help").stdout)),
    )
    assert {"--host", "--port", "--keep"} <= options
    assert [option for option in options - {"--help"} if f"`{option}`" not in text] == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_requests_of_the_documentation():
    """Every line of curl in docs/serving.md, on the models that ship."""
    section = (ROOT / "docs" / "serving.md").read_text().partition("### Requests")[2]
    script = (
        re.search("```bash\n(.+?)```", section, re.S)[1]
        .replace("$(python ", f"$({sys.executable} ")
        .replace("curl ", "curl -sf ")
    )
    with serving({name: serve.Model(str(ROOT / "saved_models" / name)) for name in ("digits", "mnist-flow")}) as url:
        script = "set -eu\n" + re.sub("^(curl .+?)( +#.*)?$", r"\1; echo", script, flags=re.M).replace(
            "http://127.0.0.1:8501", url
        )
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    keys = ["model_version_status", "model_spec", *["predictions"] * 4, "outputs", "predictions"]
    assert [next(iter(answer)) for answer in answers] == keys
    assert np.shape(answers[4]["predictions"][0]["z"]) == (784,)
    assert np.shape(answers[5]["predictions"]) == (1, 28, 28, 1)
    assert np.shape(answers[6]["outputs"]) == (16, 28, 28, 1)
    assert answers[2] == answers[7]


@pytest.mark.slow
@pytest.mark.skipif(None in map(shutil.which, ("nginx", "curl", "openssl")), reason="needs nginx, curl and openssl")
def test_the_documented_nginx_in_front(folders, tmp_path):
    with serving({"digits": serve.Model(str(folders[0]))}) as url:
        nginx.check(int(url.rpartition(":")[2]), "/v1/models/digits:predict", {"instances": [[0.01] * 64]}, tmp_path)
