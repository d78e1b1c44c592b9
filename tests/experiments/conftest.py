"""Experiments as a user runs them, `python -m experiments.fcnn …`, in an empty folder."""

import contextlib
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def experiment(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs an experiment in a process of its own."""

    def run(name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", f"experiments.{name}", *arguments]
        path = os.pathsep.join([*filter(None, [variables.pop("PYTHONPATH", "")]), str(ROOT)])
        # A crash in compiled code then tells where it was.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": path, **variables}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200)

    return run


@pytest.fixture
def experiment_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.CompletedProcess]:
    """The same in this process, which has TensorFlow already: for runs of some length."""

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(ROOT / "experiments" / f"{name}.py"), *arguments])
        stdout, stderr, code = io.StringIO(), io.StringIO(), None
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                runpy.run_path(str(ROOT / "experiments" / f"{name}.py"), run_name="__main__")
            except SystemExit as end:
                code = end.code
        if isinstance(code, str):
            stderr.write(f"{code}\n")
            code = 1
        return subprocess.CompletedProcess([name, *arguments], code or 0, stdout.getvalue(), stderr.getvalue())

    return run
