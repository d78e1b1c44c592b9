"""Load on examples/serve.py, with one and two replicas, beside a bare Starlette handler, and with a replica killed.

    python -m benchmarks.serving                      # four minutes
    python -m benchmarks.serving --quick              # a smoke run
    python -m benchmarks.serving --old /tmp/old       # a minute more: and the former server, from a checkout of commit 591384b
    python -m benchmarks.serving batch                # four minutes: digits with and without @serve.batch
    python -m benchmarks.serving --url http://127.0.0.1:8501 --label 'TensorFlow Serving'     # a server that runs already

Needs `pip install -e '.[serve]'`. Clients in threads ask as fast as they are answered, over connections that they keep,
for --seconds each: a row of `digits`, four images for the `log_prob` of `mnist-flow`, and four of its `sample`. The last run asks
all three in turn for --kill-seconds while a replica gets SIGKILL. A client asks again, up to five times, when its connection
breaks or the server answers 5xx. Every answer is compared with that of the SavedModel in this process. Clients, server and this
check share the machine; everything stays on the loopback interface. "CPU" is the processor time of all processes of the server
for each request. Writes a JSON file, to which --url adds, and prints a table.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import report
from experiments.harness import cli

ROOT = Path(__file__).resolve().parents[1]
ATTEMPTS, TIMEOUT = 5, 60
MODELS = ("digits", "mnist-flow")


@dataclass
class Question:
    """A request, ready to be sent, and what has to come back."""

    path: str
    body: bytes
    key: str
    expected: Any

    def answered_by(self, body: bytes) -> bool:
        try:
            return _close(json.loads(body)[self.key], self.expected)
        except (ValueError, KeyError, TypeError):
            return False


@dataclass
class Tally:
    """What happened to the requests."""

    latencies: list[float] = field(default_factory=list)
    retries: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    answers: dict[tuple[int, bytes], int] = field(default_factory=dict)
    recovered: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def questions(models: Path) -> dict[str, list[Question]]:
    """For each signature a few requests, with the answers of the SavedModel."""
    import tensorflow as tf

    generator = np.random.default_rng(0)
    found: dict[str, list[Question]] = {"digits": [], "log_prob": [], "sample": []}
    digits, flow = (tf.saved_model.load(str(models / name / "1")).signatures for name in MODELS)
    for seed in range(4):
        row = generator.uniform(size=(1, 64)).astype("float32")
        answer = {name: value.numpy().tolist() for name, value in digits["serving_default"](inputs=row).items()}
        rows = [dict(zip(answer, values, strict=True)) for values in zip(*answer.values(), strict=True)]
        found["digits"].append(_question("digits", "serving_default", "instances", row.tolist(), "predictions", rows))
        images = flow["sample"](n=tf.constant(4), seed=tf.constant(seed, tf.int64), temperature=tf.constant(1.0))["images"]
        log_prob = flow["log_prob"](images=images)["log_prob"].numpy().tolist()
        content = images.numpy().tolist()
        found["log_prob"].append(_question("mnist-flow", "log_prob", "instances", content, "predictions", log_prob))
        inputs = {"n": 4, "seed": seed, "temperature": 1.0}
        found["sample"].append(_question("mnist-flow", "sample", "inputs", inputs, "outputs", content))
    return found


def _question(model: str, signature: str, form: str, value: Any, key: str, expected: Any) -> Question:
    body = json.dumps({"signature_name": signature, form: value}).encode()
    return Question(f"/v1/models/{model}:predict", body, key, expected)


def load(url: str, asked: list[Question], clients: int, seconds: float, at_half: Callable[[], None] | None = None) -> Tally:
    """Ask for `seconds`; `at_half` is called when half of them are over."""
    tally, started, where = Tally(), time.perf_counter(), url.removeprefix("http://")

    def client(number: int) -> None:
        connection: http.client.HTTPConnection | None = None
        while time.perf_counter() - started < seconds:
            which, begun, number = number % len(asked), time.perf_counter(), number + 1
            for attempt in range(ATTEMPTS):
                time.sleep(0.1 * 2**attempt if attempt else 0)
                try:
                    connection = connection or http.client.HTTPConnection(where, timeout=TIMEOUT)
                    connection.request("POST", asked[which].path, asked[which].body, {"Content-Type": "application/json"})
                    response = connection.getresponse()
                    status, body = response.status, response.read()
                    reason = "" if status == 200 else str(status)
                except (OSError, http.client.HTTPException) as error:
                    status, reason, connection = 503, type(error).__name__, None
                if status < 500:
                    break
                with tally.lock:
                    tally.retries[reason] = tally.retries.get(reason, 0) + 1
            took = time.perf_counter() - begun
            with tally.lock:
                if reason:
                    tally.failures[reason] = tally.failures.get(reason, 0) + 1
                else:
                    tally.latencies.append(took)
                    tally.recovered += [took] if attempt else []
                    tally.answers[which, body] = tally.answers.get((which, body), 0) + 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    if at_half:
        time.sleep(seconds / 2)
        at_half()
    for thread in threads:
        thread.join()
    return tally


def summary(tally: Tally, asked: list[Question], seconds: float) -> dict[str, Any]:
    wrong = sum(count for (which, body), count in tally.answers.items() if not asked[which].answered_by(body))
    points = {f"p{q}_ms": 1000 * float(np.percentile(tally.latencies or [np.nan], q)) for q in (50, 99, 100)}
    return {
        "requests": len(tally.latencies) + sum(tally.failures.values()),
        "requests_per_second": len(tally.latencies) / seconds,
        **points,
        "wrong": wrong,
        "failed": tally.failures,
        "sent_again": tally.retries,
        "longest_second_attempt_ms": 1000 * max(tally.recovered, default=0.0),
    }


def measure(url: str, asked: dict[str, list[Question]], clients: int, seconds: float, process: Any = None) -> dict[str, Any]:
    """Every case at one server: the first answer, then the load."""
    found = {}
    for name, cases in asked.items():
        first, before = load(url, cases[:1], 1, 0.2).latencies, processor_seconds(process)
        result = summary(load(url, cases, clients, seconds), cases, seconds)
        used = 1000 * (processor_seconds(process) - before) / max(1, result["requests"])
        found[name] = {"first_answer_ms": 1000 * first[0] if first else None, "cpu_ms": used, **result}
        print(f"{name}: {result['requests_per_second']:.0f} requests/s, {used:.1f} ms of CPU each", flush=True)
    return found


def processor_seconds(process: psutil.Process | None) -> float:
    """Of a process and everything that it has started and that still lives."""
    total = 0.0
    for one in [process, *process.children(recursive=True)] if process else []:
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            total += times.user + times.system
    return total


@contextlib.contextmanager
def server(command: list[str], folder: Path = ROOT, models: Sequence[str] = MODELS) -> Iterator[tuple[str, psutil.Process]]:
    """A server as a child process in a checkout, on a free port that `command` takes with --port; ends with the context."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = psutil.Popen([sys.executable, *command, "--port", str(port)], cwd=folder)
    try:
        for model in models:
            wait(f"http://127.0.0.1:{port}/v1/models/{model}", process)
        yield f"http://127.0.0.1:{port}", process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(120)
            except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
                process.kill()


def wait(url: str, process: psutil.Process, seconds: float = 300) -> None:
    import urllib.request

    end = time.perf_counter() + seconds
    while time.perf_counter() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise RuntimeError(f"The server did not start within {seconds} s.")


def kill_a_replica(process: psutil.Process) -> None:
    """SIGKILL to one process of Ray that holds the flow."""
    replicas = [
        child for child in process.children(recursive=True) if "ServeReplica:models:mnist-flow" in " ".join(child.cmdline())
    ]
    os.kill(replicas[0].pid, signal.SIGKILL)


def bare(models: Path, port: int) -> None:
    """The least that answers the same requests: one process, no limits, no checks, no second replica."""
    import tensorflow as tf
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    loaded = {name: tf.saved_model.load(str(models / name / "1")) for name in MODELS}

    def run(name: str, content: dict[str, Any]) -> bytes:
        function = loaded[name].signatures[content["signature_name"]]
        specs = function.structured_input_signature[1]
        value = content.get("instances", content.get("inputs"))
        values = value if isinstance(value, dict) else {next(iter(specs)): value}
        outputs = function(**{key: tf.constant(values[key], specs[key].dtype) for key in specs})
        lists = {key: array.numpy().tolist() for key, array in outputs.items()}
        only = next(iter(lists.values()))
        if "inputs" in content:
            return json.dumps({"outputs": only}).encode()
        rows = only if len(lists) == 1 else [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
        return json.dumps({"predictions": rows}).encode()

    def predict(name: str) -> Any:
        async def answer(request: Request) -> Response:
            return Response(run(name, json.loads(await request.body())), media_type="application/json")

        return Route(f"/v1/models/{name}:predict", answer, methods=["POST"])

    async def ready(_: Request) -> Response:
        return JSONResponse({})

    routes = [*map(predict, loaded), *(Route(f"/v1/models/{name}", ready) for name in loaded)]
    uvicorn.run(Starlette(routes=routes), port=port, log_level="error")


def batched(folders: list[str], port: int) -> None:
    """`examples/serve.py` with the rows of concurrent requests in one call of TensorFlow, for models with one signature."""
    # For the processes that Ray starts, and, as `serve.main` has it, before Ray is imported.
    os.environ |= {"PYTHONPATH": str(ROOT / "examples"), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    sys.path.insert(0, str(ROOT / "examples"))
    from ray import serve as ray_serve

    import protocol
    import serve

    class Batched(serve.Model):
        async def __call__(self, what: str, version: str, body: bytes = b"") -> tuple[int, bytes]:
            if what != "predict":
                return await super().__call__(what, version, body)
            try:
                served = next(iter(self.served.values()))
                request = protocol.parse(body, served.inputs, self.max_batch)
                return 200, protocol.answer(request, await self.together((served, request)))
            except protocol.RequestError as error:
                return error.answer()

        @ray_serve.batch(max_batch_size=16, batch_wait_timeout_s=0.002)
        async def together(self, pairs: list[Any]) -> list[dict[str, np.ndarray]]:
            served, first = pairs[-1]
            inputs = {key: np.concatenate([request.inputs[key] for _, request in pairs]) for key in first.inputs}
            outputs = await asyncio.to_thread(served.run, first._replace(inputs=inputs))
            ends = np.cumsum([len(next(iter(request.inputs.values()))) for _, request in pairs])[:-1]
            parts = {key: np.split(array, ends) for key, array in outputs.items()}
            return [{key: parts[key][number] for key in parts} for number in range(len(pairs))]

    serve.Model = Batched
    sys.argv = ["serve.py", *folders, "--port", str(port)]
    serve.main()


def _close(received: Any, expected: Any) -> bool:
    """Equal up to the rounding of another number of threads."""
    if isinstance(expected, dict):
        return set(received) == set(expected) and all(_close(received[key], expected[key]) for key in expected)
    if isinstance(expected, list) and expected and isinstance(expected[0], dict):
        return len(received) == len(expected) and all(map(_close, received, expected))
    return np.shape(received) == np.shape(expected) and np.allclose(received, expected, rtol=1e-3, atol=1e-3, equal_nan=True)


def show(servers: dict[str, Any]) -> None:
    rows = []
    for label, cases in servers.items():
        for name, case in cases.items():
            numbers = [f"{case['requests_per_second']:.0f}", *(f"{case[f'p{q}_ms']:.0f}" for q in (50, 99, 100))]
            counts = [str(case["wrong"]), str(sum(case["failed"].values())), str(case["sent_again"] or 0)]
            rows.append([label, name, *numbers, f"{case['cpu_ms']:.1f}" if case.get("cpu_ms") else "", *counts])
    heads = ["server", "case", "requests/s", "p50 ms", "p99 ms", "longest", "CPU ms", "wrong", "failed", "sent again"]
    print("\n" + cli.table(heads, rows))


def compare(asked: dict[str, list[Question]], arguments: argparse.Namespace) -> dict[str, Any]:
    """The bare handler, the former server if its checkout is given, and Ray Serve."""
    servers, load_settings = {}, (arguments.clients, arguments.seconds)
    folders = [str(arguments.models / name) for name in MODELS]
    with server(["-m", "benchmarks.serving", "bare", "--models", str(arguments.models)]) as (url, process):
        servers["bare Starlette"] = measure(url, asked, *load_settings, process)
    every = [question for cases in asked.values() for question in cases]
    counts = (2,) if arguments.quick else (1, 2)
    for replicas in counts if arguments.old else ():
        with server(["examples/serve.py", *folders, "--replicas", str(replicas)], arguments.old) as (url, process):
            servers[f"former server, {replicas} processes"] = measure(url, asked, *load_settings, process)
    for replicas in counts:
        with server(["examples/serve.py", *folders, "--replicas", str(replicas)]) as (url, process):
            servers[label := f"Ray Serve, {replicas} replicas"] = measure(url, asked, *load_settings, process)
            if replicas == 2:
                tally = load(url, every, arguments.clients, arguments.kill_seconds, lambda: kill_a_replica(process))
                servers[label]["all, one killed"] = summary(tally, every, arguments.kill_seconds)
    return servers


def compare_batching(asked: dict[str, list[Question]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Digits with one replica, one row to a request, few clients and many; each server twice."""
    servers: dict[str, Any] = {}
    folder, digits = str(arguments.models / "digits"), {"digits": asked["digits"]}
    commands = {
        "one by one": ["examples/serve.py", folder],
        "@serve.batch": ["-m", "benchmarks.serving", "batched", "--models", str(arguments.models)],
    }
    for label in ("one by one", "@serve.batch", "@serve.batch, again", "one by one, again"):  # the machine may change its speed
        with server(commands[label.removesuffix(", again")], models=["digits"]) as (url, process):
            for clients in (arguments.clients, 4 * arguments.clients):
                servers[f"{label}, {clients} clients"] = measure(url, digits, clients, arguments.seconds, process)
    return servers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_arguments(parser, "serving", quick="a second each, one replica")
    parser.add_argument("what", nargs="?", default="all", choices=("all", "batch", "bare", "batched"), metavar="batch")
    parser.add_argument(
        "--models", type=Path, default=ROOT / "saved_models", metavar="FOLDER", help="has digits/ and mnist-flow/"
    )
    parser.add_argument("--clients", type=cli.positive, default=8)
    parser.add_argument("--seconds", type=cli.positive_number, default=8.0, help="for each case (default: %(default)s)")
    parser.add_argument(
        "--kill-seconds", type=cli.positive_number, default=60.0, help="with a replica killed (default: %(default)s)"
    )
    parser.add_argument("--old", type=Path, metavar="CHECKOUT", help="of commit 591384b, with the former server")
    parser.add_argument("--url", help="a server that runs already, with the same models")
    parser.add_argument("--label", default="other", help="its name in the table")
    parser.add_argument("--port", type=cli.positive, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.models = arguments.models.resolve()
    if arguments.what == "bare":  # this and the next one are started by the others
        return bare(arguments.models, arguments.port)
    if arguments.what == "batched":
        return batched([str(arguments.models / "digits")], arguments.port)
    if arguments.quick:
        arguments.clients, arguments.seconds, arguments.kill_seconds = 2, 1.0, 4.0
    asked = questions(arguments.models)
    if arguments.url:
        path = arguments.output or report.RESULTS / "serving.json"
        servers = json.loads(path.read_text()).get("servers", {}) if path.exists() else {}
        servers[arguments.label] = measure(arguments.url.rstrip("/"), asked, arguments.clients, arguments.seconds)
    elif arguments.what == "batch":
        arguments._name, servers = "serving-batch", compare_batching(asked, arguments)
    else:
        servers = compare(asked, arguments)
    show(servers)
    busy = [round(value, 1) for value in os.getloadavg()]
    settings = {key: getattr(arguments, key) for key in ("clients", "seconds", "kill_seconds")}
    report.write(arguments, {"settings": settings, "load_average_at_the_end": busy, "servers": servers})


if __name__ == "__main__":
    main()
