"""The whole server on Ray, started once: every step below in one test. Another test has a cluster of two nodes.

python -m pytest -m cluster -n 0 -s        by hand; -s shows what was counted and measured
"""

import contextlib
import fcntl
import http.client
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.examples import nginx
from tests.examples.conftest import EXAMPLES
from tests.examples.models import call, closed, write_classifier, write_flow, write_gate

pytest.importorskip("ray", reason="pip install -e '.[serve]'")
psutil = pytest.importorskip("psutil")

pytestmark = pytest.mark.cluster
PREDICT, ROW = "/v1/models/digits:predict", [[0.01] * 64]
START_SECONDS, BACK_SECONDS = 400, 240
"""A loaded machine takes its time."""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def until(condition, seconds):
    """Wait for something to become true; returns whether it did."""
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.2)
    return met


def probabilities(version):
    """What version `version` of the classifier answers to `ROW`, by NumPy."""
    logits = np.full((1, 64), 0.01) @ (version * np.linspace(-1, 1, 640).reshape(64, 10))
    return (np.exp(logits) / np.exp(logits).sum())[0]


class Server:
    """`examples/serve.py` as a child process, with everything that it started."""

    def __init__(self, folders, *options, **variables):
        self.port = free_port()
        command = [sys.executable, str(EXAMPLES / "serve.py"), *map(str, folders), "--port", str(self.port), *options]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", **variables}
        self.process = psutil.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.output, self.seen = [], set()
        self.reader = threading.Thread(target=lambda: self.output.extend(self.process.stdout), daemon=True)
        self.reader.start()

    def ready(self):
        """Whether it says that it serves, which is after every signature of every replica has been called once."""
        assert until(lambda: self.process.poll() is not None or any("Serving" in line for line in self.output), START_SECONDS)
        assert self.process.poll() is None, "".join(self.output)

    def memory(self):
        """Bytes in use by all of its processes, those that are shared counted for each."""
        total = 0
        for process in [self.process, *self.children()]:
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue
        return total

    def children(self):
        found = self.process.children(recursive=True) if self.process.is_running() else []
        self.seen |= set(found)
        return found

    def replicas(self, name):
        found = []
        for child in self.children():
            try:
                found += [child.pid] if f"ServeReplica:models:{name}" in " ".join(child.cmdline()) else []
            except psutil.Error:
                continue
        return found

    def end(self, number=signal.SIGTERM, seconds=120):
        """Stop it; returns the processes that are left ten seconds later."""
        self.children()
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(seconds)
        return psutil.wait_procs(self.seen, timeout=15)[1]

    def kill(self):
        self.children()
        for process in [self.process, *self.seen]:
            try:
                process.kill()
            except psutil.Error:
                continue


@pytest.fixture(autouse=True)
def _one_at_a_time():
    """Two of Ray on two cores would only wait for each other."""
    with open(Path(tempfile.gettempdir()) / "keras-auxref-ray.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def models(tmp_path):
    root = tmp_path / "models"
    write_classifier(root / "digits", 2)
    write_flow(root / "flow")
    write_gate(root / "gate", tmp_path / "file")
    return root


@pytest.fixture
def server(models):
    folders = [models / name for name in ("digits", "flow", "gate")]
    running = Server(folders, "--replicas", "2", "--keep", "2", "--max-batch", "16", "--seconds", "200")
    try:
        running.ready()
        yield running
    finally:
        running.kill()


@contextlib.contextmanager
def load(clients, ask):
    """`clients` threads call `ask` again and again; yields a count of what it returns."""
    found, stop = Counter(), threading.Event()

    def client():
        while not stop.is_set():
            found[ask()] += 1

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(client) for _ in range(clients)]
        try:
            yield found
        finally:
            stop.set()
        for done in running:
            done.result()


def version_that_answers(port, known):
    """Which version of the classifier has answered, by its numbers, or what came instead."""
    status, answer = call(port, PREDICT, {"instances": ROW})
    if status == 200:
        received = answer["predictions"][0]["probabilities"]
        answer = next((version for version in known if np.allclose(received, probabilities(version), 1e-3)), received)
    return answer if answer in known else (status, str(answer)[:100])


def the_first_requests(server):
    """How long the first request of every signature takes, and the second one: no test, but a figure to look at."""
    image = np.zeros((1, 4, 4, 3)).tolist()
    for name, inputs in {
        "log_prob": image,
        "encode": image,
        "decode": np.zeros((1, 48)).tolist(),
        "sample": {"n": 4, "seed": 1, "temperature": 1},
    }.items():
        took = []
        for _ in range(4):
            begun = time.perf_counter()
            assert call(server.port, "/v1/models/flow:predict", {"signature_name": name, "inputs": inputs})[0] == 200
            took.append(time.perf_counter() - begun)
        print(f"{name}: " + ", ".join(f"{1000 * seconds:.0f}" for seconds in took) + " ms")


def answers_in_both_formats_and_by_version(server):
    for path in (PREDICT, "/v1/models/digits/versions/2:predict"):
        status, answer = call(server.port, path, {"instances": ROW})
        assert status == 200
        np.testing.assert_allclose(answer["predictions"][0]["probabilities"], probabilities(2), rtol=1e-4)
    assert set(call(server.port, PREDICT, {"inputs": {"x": ROW}})[1]["outputs"]) == {"class", "probabilities"}
    outside = np.full((1, 4, 4, 3), 9).tolist()
    assert call(server.port, "/v1/models/flow:predict", {"inputs": outside}) == (200, {"outputs": [-math.inf]})
    status, answer = call(server.port, "/v1/models/digits")
    assert (status, answer["model_version_status"][0]["version"]) == (200, "2")
    headers = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl sends
    assert call(server.port, PREDICT, {"instances": ROW}, headers=headers)[0] == 200


def only_this_machine_reaches_it(server):
    """Its port and those of Ray, except for one of each replica, which asks for the token."""
    open_to_all = []
    for process in [server.process, *server.children()]:
        with contextlib.suppress(psutil.Error):
            listening = [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            open_to_all += [process.name() for address in listening if "127.0.0.1" not in address.ip]
    assert len(open_to_all) <= 7, open_to_all  # two replicas of three models, and the gateway


def the_client_of_the_examples(server, example):
    done = example("client.py", "digits", "flow", "--url", f"http://127.0.0.1:{server.port}")
    assert done.returncode == 0, done.stderr
    assert "sample(n=16, seed=1, temperature=0.7)" in done.stdout


SAMPLE = {"n": 17, "seed": 1, "temperature": 1}
REFUSALS = [
    (400, PREDICT, b"{", None),
    (400, PREDICT, b"", "POST"),
    (400, PREDICT, b"\xff\xfe", None),
    (400, PREDICT, b"[" * 100_000, None),
    (400, PREDICT, b"[]," * 340_000, None),
    (400, PREDICT, {"instances": [[1.0] * 63]}, None),
    (400, PREDICT, {"instances": [["a"] * 64]}, None),
    (400, PREDICT, {"instances": [[1e39] * 64]}, None),
    (400, PREDICT, {"instances": ROW, "inputs": ROW}, None),
    (400, PREDICT, {}, None),
    (400, PREDICT, {"inputs": {"y": ROW}}, None),
    (400, PREDICT, {"instances": ROW, "signature_name": "no"}, None),
    (400, PREDICT, {"instances": ROW * 17}, None),
    (400, "/v1/models/flow:predict", {"signature_name": "sample", "inputs": SAMPLE}, None),
    (400, "/v1/models/flow:predict", {"signature_name": "sample", "inputs": {**SAMPLE, "n": 1, "temperature": -1}}, None),
    (404, "/v1/models/no:predict", {"instances": ROW}, None),
    (404, "/v1/models/digits/versions/3:predict", {"instances": ROW}, None),
    (404, f"/v1/models/digits/versions/{'9' * 4301}:predict", {"instances": ROW}, None),
    (404, "/v1/models/digits:classify", {"instances": ROW}, None),
    (404, "/v1/models/digits/", None, None),
    (404, "/docs", None, None),
    (405, PREDICT, None, "GET"),
    (405, "/v1/models/digits", None, "DELETE"),
    (405, "/v1/models/digits", {}, "POST"),
    (413, PREDICT, b" " * (2**25 + 1), None),
]


def hostile_requests(server):
    """Each with its status and one sentence as JSON; with right ones among them, which are answered."""
    heavy = [refusal for refusal in REFUSALS if isinstance(refusal[2], bytes) and len(refusal[2]) > 10_000]
    light = [refusal for refusal in REFUSALS if refusal not in heavy]
    asked = (light * 200)[:3900] + heavy * 5 + [(200, PREDICT, {"instances": ROW}, None)] * 85
    wrong = Counter()

    def ask(refusal):
        wanted, path, content, method = refusal
        status, answer = call(server.port, path, content, method)
        if status != wanted or (status != 200 and (set(answer) != {"error"} or len(answer["error"]) > 600)):
            wrong[wanted, status, path[:40], str(content)[:40]] += 1

    np.random.default_rng(0).shuffle(asked)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, asked))
    assert len(asked) >= 4000
    assert not wrong
    assert not any("Traceback" in line for line in server.output)


def large_requests_at_once_take_no_gigabytes(server):
    """Eight of 31 MB of `[],`, and eight with as many lists as are taken; the largest growth of all processes together."""
    brackets = b'{"instances": [' + b"[]," * (31 * 2**20 // 3) + b"[]]}"
    lists = b'{"instances": [' + b"[[]]," * 1_660_000 + b"[]]}"
    for name, body, allowed in (("brackets", brackets, {400}), ("nested lists", lists, {400})):
        before, most, found = server.memory(), 0, Counter()
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(call, server.port, PREDICT, body) for _ in range(8)]
            while not all(done.done() for done in asked):
                most = max(most, server.memory() - before)
                time.sleep(0.1)
        found = Counter(done.result()[0] for done in asked)
        print(f"eight requests of {name}, {len(body) / 2**20:.0f} MB each: {dict(found)}, {most / 2**20:.0f} MB more at most")
        assert set(found) <= allowed
        assert most < 1.5 * 2**30


def more_than_it_can_do_is_refused_with_503(server, file):
    """Two replicas run 16 requests each, and 64 wait: of 140 that are held, some 44 are refused."""
    found = Counter()

    def ask(_):
        found[call(server.port, "/v1/models/gate:predict", {"instances": [3.0]}, timeout=300)[0]] += 1

    with closed(file) as let_go, ThreadPoolExecutor(140) as pool:
        asked = pool.map(ask, range(140))
        assert until(lambda: found[503] >= 30, 150), found
        assert set(found) == {503}
        let_go()
        list(asked)
    print(f"140 requests at once: {dict(found)}")
    assert set(found) == {200, 503}
    assert found[200] >= 64
    assert call(server.port, PREDICT, {"instances": ROW})[0] == 200


def a_new_version_and_the_way_back_lose_no_request(server, models):
    """Under load from four clients; the old version is served beside the new one."""

    def newest():
        both = {call(server.port, "/v1/models/digits/metadata")[1]["model_spec"]["version"] for _ in range(12)}
        return both.pop() if len(both) == 1 else None

    with load(4, lambda: version_that_answers(server.port, (2, 5))) as found:
        write_classifier(models / "digits", 5)
        assert until(lambda: newest() == "5", 60)
        assert call(server.port, "/v1/models/digits/versions/2:predict", {"instances": ROW})[0] == 200
        (models / "digits" / "5").rename(models / "digits" / "5.bad")
        assert until(lambda: newest() == "2", 60)
    assert set(found) == {2, 5}


def a_killed_replica_costs_no_answer_and_comes_back(server):
    """At least a minute of load from four clients; SIGKILL after a third of it."""
    before, begun = server.replicas("digits"), time.monotonic()
    assert len(before) == 2
    with load(4, lambda: version_that_answers(server.port, (2,))) as found:
        time.sleep(20)
        os.kill(before[0], signal.SIGKILL)
        assert until(lambda: len(set(server.replicas("digits")) - {before[0]}) == 2, BACK_SECONDS)
        time.sleep(max(0, 60 - (time.monotonic() - begun)))
    print(f"a replica killed within {time.monotonic() - begun:.0f} s: {dict(found)}")
    assert set(found) == {2}


def the_documented_nginx_in_front(server, tmp_path):
    if None in map(shutil.which, ("nginx", "curl", "openssl")):
        print("nginx is not installed, and was not tried")
        return
    nginx.check(server.port, PREDICT, {"instances": ROW}, tmp_path)


def running_requests_are_finished_at_the_end_and_no_process_is_left(server, file):
    with closed(file) as let_go, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(call, server.port, "/v1/models/gate:predict", {"instances": [3.0]}) for _ in range(4)]
        time.sleep(3)
        server.children()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(3)
        assert not any(done.done() for done in asked)
        assert call(server.port, PREDICT, {"instances": ROW})[0] == 503  # and what comes now is refused
        let_go()
        assert [done.result() for done in asked] == [(200, {"predictions": [3.0]})] * 4
    assert server.end() == []
    assert server.process.returncode == 0
    server.reader.join(10)
    assert "Traceback" not in "".join(server.output)  # Ray reports the killed replica, and nothing else


def test_the_whole_server(server, models, example, tmp_path):
    the_first_requests(server)
    only_this_machine_reaches_it(server)
    answers_in_both_formats_and_by_version(server)
    the_client_of_the_examples(server, example)
    hostile_requests(server)
    large_requests_at_once_take_no_gigabytes(server)
    more_than_it_can_do_is_refused_with_503(server, tmp_path / "file")
    a_new_version_and_the_way_back_lose_no_request(server, models)
    a_killed_replica_costs_no_answer_and_comes_back(server)
    the_documented_nginx_in_front(server, tmp_path)
    running_requests_are_finished_at_the_end_and_no_process_is_left(server, tmp_path / "file")


def node(*options, **variables):
    """A node of Ray in processes of its own, with two places for replicas."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=2", "--object-store-memory=100000000"]
    command += ["--node-ip-address=127.0.0.1", "--disable-usage-stats", *options]
    environment = {**os.environ, "RAY_worker_niceness": "0", **variables}  # as examples/serve.py has it
    return psutil.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def nodes_within(seconds, port, count, variables):
    """Whether the cluster has so many nodes within some seconds."""
    program = f"""import ray, time
ray.init("127.0.0.1:{port}", logging_level="ERROR", log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < {count}:
    time.sleep(0.5)"""
    quiet = {"env": {**os.environ, **variables}, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if subprocess.run([sys.executable, "-c", program], timeout=left, **quiet).returncode == 0:
                return True
    return False


def replicas_of(process, name):
    found = []
    for child in process.children(recursive=True):
        try:
            found += [child] if f"ServeReplica:models:{name}" in " ".join(child.cmdline()) else []
        except psutil.Error:
            continue
    return found


def end_all(processes):
    """Kill these and what they have started."""
    every = []
    for process in processes:
        try:
            every += [process, *process.children(recursive=True)]
        except psutil.Error:
            continue
    for process in every:
        try:
            process.kill()
        except psutil.Error:
            continue
    psutil.wait_procs(every, timeout=15)


ANSWER_SECONDS = 90
"""Within which a client has its answer, however often it asks, when a node dies."""


def test_one_of_two_nodes_dies_under_load(models):
    # A short path of its own: Ray writes down there which cluster is the newest, and sockets take no long ones.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_TMPDIR": folder}
    port, started = free_port(), []
    found, late, stop = Counter(), [], threading.Event()
    expected = probabilities(2)

    def client():
        while not stop.is_set():
            begun = time.monotonic()
            while True:
                try:
                    status, answer = call(running.port, PREDICT, {"instances": ROW}, timeout=30)
                except (OSError, ValueError, http.client.HTTPException) as error:
                    status, answer = 599, type(error).__name__
                if status < 500:
                    break
                found["sent again", status, str(answer)[:60]] += 1
                if time.monotonic() - begun > ANSWER_SECONDS:
                    break
                time.sleep(0.2)
            late.append(time.monotonic() - begun)
            right = status == 200 and np.allclose(answer["predictions"][0]["probabilities"], expected, 1e-3)
            found["right" if right else ("wrong", status, str(answer)[:60])] += 1

    try:
        started.append(head := node("--head", f"--port={port}", "--include-dashboard=false", **token))
        assert nodes_within(START_SECONDS, port, 1, token)
        for attempt in range(3):  # it did not come up once, for a reason that was not found
            started.append(worker := node(f"--address=127.0.0.1:{port}", **token))
            if nodes_within(60 * (attempt + 1), port, 2, token):  # without it all replicas would go to the first
                break
            end_all([worker])
        running = Server([models / "digits"], "--replicas", "2", "--address", f"127.0.0.1:{port}", **token)
        started.append(running.process)
        running.ready()
        assert [len(replicas_of(machine, "digits")) for machine in (head, worker)] == [1, 1]
        with ThreadPoolExecutor(8) as pool:
            clients = [pool.submit(client) for _ in range(8)]
            try:
                assert until(lambda: found["right"] > 200, 120), found
                end_all([worker])
                assert until(lambda: len(replicas_of(head, "digits")) == 2, BACK_SECONDS), found
                before = found["right"]
                assert until(lambda: found["right"] > before + 200, 120), found
            finally:
                stop.set()
            for done in clients:
                done.result()
        assert not [key for key in found if key[0] == "wrong"], found
        assert max(late) < ANSWER_SECONDS
        print(f"{found}, the longest {max(late):.1f} s")
    finally:
        stop.set()
        end_all(started)
        shutil.rmtree(folder, ignore_errors=True)
