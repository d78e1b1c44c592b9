"""The load test of serving, on the bare handler that it compares with: a smoke run, without Ray."""

import json
import os
import subprocess
import sys

import pytest

from tests.examples.conftest import EXAMPLES

pytest.importorskip("starlette", reason="pip install -e '.[serve]'")
pytest.importorskip("uvicorn", reason="pip install -e '.[serve]'")
serving = pytest.importorskip("benchmarks.serving", reason="pip install psutil")
ROOT = EXAMPLES.parent


@pytest.mark.slow
def test_a_server_that_runs_already_is_added_to_the_results(tmp_path):
    output = tmp_path / "serving.json"
    output.write_text(json.dumps({"servers": {"before": {}}}))
    with serving.server(["-m", "benchmarks.serving", "bare", "--models", "saved_models"]) as (url, _):
        command = [
            sys.executable,
            "-m",
            "benchmarks.serving",
            "--quick",
            "--url",
            url,
            "--label",
            "bare",
            "--output",
            str(output),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    servers = json.loads(output.read_text())["servers"]
    assert list(servers) == ["before", "bare"]
    assert set(servers["bare"]) == {"digits", "log_prob", "sample"}
    for case in servers["bare"].values():
        assert case["requests"] > 0
        assert case["wrong"] == 0
        assert case["failed"] == {}
    assert str(tmp_path) not in output.read_text()


def test_a_wrong_answer_is_seen():
    question = serving.Question("", b"", "predictions", [{"class": 3, "probabilities": [0.25, 0.75]}])
    assert question.answered_by(b'{"predictions": [{"class": 3, "probabilities": [0.25001, 0.75]}]}')
    for body in (
        b'{"predictions": [{"class": 3, "probabilities": [0.35, 0.75]}]}',
        b'{"predictions": [{"class": 3}]}',
        b'{"predictions": []}',
        b'{"outputs": [{"class": 3, "probabilities": [0.25, 0.75]}]}',
        b'{"error": "no"}',
        b"[",
        b"",
    ):
        assert not question.answered_by(body), body
