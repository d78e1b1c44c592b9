"""Load on examples/serve.py, with a replica killed in the middle: requests per second, what was lost, and memory.

    python -m benchmarks.serving                      # exports a classifier and a flow and serves them; three minutes
    python -m benchmarks.serving saved_models/*/      # the same for models of your own
    python -m benchmarks.serving --quick              # a smoke run

Needs `pip install 'keras-auxref[serve]'`. Clients in threads ask every signature in turn, as fast as they are answered, over
connections that they keep for 100 requests. They stop after --requests or --seconds, whichever comes first. After a quarter of
either, one replica gets SIGKILL. A client asks again, up to five times, when its connection breaks or the server answers 503; a
request is lost when no answer came after that, or another one than the SavedModel gives in this process. Clients, server and
this check share the machine. Everything stays on the loopback interface. Writes a JSON file and prints a table.
"""

import argparse
import http.client
import json
import os
import signal
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from examples.server import protocol
from examples.server.model import SavedModel, latest_version
from examples.server.process import Server
from experiments.harness import cli

KEEP, ATTEMPTS, TIMEOUT = 100, 5, 30
WARM_UP_SHARE, KILL_SHARE = 0.05, 0.25


@dataclass
class Question:
    """A request, ready to be sent, and what has to come back."""

    path: str
    body: bytes
    rows: bool
    outputs: dict[str, np.ndarray]

    def answered_by(self, body: bytes) -> bool:
        """Whether an answer is right, up to the rounding of another number of threads."""
        expected = json.loads(protocol.answer(protocol.Request("", {}, self.rows), self.outputs))
        try:
            return _close(json.loads(body), expected)
        except ValueError:
            return False


@dataclass
class Tally:
    """What happened to the requests."""

    latencies: list[tuple[float, float]] = field(default_factory=list)
    retries: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    answers: dict[tuple[int, bytes], int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


def export(folder: Path) -> list[Path]:
    """An untrained classifier and an untrained flow, as large as those of the examples: weights do not change the time."""
    import keras

    from keras_auxref import AuxReflection, Glow, export_saved_model

    keras.utils.set_random_seed(0)
    layers = [AuxReflection(), keras.layers.ReLU(), AuxReflection(), keras.layers.Dense(10)]
    classifier = keras.Sequential([keras.Input((64,), name="x"), *layers])
    flow = Glow((8, 8, 3), levels=2, steps=2, hidden=16, mixing="aux_relaxed_cayley")
    flow.fit(np.random.default_rng(0).integers(0, 256, (32, 8, 8, 3), dtype="uint8"), batch_size=32, epochs=1, verbose=0)
    export_saved_model(classifier, folder / "digits", outputs="logits")
    export_saved_model(flow, folder / "flow")
    return [folder / "digits", folder / "flow"]


def questions(folders: list[Path], rows: int = 4, variants: int = 4) -> list[Question]:
    """For every signature a few requests, with the answers of the SavedModel in this process."""
    generator, found = np.random.default_rng(0), []
    for folder in folders:
        model = SavedModel(folder, latest_version(folder))
        for name, signature in model.signatures.items():
            for seed in range(variants):
                inputs = {}
                for key, spec in signature.inputs.items():
                    shape = tuple(rows if size is None else size for size in spec.shape or ())
                    whole = {"n": rows, "seed": seed}.get(key, 1)
                    inputs[key] = np.asarray(generator.uniform(size=shape) if shape else whole, spec.dtype)
                by_rows = all(array.ndim for array in inputs.values())
                columns = {key: array.tolist() for key, array in inputs.items()}
                value = (
                    [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)] if by_rows else columns
                )
                body = json.dumps({"signature_name": name, "instances" if by_rows else "inputs": value}).encode()
                outputs = model.run(protocol.Request(name, inputs, by_rows))
                found.append(Question(f"/v1/models/{folder.name}:predict", body, by_rows, outputs))
    return found


def load(
    server: Server, asked: list[Question], clients: int, requests: int, seconds: float, tally: Tally, at: Any = None
) -> float:
    """Ask `requests` questions, or for `seconds`; `at(share)` is called now and then with the share that is over."""
    numbers, started = iter(range(requests)), time.perf_counter()

    def client() -> None:
        connection: http.client.HTTPConnection | None = None
        while time.perf_counter() - started < seconds:
            with tally.lock:
                number = next(numbers, None)
            if number is None:
                break
            if number % KEEP == 0 and connection is not None:
                connection.close()
                connection = None
            which, begun, reason = number % len(asked), time.perf_counter(), ""
            for attempt in range(ATTEMPTS):
                time.sleep(0.05 * 2**attempt if attempt else 0)
                try:
                    connection = connection or http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT)
                    connection.request("POST", asked[which].path, asked[which].body, {"Content-Type": "application/json"})
                    response = connection.getresponse()
                    status, body = response.status, response.read()
                    reason = "" if status == 200 else str(status)
                except (OSError, http.client.HTTPException) as error:
                    status, reason, connection = 503, type(error).__name__, None
                if status != 503:
                    break
                with tally.lock:
                    tally.retries[reason] = tally.retries.get(reason, 0) + 1
            now = time.perf_counter()
            with tally.lock:
                if reason:
                    tally.failures.append(reason)
                else:
                    tally.latencies.append((now - started, now - begun))
                    tally.answers[which, body] = tally.answers.get((which, body), 0) + 1

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.05)
        if at is not None:
            at(max((time.perf_counter() - started) / seconds, len(tally.latencies) / requests))
    return time.perf_counter() - started


def measure(folders: list[Path], arguments: argparse.Namespace) -> dict[str, Any]:
    asked = questions(folders)
    begun = time.perf_counter()
    with Server(folders, arguments.replicas) as server:
        server.wait_ready(arguments.replicas)
        result: dict[str, Any] = {"start_seconds": time.perf_counter() - begun}
        warm = max(len(asked), int(WARM_UP_SHARE * arguments.requests))
        load(server, asked, arguments.clients, warm, arguments.seconds / 4, Tally())
        before, samples, killed = server.memory(), [], []
        tally, begun = Tally(), time.perf_counter()

        def at(share: float) -> None:
            if not samples or time.perf_counter() - begun - samples[-1][0] > 0.5:
                samples.append((time.perf_counter() - begun, sum(server.memory().values())))
            if share > KILL_SHARE and not killed:
                killed.append((server.replicas()[0], time.perf_counter() - begun))
                os.kill(killed[0][0], signal.SIGKILL)

        elapsed = load(server, asked, arguments.clients, arguments.requests, arguments.seconds, tally, at)
        recovered = server.wait_ready(arguments.replicas + 1) - begun
        load(server, asked, arguments.clients, warm, arguments.seconds / 4, Tally())
        after = server.memory()
        result["stop_seconds"] = server.stop()
        result["processes_left"] = len(server.left())
    wrong = sum(count for (which, body), count in tally.answers.items() if not asked[which].answered_by(body))
    kept = sorted(set(before) & set(after))
    moment = killed[0][1]
    phases = {"before the kill": (0.0, moment), "one replica less": (moment, recovered), "after recovery": (recovered, elapsed)}
    return {
        **result,
        "seconds": elapsed,
        "requests": len(tally.latencies) + len(tally.failures),
        "requests_per_second": len(tally.latencies) / elapsed,
        "lost": len(tally.failures) + wrong,
        "wrong_answers": wrong,
        "failures": tally.failures[:10],
        "retries": tally.retries,
        "latency_ms": _percentiles([latency for _, latency in tally.latencies]),
        "phases": {name: _phase(tally, *span) for name, span in phases.items() if min(span[1], elapsed) - span[0] > 0.5},
        "killed_at_second": moment,
        "recovery_seconds": recovered - moment,
        "memory_mb": {
            "all_processes_after_warm_up": sum(before.values()),
            "all_processes_at_the_end": sum(after.values()),
            "surviving_processes_after_warm_up": [before[pid] for pid in kept],
            "surviving_processes_at_the_end": [after[pid] for pid in kept],
            "over_time": [[round(t, 1), round(total)] for t, total in samples[:: max(1, len(samples) // 40)]],
        },
    }


def _phase(tally: Tally, start: float, end: float) -> dict[str, float]:
    latencies = [latency for moment, latency in tally.latencies if start <= moment < end]
    last = min(end, max(moment for moment, _ in tally.latencies))
    return {"requests_per_second": len(latencies) / (last - start), **_percentiles(latencies)}


def _percentiles(latencies: list[float]) -> dict[str, float]:
    if not latencies:
        return {}
    return {f"p{q}": 1000 * float(np.percentile(latencies, q)) for q in (50, 99, 100)}


def _close(received: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return set(received) == set(expected) and all(_close(received[key], expected[key]) for key in expected)
    if isinstance(expected, list) and expected and isinstance(expected[0], dict):
        return len(received) == len(expected) and all(map(_close, received, expected))
    if isinstance(expected, str):
        return received == expected
    return np.shape(received) == np.shape(expected) and np.allclose(received, expected, rtol=1e-3, atol=1e-4, equal_nan=True)


def show(result: dict[str, Any]) -> None:
    rows = [["whole run", f"{result['requests_per_second']:.0f}", *(f"{v:.1f}" for v in result["latency_ms"].values())]]
    for name, phase in result["phases"].items():
        rate, *latencies = phase.values()
        rows.append([name, f"{rate:.0f}", *(f"{v:.1f}" for v in latencies)])
    print("\n" + cli.table(["", "requests/s", "p50 ms", "p99 ms", "longest ms"], rows))
    memory = result["memory_mb"]
    print(f"\n{result['requests']} requests, {result['lost']} lost, sent again: {result['retries'] or 'none'}")
    print(
        f"start {result['start_seconds']:.1f} s, recovery {result['recovery_seconds']:.1f} s, stop {result['stop_seconds']:.1f} s"
    )
    ends = (memory["all_processes_after_warm_up"], memory["all_processes_at_the_end"])
    print(f"memory after warm-up {ends[0]:.0f} MB, at the end {ends[1]:.0f} MB; processes left over: {result['processes_left']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="FOLDER", help="models to serve (default: two that are made here)"
    )
    report.add_arguments(parser, "serving", quick="few requests")
    parser.add_argument("--replicas", type=cli.positive, default=2)
    parser.add_argument("--clients", type=cli.positive, default=8)
    parser.add_argument("--requests", type=cli.positive, default=30000, help="at most (default: %(default)s)")
    parser.add_argument("--seconds", type=cli.positive_number, default=90.0, help="at most (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.clients, arguments.requests, arguments.seconds = 2, 200, 10.0
    with tempfile.TemporaryDirectory() as temporary:
        folders = [folder.resolve() for folder in arguments.folders] or export(Path(temporary))
        measured = measure(folders, arguments)
    show(measured)
    settings = {key: getattr(arguments, key) for key in ("replicas", "clients", "requests", "seconds")}
    report.write(arguments, {"models": [folder.name for folder in folders], "settings": settings, **measured})


if __name__ == "__main__":
    main()
