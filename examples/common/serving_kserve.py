"""SavedModels behind KServe's model server: its processes, HTTP, health and metrics, with TensorFlow Serving's REST protocol.

KServe brings the route `POST /v1/models/NAME:predict`, the replicas, which it starts again when they die, `GET /` and
`/v2/health/ready` for a health check, `GET /metrics` for Prometheus, and a shutdown that lets running requests finish. What its
V1 protocol lacks of TensorFlow Serving's is `Protocol` below: versions in the path, status, metadata, and a limit on the size of
a request. Everything else that KServe offers, such as unloading a model over HTTP, is out of reach.
"""

import asyncio
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Set before KServe is imported: it would write several lines for each request.
os.environ.setdefault("KSERVE_LOGLEVEL", "WARNING")

import kserve
from kserve.errors import InvalidInput
from kserve.protocol.dataplane import DataPlane
from kserve.protocol.model_repository_extension import ModelRepositoryExtension
from kserve.protocol.rest.multiprocess import server as multiprocess
from kserve.protocol.rest.server import RESTServer
from starlette.responses import Response

from common import serving
from common.serving import RequestError
from common.serving_model import Description, SavedModel, end_with_parent

APPLICATION = "kserve.model_server:app"
PATH = re.compile(r"/v1/models/([^/:]+)(?:/versions/(\d+))?(|/metadata|:predict)")
ENGINE = re.compile(r"/|/metrics|/v2/health/(live|ready)")
"""Paths that KServe answers by itself."""
CONNECTIONS = 256
"""Open connections of a replica; it answers 503 to more."""
GRACE_SECONDS = 30
PATIENCE_SECONDS = 60
"""Without a sign of life for as long, a replica is replaced."""
JSON = "application/json"


class ServedModel(kserve.Model):
    """A model as KServe knows it. It travels to the replicas as a description, and is loaded there."""

    def __init__(self, description: Description, max_batch: int) -> None:
        super().__init__(description.name, return_response_headers=True)
        self.description, self.max_batch = description, max_batch
        self._model: SavedModel | None = None
        self.ready = True

    def load(self) -> bool:
        self._model = SavedModel(self.description.folder, self.description.version)
        self._model.warm_up()
        return True

    def validate(self, payload: bytes) -> bytes:
        return payload

    async def predict(self, payload: bytes, headers: Mapping[str, str], response_headers: dict[str, str]) -> bytes:
        response_headers["content-type"] = JSON
        # In a thread: a health check is answered while a model computes.
        return await asyncio.to_thread(self._answer, payload)

    def _answer(self, body: bytes) -> bytes:
        assert self._model is not None
        try:
            request = serving.parse(body, self._model.signatures, self.max_batch)
            return serving.answer(request, self._model.run(request))
        except RequestError as error:
            raise InvalidInput(error.message) from error


class Protocol:
    """The part of TensorFlow Serving's protocol that stands before KServe's route for `predict`, as ASGI middleware."""

    def __init__(self, app: Any, models: Mapping[str, ServedModel], max_bytes: int) -> None:
        self.app, self.models, self.max_bytes = app, models, max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            # Before the first connection is accepted.
            for model in self.models.values():
                model.load()
            # One write, so that the lines of replicas do not mix.
            sys.stdout.write(f"Replica {os.getpid()} is ready.\n")
            sys.stdout.flush()
        if scope["type"] != "http" or ENGINE.fullmatch(scope["path"]):
            await self.app(scope, receive, send)
            return
        try:
            model, what = self._find(scope["path"], scope["method"])
            if what == ":predict":
                body = await self._read(scope, receive)
                # KServe decodes JSON before the model can refuse it, and has no NaN there; it leaves other content as it is.
                headers = [(b"content-type", b"text/plain")]
                path = f"/v1/models/{model.name}:predict"
                inner = {**scope, "path": path, "raw_path": path.encode(), "headers": headers}
                await self.app(inner, _replay(body, receive), send)
                return
            seen = model.description
            content, status = serving.status(seen.version), 200
            if what == "/metadata":
                content = serving.metadata(seen.name, seen.version, seen.signatures)
        except RequestError as error:
            content, status = serving.error(error.message), error.status
        await Response(content, status, media_type=JSON)(scope, receive, send)

    def _find(self, path: str, method: str) -> tuple[ServedModel, str]:
        match = PATH.fullmatch(path)
        if not match:
            raise RequestError(f"Expected /v1/models/NAME, NAME/metadata or NAME:predict, received {path}.", 404)
        name, version, what = match.groups()
        if name not in self.models:
            raise RequestError(f"Expected a model out of {', '.join(self.models)}, received {name}.", 404)
        model = self.models[name]
        if version and int(version) != model.description.version:
            raise RequestError(f"Expected version {model.description.version} of {name}, received {version}.", 404)
        if method != (expected := "POST" if what == ":predict" else "GET"):
            raise RequestError(f"Expected {expected} for {path}, received {method}.", 405)
        return model, what

    async def _read(self, scope: Any, receive: Any) -> bytes:
        """The body, if it is not too large. More is read, but not kept, so that the client gets to read the answer."""
        parts, size, more = [], 0, True
        while more and size <= 8 * self.max_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size <= self.max_bytes:
                parts.append(part)
        if size > self.max_bytes:
            raise RequestError(f"Expected a request of at most {self.max_bytes} bytes, received more.", 413)
        return b"".join(parts)


def _replay(body: bytes, receive: Any) -> Any:
    """A `receive` that hands over a body that has been read already."""
    pending: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return pending.pop() if pending else await receive()

    return again


class _Replica(RESTServer):
    """What runs in each replica; KServe by itself listens on every network interface."""

    def __init__(self, *arguments: Any, host: str, max_bytes: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.max_bytes = max_bytes
        self.config.host = host
        self.config.limit_concurrency = CONNECTIONS
        # A replica that cannot load its models ends, and does not serve without them.
        self.config.lifespan = "on"

    def create_application(self) -> None:
        from kserve.model_server import app

        for name in ("uvicorn.access", "uvicorn.error", "kserve.trace"):
            logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger("kserve").addFilter(_is_ours)
        end_with_parent()
        super().create_application()
        app.add_middleware(Protocol, models=self.dataplane.model_registry.get_models(), max_bytes=self.max_bytes)


class _Process(multiprocess.RESTServerProcess):
    """A replica as its parent sees it, with more patience than KServe's five seconds, and without holding up the parent.

    A replica cannot answer before its imports, and on a busy machine these take longer: it would be killed over and over.
    """

    _asked: float | None = None

    def is_alive(self, timeout: float = PATIENCE_SECONDS) -> bool:
        if not self._process.is_alive():
            return False
        if self._asked is None:
            self._parent_conn.send(b"ping")
            self._asked = time.monotonic()
        if self._parent_conn.poll(0):
            self._parent_conn.recv()
            self._asked = None
            return True
        return time.monotonic() - self._asked < timeout


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether to log: a client's mistake is told to the client, and would bury the server's own under tracebacks."""
    return not (record.exc_info and isinstance(record.exc_info[1], InvalidInput))


def serve(models: Sequence[Description], host: str, port: int, replicas: int, max_batch: int, max_bytes: int) -> None:
    """Serve until SIGTERM or SIGINT; then finish what is running, for at most `GRACE_SECONDS`."""
    repository = kserve.ModelRepository(models_dir=str(Path()))
    for description in models:
        repository.update(ServedModel(description, max_batch))
    arguments = (APPLICATION, DataPlane(repository), ModelRepositoryExtension(repository), port)
    options: dict[str, Any] = {"workers": replicas, "grace_period": GRACE_SECONDS}

    async def run() -> None:
        multiprocess.RESTServerProcess = _Process
        server = multiprocess.RESTServerMultiProcess(*arguments, **options)
        server._rest_server = _Replica(*arguments, host=host, max_bytes=max_bytes, **options)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.should_exit.set)
        await server.start()

    asyncio.run(run())
