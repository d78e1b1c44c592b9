"""The examples are scripts: their shared package is found beside them, as when one is run."""

import os
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
