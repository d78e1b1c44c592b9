"""The examples are scripts. pytest's `pythonpath` has their folder, as Python has when one is run."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs an example in a process of its own, in an empty folder."""

    def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(EXAMPLES / script), *arguments]
        # A crash in compiled code then tells where it was.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONFAULTHANDLER": "1", **variables}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200)

    return run
