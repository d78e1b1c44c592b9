"""Models of examples/serve.py over HTTP without Ray and without its limits, for tests and for the tutorial in CI.

python tests/examples/plain.py saved_models/digits --port 8501 --keep 2
"""

import argparse
import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import protocol


def server(models: Mapping[str, Any], port: int = 0, failures: Sequence[int] = ()) -> ThreadingHTTPServer:
    """A server of `serve.Model`s by name. The first predictions fail with the statuses `failures`."""
    failing = list(failures)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            try:
                name, version, what = protocol.route(self.command, self.path, models)
                fails = what == "predict" and failing
                status, content = (failing.pop(), b"busy") if fails else asyncio.run(models[name](what, version, body))
            except protocol.RequestError as error:
                status, content = error.answer()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


@contextlib.contextmanager
def serving(models: Mapping[str, Any], failures: Sequence[int] = ()) -> Iterator[str]:
    """The address of such a server in this process."""
    running = server(models, failures=failures)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        running.server_close()


if __name__ == "__main__":
    import serve

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--keep", type=int, default=1)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    server({args.folder.name: serve.Model(str(args.folder), args.keep)}, args.port).serve_forever()
