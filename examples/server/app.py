"""SavedModels behind Starlette and uvicorn, with TensorFlow Serving's REST protocol.

uvicorn has the processes, which it starts again when they die or give no sign of life, the limit on connections, and a shutdown
that lets running requests finish. Every replica makes the application for itself, with every model in it, from settings in the
environment.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from . import protocol
from .model import Description, SavedModel, end_with_parent
from .protocol import RequestError

SETTINGS = "KERAS_AUXREF_SERVING"
CONNECTIONS, BACKLOG = 256, 512
"""Open connections of a replica, which answers 503 to more, and those that wait to be accepted."""
GRACE_SECONDS, PATIENCE_SECONDS = 30, 30
"""For requests that are running at the end; without a sign of life, until a replica is replaced. uvicorn does nothing else
while it waits for one: with more patience it also stops later, and later replaces a replica that died at that moment.
"""
BODY_SECONDS, BODIES_AT_ONCE = 60, 8
"""For the body of a request to come; how many of the largest size a replica keeps at once."""
OPTIONS: dict[str, Any] = {
    "http": f"{__package__}.connections:Connection",
    "ws": "none",  # an upgrade is not offered: such a request is one like others
    "loop": "asyncio",
    "lifespan": "off",
    "log_level": "error",  # a client's mistake is told to the client
    "access_log": False,
    "proxy_headers": False,
    "server_header": False,
    "limit_concurrency": CONNECTIONS,
    "backlog": BACKLOG,
    "timeout_graceful_shutdown": GRACE_SECONDS,
    "timeout_worker_healthcheck": PATIENCE_SECONDS,
}


def serve(models: Sequence[Description], host: str, port: int, replicas: int, max_batch: int, max_bytes: int) -> None:
    """Serve until SIGTERM or SIGINT; then finish what is running, for at most `GRACE_SECONDS`."""
    folders = [(str(model.folder), model.version) for model in models]
    os.environ[SETTINGS] = json.dumps({"folders": folders, "max_batch": max_batch, "max_bytes": max_bytes})
    uvicorn.run(f"{__name__}:create", factory=True, host=host, port=port, workers=replicas, **OPTIONS)


def create() -> Any:
    """The application of a replica, with every model loaded and called once: uvicorn listens when this has returned."""
    end_with_parent()
    settings = json.loads(os.environ[SETTINGS])
    models = [SavedModel(Path(folder), version) for folder, version in settings["folders"]]
    for model in models:
        model.warm_up()
    sys.stdout.write(f"Replica {os.getpid()} is ready.\n")  # one write, so that the lines of replicas do not mix
    sys.stdout.flush()
    return application(models, settings["max_batch"], settings["max_bytes"])


def application(models: Sequence[SavedModel], max_batch: int, max_bytes: int) -> Any:
    """The routes: health, and for each model status, metadata and `predict`, with and without its version."""

    def fixed(content: bytes) -> Any:
        async def answer(_: Request) -> Response:
            return _json(content)

        return answer

    bodies, parsing = Bodies(max_bytes), asyncio.Lock()
    health = {"/": {"status": "alive"}, "/v2/health/live": {"live": True}, "/v2/health/ready": {"ready": True}}
    routes = [Route(path, fixed(json.dumps(content).encode())) for path, content in health.items()]
    for model in models:
        metadata = protocol.metadata(model.folder.name, model.version, model.signatures)
        for path in (f"/v1/models/{model.folder.name}", f"/v1/models/{model.folder.name}/versions/{model.version}"):
            routes += [
                Route(path, fixed(protocol.status(model.version))),
                Route(f"{path}/metadata", fixed(metadata)),
                Route(f"{path}:predict", predict(model, max_batch, bodies, parsing), methods=["POST"]),
            ]
    served = ", ".join(f"{model.folder.name} (version {model.version})" for model in models)

    async def refuse(request: Request, error: Any) -> Response:
        if isinstance(error, RequestError):
            return _json(protocol.error(error.message), error.status)
        expected = {
            404: f"/v1/models/NAME, NAME/metadata or NAME:predict for {served}",
            405: "POST for predict and GET for the rest",
        }
        received = f"{request.method} {request.url.path[:200]}"
        return _json(protocol.error(f"Expected {expected.get(error.status_code)}, received {received}."), error.status_code)

    async def fail(*_: Any) -> Response:
        return _json(protocol.error("The server has made a mistake, which is in its log."), 500)

    async def gone(*_: Any) -> Response:
        return Response(status_code=400)  # nobody reads it

    handlers: dict[Any, Any] = {HTTPException: refuse, RequestError: refuse, ClientDisconnect: gone, Exception: fail}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return _Watched(app)


def predict(model: SavedModel, max_batch: int, bodies: "Bodies", parsing: asyncio.Lock) -> Any:
    """The endpoint of a model. Work is done in threads: a health check is answered meanwhile."""

    async def answer(http: Request) -> Response:
        async with bodies.read(http) as body, parsing:  # one after another, which costs no time: Python parses one at a time
            request = await asyncio.to_thread(protocol.parse, body, model.signatures, max_batch)
        return _json(await asyncio.to_thread(lambda: protocol.answer(request, model.run(request))))

    return answer


class Bodies:
    """The bodies of requests: each of at most `max_bytes`, and all that are kept at a time of `BODIES_AT_ONCE` times as many."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.kept = max_bytes, 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """The body of a request, which counts as kept until the context ends."""
        body = bytearray()
        try:
            await self._fill(body, request)
            if connection := getattr(request.state, "connection", None):
                connection.has_body()
            yield body
        finally:
            self.kept -= len(body)

    async def _fill(self, body: bytearray, request: Request) -> None:
        """What is too much is not kept, but read all the same, so that the client gets to read the answer."""
        size, refusal = 0, None
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    size += len(part)
                    if size > self.max_bytes:
                        refusal = RequestError(f"Expected a request of at most {self.max_bytes} bytes, received more.", 413)
                    elif self.kept + len(part) > BODIES_AT_ONCE * self.max_bytes:
                        refusal = RequestError("Expected fewer large requests at once: ask again.", 503)
                    if refusal is None:
                        body += part
                        self.kept += len(part)
                    elif size > 8 * self.max_bytes:
                        break
        except TimeoutError:
            refusal = RequestError(f"Expected the whole request within {BODY_SECONDS} s, received {size} bytes.", 408)
        if refusal is not None:
            raise refusal


class _Watched:
    """Tells the connection of a request when it begins and ends."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        connection = scope.get("state", {}).get("connection")
        if connection is None:
            await self.app(scope, receive, send)
            return
        connection.begin()
        if scope["method"] in ("GET", "HEAD"):
            connection.has_body()
        try:
            await self.app(scope, receive, send)
        finally:
            connection.end()


def _json(content: bytes, status: int = 200) -> Response:
    headers = {"connection": "close"} if status == 408 else None
    return Response(content, status, headers, media_type="application/json")
