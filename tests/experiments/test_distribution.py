"""Training over two real processes on loopback: the weights of one process, a lost process, and going on afterwards."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from experiments.harness import distribution

SCRIPT, ROOT = Path(__file__).with_name("in_a_process.py"), Path(__file__).parents[2]
LIMIT = 900.0  # of all processes of a run; compiling takes most of it


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(folder: Path, processes: int, *arguments: str) -> list[tuple[int, str]]:
    """The exit code and output of every process; none of them outlives the limit."""
    port, started, deadline = free_port(), [], time.monotonic() + LIMIT
    folder.mkdir(exist_ok=True)
    try:
        for identity in range(processes):
            environment = {
                **os.environ,
                "KERAS_BACKEND": "jax",
                "JAX_PLATFORMS": "cpu",
                "JAX_ENABLE_X64": "1",
                # Who goes on compiles what was compiled before.
                "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "PYTHONPATH": str(ROOT),
                distribution.ADDRESSES: f"127.0.0.1:{port}",
                distribution.NUMBER: str(processes),
                distribution.IDENTITY: str(identity),
            }
            log = (folder / f"{identity}.log").open("w+")
            command = [sys.executable, str(SCRIPT), str(folder), *arguments]
            started.append((subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT), log))
        codes = [process.wait(max(1.0, deadline - time.monotonic())) for process, _ in started]
    finally:
        for process, _ in started:
            process.kill()
            process.wait()
    texts = []
    for _, log in started:
        log.seek(0)
        texts.append(log.read())
        log.close()
    return list(zip(codes, texts, strict=True))


@pytest.mark.slow
def test_two_processes_train_as_one_and_go_on_after_a_loss(tmp_path):
    pytest.importorskip("jax")
    [(code, text)] = run(tmp_path / "one", 1, "3")
    assert code == 0, text[-2000:]
    (lost, text), (died, _) = run(tmp_path / "two", 2, "3", "2")
    assert died == 3
    assert lost == distribution.EXIT_CODE, text[-2000:]
    assert "another process has died or hangs" in text
    for code, text in run(tmp_path / "two", 2, "3"):
        assert code == 0, text[-2000:]
        assert "rnn from epoch 2" in text
    for folder in (tmp_path / "two", tmp_path / "two" / "process-1"):
        for name in ("rnn", "glow"):
            one, two = (np.load(where / f"{name}.npz") for where in (tmp_path / "one", folder))
            assert one.files == two.files
            for key in one.files:
                np.testing.assert_allclose(two[key], one[key], rtol=1e-6, atol=1e-6)


def test_distribution_needs_jax(monkeypatch):
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    with pytest.raises(SystemExit, match=r"Expected --backend jax\. Received: tensorflow"):
        distribution.choose_backend(None, distribute=True)


def test_every_process_has_a_folder_of_its_own(monkeypatch):
    assert distribution.folder(Path("runs")) == Path("runs")
    monkeypatch.setenv(distribution.IDENTITY, "2")
    assert distribution.folder(Path("runs")) == Path("runs/process-2")
