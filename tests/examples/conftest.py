"""The examples are scripts: their shared package is found beside them, as when one is run."""

import contextlib
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture
def example(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs an example in an empty folder, as a user would."""

    def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(EXAMPLES / script), *arguments]
        # A crash in compiled code then tells where it was.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONFAULTHANDLER": "1", **variables}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    return run


@pytest.fixture
def example_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.CompletedProcess]:
    """The same in this process, which has TensorFlow already: for runs of some length."""

    def run(script: str, *arguments: str) -> subprocess.CompletedProcess:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / script), *arguments])
        stdout, stderr, code = io.StringIO(), io.StringIO(), None
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                runpy.run_path(str(EXAMPLES / script), run_name="__main__")
            except SystemExit as end:
                code = end.code
        if isinstance(code, str):
            stderr.write(f"{code}\n")
            code = 1
        return subprocess.CompletedProcess([script, *arguments], code or 0, stdout.getvalue(), stderr.getvalue())

    return run
