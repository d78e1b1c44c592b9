"""Serve SavedModels over HTTP, on a machine without TensorFlow Serving and with its protocol.

    python examples/serve.py saved_models/digits saved_models/mnist-flow      on port 8501 of this machine, with two replicas
    python examples/client.py digits mnist-flow                               calls every signature of both
    curl -d '{"instances": [[0.0, …]]}' http://127.0.0.1:8501/v1/models/digits:predict

Each folder holds a SavedModel per version, `digits/1/`, `digits/2/`, …, as `keras_auxref.export_saved_model` writes them and as
TensorFlow Serving reads them; the highest is served. A replica is a process with every model in it. One that dies is started
again while the others answer. SIGTERM or Ctrl-C stop the server after the requests that it is working on.

A SavedModel is a program: to load one is to run it. Serve only models whose origin you trust.

It takes Starlette and uvicorn, `pip install 'keras-auxref[serve]'`, and TensorFlow; the models need nothing else. There is no
encryption and no password: only programs on this machine reach it, unless --host says otherwise. docs/serving.md has the rest.
"""

# The engine and TensorFlow are imported where they are used: they take seconds, and a wrong argument should not.
import argparse
import importlib.util
import multiprocessing
import os
import re
import socket
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from server.cli import positive
from server.model import ModelError, describe, end_with_parent, latest_version

MEGABYTE = 2**20


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="a folder of versions; its name is the name of the model"
    )
    p.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: %(default)s)")
    p.add_argument("--port", type=positive, default=8501, metavar="N", help="(default: %(default)s)")
    p.add_argument("--replicas", type=positive, default=2, metavar="N", help="processes (default: %(default)s)")
    p.add_argument("--max-batch", type=positive, default=1024, metavar="N", help="rows of a request (default: %(default)s)")
    p.add_argument("--max-megabytes", type=positive, default=32, metavar="N", help="size of a request (default: %(default)s)")
    return p.parse_args()


def check(args: argparse.Namespace) -> None:
    """What can be seen to be wrong at once."""
    folders = [folder.resolve() for folder in args.folders]
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        raise ModelError(f"Expected folders of different names, received {', '.join(names)}.")
    for folder in folders:
        if not re.fullmatch(r"[^/:{}]+", folder.name):
            raise ModelError(f"Expected names without any of / : {{ }}, which paths are made of, received {folder.name!r}.")
        latest_version(folder)
    args.folders = folders
    try:
        with socket.create_server((args.host, args.port)):
            pass
    except (OSError, OverflowError) as error:
        raise ModelError(f"Expected a free address, received {args.host}:{args.port}: {error}.") from error
    if not all(map(importlib.util.find_spec, ("starlette", "uvicorn"))):
        raise ModelError("Serving needs Starlette and uvicorn: pip install 'keras-auxref[serve]'.")


def run() -> None:
    args = arguments()
    check(args)
    # Replicas share the cores, and a GPU. Each takes all of it otherwise.
    threads = str(max(1, (os.cpu_count() or 1) // args.replicas))
    for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, threads)
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    # Every model is loaded once in a process of its own, which takes TensorFlow's memory with it, while the engine is imported.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent) as pool:
        described = pool.submit(describe, args.folders)
        from server.app import serve

        models = described.result()
    for model in models:
        print(f"{model.name}, version {model.version}: {', '.join(model.signatures)}")
    print(f"Serving on http://{args.host}:{args.port}/v1/models/ with {args.replicas} replicas.", flush=True)
    serve(models, args.host, args.port, args.replicas, args.max_batch, args.max_megabytes * MEGABYTE)


if __name__ == "__main__":
    try:
        run()
    except ModelError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
