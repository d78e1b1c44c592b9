"""Data-parallel training on JAX: over the devices of a process, and over processes by the environment variables of Keras.

Every process runs the same program on the same data in the same order and takes its share of every batch. What it writes goes
to a folder of its own: what Keras writes is read by all processes together, so that one of them alone would wait for ever.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

NUMBER, ADDRESSES, IDENTITY = (f"KERAS_DISTRIBUTION_{name}" for name in ("NUM_PROCESSES", "JOB_ADDRESSES", "PROCESS_ID"))
HEARTBEAT_SECONDS = 100
"""After so long without a sign of life JAX takes a process for dead, and ends the others."""
STALLED_SECONDS = 300.0
"""After so long without a finished step a process takes the others for stuck, and ends itself."""
EXIT_CODE = 75
"""Of a process that ends because of another one: the same command with --resume goes on."""


class UnevenError(ValueError):
    """The devices cannot have equal shares of a batch; the message is one sentence."""


def choose_backend(backend: str | None, distribute: bool) -> None:
    """Tells Keras its backend, before it is imported; `distribute` needs JAX."""
    backend = backend or os.environ.get("KERAS_BACKEND") or "tensorflow"
    if distribute and backend != "jax":
        sys.exit(f"--distribute goes through keras.distribution. Expected --backend jax. Received: {backend}.")
    if "keras" in sys.modules and sys.modules["keras"].backend.backend() != backend:
        raise RuntimeError(f"Keras is imported already. Expected the backend {backend}.")
    os.environ["KERAS_BACKEND"] = backend


def start(seed: int, heartbeat: int = HEARTBEAT_SECONDS) -> None:
    """Joins the other processes, if there are any, and lets Keras split every batch over all devices of all processes.

    Before anything is computed. The seed is the same in all processes, for they have to start with the same weights.
    """
    import jax
    import keras

    number = int(os.environ.get(NUMBER, "1"))
    if number > 1:
        # What `keras.distribution.initialize` does, with a shorter time until a lost process is noticed.
        jax.distributed.initialize(
            os.environ[ADDRESSES].split(",")[0],
            number,
            int(os.environ[IDENTITY]),
            heartbeat_timeout_seconds=heartbeat,
            shutdown_timeout_seconds=heartbeat,
        )
    keras.utils.set_random_seed(seed)
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))


def is_on() -> bool:
    """Whether batches are split over devices."""
    import keras

    return keras.distribution.distribution() is not None


def processes() -> tuple[int, int]:
    """Which process this is, and how many there are."""
    return int(os.environ.get(IDENTITY, "0")), int(os.environ.get(NUMBER, "1"))


def folder(output: Path) -> Path:
    """Where this process writes: the first of several to the folder itself, the others below it."""
    identity, _ = processes()
    return output / f"process-{identity}" if identity else output


def gather(values: list[int]) -> list[list[int]]:
    """The values of every process, a list of one length for each: a question that all of them ask together."""
    if processes()[1] == 1:
        return [values]
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(np.asarray(values))).tolist()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A scope without distribution: a model that is built or loaded here lives on this process alone."""
    import keras

    before = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


def batches(data: tuple[np.ndarray, ...], batch_size: int, seed: int | None, repeat: int | None = None) -> Any:
    """The share of this process in full batches of the data, as a `keras.utils.PyDataset`.

    The batches are the same for any number of processes. A last batch that is not full is left out, because every device needs
    as much as the others.

    Args:
        data: Arrays with one length.
        batch_size: Rows of a batch, of all processes together.
        seed: Of the order, which is a new one in every epoch; None for the order of the data.
        repeat: Batches of an epoch, from one random order after another; by default what the data have.
    """
    import jax
    import keras

    devices = jax.device_count()
    identity, number = processes()
    if batch_size % devices:
        raise UnevenError(
            f"Every device takes the same share. Expected a batch size divisible by {devices}. Received: {batch_size}"
        )
    count, share = len(data[0]) // batch_size, batch_size // number
    if not count:
        raise UnevenError(f"Expected at least one full batch of {batch_size}. Received: {len(data[0])} rows.")

    class Batches(keras.utils.PyDataset):
        epoch = 0

        def __len__(self) -> int:
            return repeat or count

        def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
            rounds, place = divmod(self.epoch * len(self) + index, count)
            rows = np.arange(len(data[0])) if seed is None else np.random.default_rng((seed, rounds)).permutation(len(data[0]))
            first = place * batch_size + identity * share
            return tuple(part[rows[first : first + share]] for part in data)

        def on_epoch_end(self) -> None:
            self.epoch += 1

    return Batches()


def validation_batches(data: tuple[np.ndarray, ...], most: int) -> Any:
    """The share of this process in the data, in their order, in batches of at most `most` rows.

    Of the batch sizes from half of that on, the one that leaves out the fewest rows: none, or a few where the number of rows
    does not divide by that of the devices.
    """
    import jax

    devices, rows = jax.device_count(), len(data[0])
    most = max(devices, min(most, rows) // devices * devices)
    sizes = range(most, most // 2, -devices)
    return batches(data, max(sizes, key=lambda size: rows // size * size), seed=None)


def watchdog(seconds: float = STALLED_SECONDS) -> Any:
    """A callback that ends this process with a sentence when no step has finished for so long: another one is stuck or gone.

    A step of several processes waits for all of them, in native code that no exception reaches. Compiling counts: `seconds` is
    to be longer than the first step. (A process that dies closes its connections, which the others notice at once, or within the
    time of JAX's heartbeat.)
    """
    import keras

    class Watchdog(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.over = time.monotonic(), threading.Event()

        def on_train_begin(self, logs: Any = None) -> None:
            self.seen = time.monotonic()
            self.over.clear()
            threading.Thread(target=self.watch, daemon=True).start()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen = time.monotonic()

        on_test_batch_end = on_train_batch_end
        on_epoch_end = on_train_batch_end

        def on_train_end(self, logs: Any = None) -> None:
            self.over.set()

        def watch(self) -> None:
            while not self.over.wait(min(1.0, seconds / 4)):
                if time.monotonic() - self.seen > seconds:
                    leave(f"no step has finished for {seconds:.0f} s")

    return Watchdog()


@contextlib.contextmanager
def noticing_losses() -> Iterator[None]:
    """Ends this process with a sentence where a computation over several of them fails because one is gone."""
    if processes()[1] == 1:
        yield
        return
    try:
        yield
    except (RuntimeError, ValueError) as error:  # JAX raises either, by the collective that fails
        if not any(word in str(error) for word in ("Gloo", "NCCL", "coordination", "DEADLINE_EXCEEDED", "UNAVAILABLE")):
            raise
        leave(str(error).strip().splitlines()[0].replace("Error dispatching computation: ", ""))


def leave(reason: str) -> None:
    """Ends this process at once: the orderly end of JAX waits for the others."""
    identity, number = processes()
    print(
        f"\nProcess {identity} of {number} stops: another process has died or hangs ({reason}). "
        "Start all of them again with --resume to go on from the last checkpoint.",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os._exit(EXIT_CODE)
