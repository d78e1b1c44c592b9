"""Processes that time steps when asked: what cannot share a process, such as two backends, can still take turns.

A program of its own, `python -m benchmarks.something --worker …`, makes its steps and calls `serve`. The one that asks holds a
`Worker` for each and times them in rounds, so that the noise of a shared machine meets them all.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

READY, MARK = "ready", "@@"


def serve(steps: Mapping[str, Callable[[], Any]], **more: Any) -> None:
    """In the worker: runs every step once, tells how long that took, then answers until its input ends.

    A step returns when its work is done. `more` is told beside the times of the first calls.
    """
    first = {name: _seconds(step, 1) for name, step in steps.items()}
    _say({READY: first, **more})
    for line in sys.stdin:
        name, count = json.loads(line)
        _say(_seconds(steps[name], count))


class Worker:
    """A process on some of the cores, by default on all that this one has."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], cores: set[int] | None = None):
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
        )

    def ready(self) -> dict[str, Any]:
        """Waits for the first calls, and returns what the worker tells of them."""
        return self._answer()

    def ask(self, name: str, count: int = 1) -> None:
        """Starts a step, so many times."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps([name, count]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> float:
        """Seconds of one of the steps asked for."""
        return float(self._answer())

    def _answer(self) -> Any:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise SystemExit(f"a worker ended with exit code {self.process.wait()}: {self.process.args}")


def rounds(candidates: Mapping[str, tuple[Sequence[Worker], str]], number: int, count: int = 1) -> dict[str, dict[str, float]]:
    """Median and minimum seconds of every candidate: a step that its workers do together, timed by the slowest of them."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order = random.Random(0)
    for _ in range(number + 1):
        for name in order.sample(list(candidates), len(candidates)):
            workers, step = candidates[name]
            for worker in workers:
                worker.ask(step, count)
            times[name].append(max(worker.answer() for worker in workers))
    # The first round warms up.
    return {
        name: {"median_seconds": statistics.median(t[1:]), "min_seconds": min(t[1:]), "rounds": number}
        for name, t in times.items()
    }


def close(processes: Sequence[Worker]) -> None:
    """Ends workers: all are told before one is waited for, because some wait for each other."""
    for worker in processes:
        assert worker.process.stdin
        worker.process.stdin.close()
    for worker in processes:
        try:
            worker.process.wait(60)
        except subprocess.TimeoutExpired:
            worker.process.kill()


def _seconds(step: Callable[[], Any], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - started) / count


def _say(what: Any) -> None:
    print(MARK + json.dumps(what), flush=True)
