"""Training with `model.fit`, timed and recorded epoch by epoch, and resumed after an interruption."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from experiments.harness.checkpoints import Checkpoint, remove, restore
from experiments.harness.results import Results, Run

Data = tuple[np.ndarray, ...]  # what `fit` takes: (inputs, labels), or (inputs,) for a model that needs no labels
Measures = Callable[[dict[str, float]], dict[str, float]]
# Large, because every validation step computes the orthogonal matrices anew.
VALIDATION_BATCH = 1000


def classification(logs: dict[str, float]) -> dict[str, float]:
    """What is recorded of a classifier compiled with `metrics=["accuracy"]`."""
    return {
        "training_loss": logs["loss"],
        "validation_loss": logs["val_loss"],
        "validation_error": 1.0 - logs["val_accuracy"],
    }


class EpochRecorder(keras.callbacks.Callback):
    """After every epoch, append its measurements and its training time to a run, and save the run.

    The time is that of the training steps, from the start of the first to the end of the last: neither the validation
    nor Keras' preparation of an epoch is in it.
    """

    def __init__(self, run: Run, results: Results, measures: Measures = classification) -> None:
        super().__init__()
        self.run, self.results, self.measures = run, results, measures
        self.started = self.stopped = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            self.started = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.params["steps"] in (None, batch + 1):
            # A GPU may still be computing; reading a trained weight waits for it.
            keras.ops.convert_to_numpy(self.model.trainable_variables[-1])
            self.stopped = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        before = self.run.curves.get("seconds", [])[:epoch]
        values = {"seconds": (before[-1] if before else 0.0) + self.stopped - self.started, **self.measures(logs or {})}
        for name, value in values.items():
            # Cut first: a resumed run may repeat an epoch that was recorded but not yet in the checkpoint.
            self.run.curves[name] = [*self.run.curves.get(name, [])[:epoch], float(value)]
        self.results.save(self.run)


def train(
    model: keras.Model,
    data: Data,
    validation: Data,
    run: Run,
    results: Results,
    *,
    epochs: int,
    batch_size: int,
    checkpoints: Path,
    measures: Measures = classification,
    callbacks: tuple[keras.callbacks.Callback, ...] = (),
    verbose: Any = "auto",
    steps_per_epoch: int | None = None,
    validation_batch: int = VALIDATION_BATCH,
    save: Path | None = None,
    afterwards: Callable[[], dict[str, Any]] | None = None,
) -> None:
    """Train a compiled model and record it in `results`, going on from the last readable checkpoint of an unfinished run.

    A checkpoint of the model and its optimizer is kept in the folder `checkpoints` during the run and removed at its end.
    Continuing is not bit for bit the uninterrupted run: the order of the images starts anew. With `steps_per_epoch` an epoch is
    that many steps, whatever the number of images. The trained model goes to the file `save`, what `afterwards` measures on it
    becomes `run.measurements`, and the run counts as finished only then.
    """
    if not run.curves:
        remove(checkpoints)
    # Keras cuts the epoch short in which it comes to the end of arrays, so that steps are counted on data without an end.
    feed = {"x": _endless(data, batch_size), "shuffle": False} if steps_per_epoch else _arrays(data, batch_size)
    _warm_up(model, data, batch_size, feed if steps_per_epoch else None)
    model.fit(
        **feed,
        validation_data=validation,
        epochs=epochs,
        initial_epoch=restore(model, checkpoints),
        steps_per_epoch=steps_per_epoch,
        validation_batch_size=validation_batch,
        verbose=verbose,
        # The record is written before the checkpoint, so that it never has an epoch less.
        callbacks=[EpochRecorder(run, results, measures), Checkpoint(checkpoints), *callbacks],
    )
    if save:
        save_model(model, save)
    if afterwards:
        run.measurements = afterwards()
    run.finished = True
    results.save(run)
    remove(checkpoints)


def save_model(model: keras.Model, path: Path) -> None:
    """Write a `.keras` file aside and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.stem}.{os.getpid()}.tmp.keras")
    model.save(aside)
    os.replace(aside, path)


def _arrays(data: Data, batch_size: int) -> dict[str, Any]:
    return {**dict(zip(("x", "y"), data, strict=False)), "batch_size": batch_size}


def _endless(data: Data, batch_size: int) -> Any:
    """Full batches of one random order of the data after another, as a `tf.data.Dataset`."""
    import tensorflow as tf

    parts = [tf.convert_to_tensor(part) for part in data]
    order = tf.data.Dataset.range(len(data[0])).shuffle(len(data[0])).repeat().batch(batch_size, drop_remainder=True)
    return order.map(lambda chosen: tuple(tf.gather(part, chosen) for part in parts)).prefetch(1)


def _warm_up(model: keras.Model, data: Data, batch_size: int, endless: dict[str, Any] | None = None) -> None:
    """Trace and compile the training step before the clock starts, and leave the model as it was.

    Two batches, a full one and one of the size of the last, because XLA compiles for every batch size; one of `endless` data.
    """
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    before = [keras.ops.convert_to_numpy(variable) for variable in variables]
    count = len(data[0])
    sample = min(count, batch_size + count % batch_size)
    feed = {**endless, "steps_per_epoch": 1} if endless else _arrays(tuple(part[:sample] for part in data), batch_size)
    model.fit(**feed, verbose=0)
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)
