"""examples/serve.py as a child process, for its test and its benchmark: start, replicas, memory, stop, and what is left."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[1] / "serve.py"
READY = re.compile(r"Replica (\d+) is ready")


class Server:
    """The server on a free port of the loopback interface, as a context that ends with every process of it ended."""

    def __init__(self, folders: Sequence[Path], replicas: int = 2, options: Sequence[str] = ()) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        command = [
            sys.executable,
            str(SCRIPT),
            *map(str, folders),
            "--port",
            str(self.port),
            "--replicas",
            str(replicas),
            *options,
        ]
        self.output: list[str] = []
        self._ready: list[tuple[int, float]] = []
        self._seen: set[int] = set()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            self._ready += [(int(pid), time.perf_counter()) for pid in READY.findall(line)]

    def wait_ready(self, count: int, seconds: float = 300) -> float:
        """Wait until `count` replicas have started, dead ones included, and the port is open; returns the moment of the last."""
        end = time.perf_counter() + seconds
        while len(self._ready) < count or not self._answers():
            if time.perf_counter() > end or self.process.poll() is not None:
                raise RuntimeError(f"Expected {count} replicas, {len(self._ready)} started:\n{''.join(self.output[-30:])}")
            time.sleep(0.02)
        return self._ready[count - 1][1]

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def replicas(self) -> list[int]:
        """The process ids of those that are alive."""
        return [pid for pid, _ in self._ready if pid in self.memory()]

    def memory(self) -> dict[int, float]:
        """Resident megabytes of every process of the server."""
        import psutil

        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            for process in [parent, *parent.children(recursive=True)]:
                # It may end between the list and the question.
                with contextlib.suppress(psutil.NoSuchProcess):
                    found[process.pid] = process.memory_info().rss / 2**20
        self._seen |= set(found)
        return found

    def stop(self, number: int = signal.SIGTERM, seconds: float = 60) -> float:
        """Stop it as an operator would; returns how long it took."""
        self.memory()
        started = time.perf_counter()
        self.process.send_signal(number)
        self.process.wait(seconds)
        return time.perf_counter() - started

    def left(self, seconds: float = 5) -> list[int]:
        """Processes of the server that are alive some seconds after its end."""
        end = time.perf_counter() + seconds
        while (alive := [pid for pid in self._seen if _alive(pid)]) and time.perf_counter() < end:
            time.sleep(0.1)
        return alive

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: Any) -> None:
        self.memory()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pid in self.left(2):
            os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
