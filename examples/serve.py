"""Serve SavedModels over HTTP with Ray Serve, by TensorFlow Serving's REST protocol.

    python examples/serve.py saved_models/digits saved_models/mnist-flow      on port 8501 of this machine
    python examples/client.py digits mnist-flow                               calls every signature of both
    curl -d '{"instances": [[0.0, …]]}' http://127.0.0.1:8501/v1/models/digits:predict

Each folder holds a SavedModel per version, `digits/1/`, `digits/2/`, …, as `keras_auxref.export_saved_model` writes them. The
highest is served, and a new one is taken up while requests are answered. SIGTERM or Ctrl-C stop the server after the requests
that it is working on. A SavedModel is a program: serve only models whose origin you trust. docs/serving.md has the rest.
"""

# Ray and TensorFlow are imported where they are used: they take seconds, and a wrong argument should not.
import argparse
import asyncio
import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import protocol
from protocol import Request, RequestError

OPTIONS = {"port": (8501, "to listen on"), "replicas": (1, "processes of each model")}
OPTIONS |= {"max_replicas": (1, "of each model under load"), "keep": (1, "newest versions of a model that are served")}
OPTIONS |= {"max_batch": (1024, "rows of a request"), "max_megabytes": (32, "of a request"), "seconds": (60, "to answer in")}


class SavedModel:
    """One version, loaded by TensorFlow alone, with every signature called once: its first call takes seconds."""

    def __init__(self, folder: Path) -> None:
        import tensorflow as tf
        from google.protobuf.json_format import MessageToDict
        from tensorflow.core.protobuf import saved_model_pb2

        found = saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes()).meta_graphs[0].signature_def
        style = {"preserving_proto_field_name": True, "always_print_fields_with_no_presence": True}
        self.definitions = {name: MessageToDict(found[name], **style) for name in sorted(found) if not name.startswith("__")}
        self.model, self.inputs = tf.saved_model.load(str(folder)), {}
        for name, function in self.model.signatures.items():
            self.inputs[name] = specs = function.structured_input_signature[1]
            protocol.check_dtypes(specs | function.structured_outputs)
            row = {key: np.full([size or 1 for size in spec.shape or ()], "1") for key, spec in specs.items()}
            row = {key: array.astype(specs[key].dtype.as_numpy_dtype) for key, array in row.items()}
            with contextlib.suppress(RequestError):  # a model may refuse a row of ones
                self.run(Request(name, row, False))

    def run(self, request: Request) -> dict[str, np.ndarray]:
        import tensorflow as tf

        try:
            inputs = {name: tf.constant(array, array.dtype) for name, array in request.inputs.items()}
            outputs = self.model.signatures[request.signature](**inputs)
            return {name: value.numpy() for name, value in outputs.items()}
        except tf.errors.InternalError:  # which says nothing of the inputs
            raise
        except (tf.errors.OpError, ValueError) as error:  # what only the model knows, such as a temperature below 0
            raise RequestError(f"The model refused its inputs: {_line(error)}.") from error


class Model:
    """A folder of versions, the newest `keep` of them loaded. Every replica watches the folder for itself."""

    def __init__(self, folder: str, keep: int = 1, max_batch: int = 1024, threads: int = 0) -> None:
        defaults = {"TF_NUM_INTRAOP_THREADS": str(threads), "TF_NUM_INTEROP_THREADS": str(threads)}
        os.environ |= {**defaults, "TF_FORCE_GPU_ALLOW_GROWTH": "true", **os.environ}  # replicas share a GPU
        self.folder, self.keep, self.max_batch = Path(folder), keep, max_batch
        self.served: dict[str, SavedModel] = {}
        self.broken: dict[str, str] = {}
        self.loading, self.parsing = threading.Lock(), threading.Lock()
        self.refresh()
        if not self.served:
            raise RuntimeError(f"Expected a SavedModel that loads in {folder}, received {self.broken}.")
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        while True:
            time.sleep(2)
            self.refresh()

    def refresh(self) -> None:
        """Load what is new, and only then let go of what is gone. What does not load, perhaps not yet, is passed over."""
        with self.loading:
            served, broken = {}, {}
            for version in versions(self.folder):
                try:
                    if len(served) < self.keep:
                        served[version] = self.served.get(version) or SavedModel(self.folder / version)
                except Exception as error:
                    broken[version] = _line(error)
            self.served, self.broken = served or self.served, broken

    async def __call__(self, what: str, version: str, body: bytes = b"") -> tuple[int, bytes]:
        """An HTTP status and the JSON for it. Work is done in threads: a health check is answered meanwhile."""
        try:
            if version and version not in {**self.served, **self.broken} and version in versions(self.folder):
                await asyncio.to_thread(self.refresh)  # another replica was faster to see it
            served = self.served
            version = version or next(iter(served))
            if version not in served:
                raise RequestError(f"Expected version {' or '.join(served)} of {self.folder.name}, received {version[:99]}.", 404)
            if what == "status":
                return 200, protocol.status(dict.fromkeys(served, "") | self.broken)
            if what == "metadata":
                return 200, protocol.metadata(self.folder.name, version, served[version].definitions)
            return 200, await asyncio.to_thread(self.predict, served[version], body)
        except RequestError as error:
            return error.answer()

    def predict(self, model: SavedModel, body: bytes) -> bytes:
        with self.parsing:  # one after another, which costs no time: Python parses one at a time
            request = protocol.parse(body, model.inputs, self.max_batch)
        return protocol.answer(request, model.run(request))


class Gateway:
    """What answers HTTP, by ASGI: it reads a request within limits and hands it to a replica: `models` has handles of Ray."""

    def __init__(self, models: dict[str, Any], max_bytes: int = 32 * 2**20, seconds: float = 60) -> None:
        self.models, self.max_bytes, self.seconds = models, max_bytes, seconds
        self.running, self.kept, self.closed = 0, 0, False

    def __serve_build_asgi_app__(self) -> Any:
        from starlette.routing import Router

        return Router(default=self.respond)

    async def close(self) -> None:
        """Refuse what comes from now on, and wait for what is running, and a second for Ray to pass on the last answer."""
        self.closed = True
        while self.running:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)

    async def respond(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette import requests, responses

        if scope["type"] == "websocket":
            return await send({"type": "websocket.close"})
        body, late = bytearray(), RequestError(f"Expected the whole request within {self.seconds} s.", 408)
        self.running += 1
        try:
            if self.closed:
                raise RequestError("Expected a server that is not about to stop: ask again.", 503)
            model, version, what = protocol.route(scope["method"], scope["path"], self.models)
            async with asyncio.timeout(self.seconds):
                async for part in requests.Request(scope, receive).stream():
                    body += part
                    self.kept += len(part)
                    if len(body) > self.max_bytes:
                        raise RequestError(f"Expected a request of at most {self.max_bytes} bytes, received more.", 413)
                    if self.kept > 8 * self.max_bytes:
                        raise RequestError("Expected fewer large requests at once: ask again.", 503)
                protocol.check_size(body)
                late = RequestError(f"Expected an answer within {self.seconds} s: ask for less, or again.", 504)
                status, content = await self.ask(model, what, version, bytes(body))
        except RequestError as error:
            status, content = error.answer()
        except TimeoutError:
            status, content = late.answer()
        except Exception:
            logging.getLogger("ray.serve").exception("A request could not be answered.")
            status, content = RequestError("The server has made a mistake, which is in its log.", 500).answer()
        finally:
            self.running, self.kept = self.running - 1, self.kept - len(body)
        await responses.Response(content, status, media_type="application/json")(scope, receive, send)

    async def ask(self, model: str, *question: Any) -> tuple[int, bytes]:
        """The answer of a replica. A prediction changes nothing: when its replica dies, another one is asked."""
        from ray import exceptions
        from ray.serve.exceptions import BackPressureError, RayServeException

        for attempt in range(4):
            await asyncio.sleep(0.2 * attempt)
            try:
                return await self.models[model].remote(*question)
            except BackPressureError:
                raise RequestError("Expected fewer requests at once: ask again.", 503) from None
            except (exceptions.RayActorError, RayServeException):
                pass
        raise RequestError("Expected a replica of the model, which is being started: ask again.", 503)


def application(options: dict[str, Any]) -> Any:
    """All of it for Ray Serve: for `main`, and as `import_path: serve:application` in a configuration.

    `options` are those of the command line, the `folders`, and how many `gateways` and `threads` of TensorFlow (0: its default).
    """
    from ray import serve

    given = {name: default for name, (default, _) in OPTIONS.items()} | {"gateways": 2, "threads": 0} | options
    least, most = given["replicas"], given["max_replicas"]
    scaling = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": 4}
    replicas = {"autoscaling_config": scaling} if most > least else {"num_replicas": least}
    common = {"graceful_shutdown_wait_loop_s": 0.2, "graceful_shutdown_timeout_s": 60.0, "max_constructor_retry_count": 1}
    limits = {"max_ongoing_requests": 16, "max_queued_requests": 64}
    model = serve.deployment(Model, **replicas, **limits, **common)
    each = {name: given[name] for name in ("keep", "max_batch", "threads")}
    models = {Path(folder).name: model.options(name=Path(folder).name).bind(folder, **each) for folder in given["folders"]}
    limits = {"max_ongoing_requests": 256, "max_queued_requests": 256, "ray_actor_options": {"num_cpus": 0}}
    gateway = serve.deployment(serve.ingress()(Gateway), name="gateway", num_replicas=given["gateways"], **limits, **common)
    return gateway.bind(models, given["max_megabytes"] * 2**20, given["seconds"])


def versions(folder: Path) -> list[str]:
    """The numbered folders with a SavedModel, the highest number first."""
    found = (file.parent.name for file in folder.glob("*/saved_model.pb"))
    return sorted((name for name in found if re.fullmatch("0|[1-9][0-9]{0,18}", name)), key=int, reverse=True)


def _line(error: Exception) -> str:
    """What went wrong: the last line of TensorFlow's messages that is not about where."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith((" ", "\t", "Hint:"))]
    return re.sub("^{{.+?}} ", "", lines[-1] if lines else type(error).__name__).rstrip(". ")


def _positive(text: str) -> int:
    if re.fullmatch("[1-9][0-9]{0,8}", text):
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, received {text}")


def arguments() -> argparse.Namespace:
    """The command line, and a sentence for what can be seen to be wrong at once."""
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a folder of versions; its name is that of the model")
    p.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: %(default)s)")
    p.add_argument("--address", help="a running Ray cluster, such as auto (default: one is started on this machine)")
    for name, (default, text) in OPTIONS.items():
        option = "--" + name.replace("_", "-")
        p.add_argument(option, type=_positive, default=default, metavar="N", help=f"{text} (default: %(default)s)")
    args = p.parse_args()
    args.folders = [folder.resolve() for folder in args.folders]
    args.names = [folder.name for folder in args.folders]
    if len({*args.names, "gateway"}) <= len(args.names) or ":" in "".join(args.names):
        p.error(f"expected folders of different names without a colon, none of them 'gateway', received {', '.join(args.names)}")
    if missing := [folder for folder in args.folders if not versions(folder)]:
        p.error(f"expected SavedModels in numbered folders, NAME/1/saved_model.pb and so on, found none in {missing[0]}")
    try:
        socket.create_server((args.host, args.port)).close()
    except (OSError, OverflowError) as error:
        p.error(f"expected a free address, received {args.host}:{args.port}: {error}")
    return args


def main() -> None:
    args, stop = arguments(), threading.Event()
    # The processes of Ray share the machine as others do: its own default, 15, is behind every other program.
    local, settings = {}, {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    options = {**vars(args), "folders": [*map(str, args.folders)]}
    if args.address is None:  # a Ray of its own, with a place for every replica, whatever the machine has
        options |= {"gateways": 1, "threads": max(1, (os.cpu_count() or 1) // args.replicas)}
        places = len(args.folders) * max(args.replicas, args.max_replicas)
        local = {"include_dashboard": False, "object_store_memory": 2**28, "num_cpus": places}
        # Its own ports are on the loopback address, as Ray has it on macOS, and those that are not ask for a token.
        settings |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ |= {**settings, **os.environ}
    try:
        import ray
        from ray import serve

        ray.init(args.address or "local", log_to_driver=False, logging_level=logging.ERROR, **local)
    except ModuleNotFoundError:
        sys.exit("Serving needs Ray Serve: pip install -e '.[serve]' in the checkout.")
    except Exception as error:  # no cluster at this address, or a machine too busy to start one
        sys.exit(f"Expected Ray to start, or to run at --address: {_line(error)}.")
    for number in (signal.SIGTERM, signal.SIGINT):  # after `init`, which sets handlers too
        signal.signal(number, lambda *_: stop.set())
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    where, logs = {"host": args.host, "port": args.port}, {"log_level": "ERROR", "enable_access_log": False}
    serve.start("EveryNode" if args.address else "HeadOnly", where, logging_config=logs)
    try:
        gateway = serve.run(application(options), name="models")
        print(f"Serving {', '.join(args.names)} on http://{args.host}:{args.port}/v1/models/", flush=True)
        stop.wait()
        with contextlib.suppress(TimeoutError):
            gateway.broadcast("close").results(timeout_s=args.seconds + 5, return_exceptions=True)
        if args.address:
            serve.delete("models")
    except RuntimeError as error:
        sys.exit(f"Expected models that load: {_line(error)}.")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
