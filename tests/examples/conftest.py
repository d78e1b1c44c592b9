"""The examples are scripts. Tests run them as processes, or load one by its path as Python does: its folder is on `sys.path`."""

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@functools.cache
def load(name: str) -> ModuleType:
    """The script `examples/NAME.py` as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLES))
    return module


@pytest.fixture
def example(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs an example in a process of its own, in an empty folder."""

    def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(EXAMPLES / script), *arguments]
        # A crash in compiled code then tells where it was.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONFAULTHANDLER": "1", **variables}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200)

    return run
