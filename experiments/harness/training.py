"""Training with `model.fit`, timed and recorded epoch by epoch, and resumed after an interruption."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from experiments.harness import distribution
from experiments.harness.checkpoints import Checkpoint, one_process, remove, restore
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
            # A GPU may still be computing; reading a trained weight waits for it. On JAX the model has to take it back first.
            if keras.backend.backend() == "jax":
                self.model.jax_state_sync()
            keras.ops.convert_to_numpy(self.model.trainable_variables[-1])
            self.stopped = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        before = self.run.curves.get("seconds", [])[:epoch]
        values = {"seconds": (before[-1] if before else 0.0) + self.stopped - self.started, **self.measures(logs or {})}
        for name, value in values.items():
            # Cut first: a resumed run may repeat an epoch that was recorded but not yet in the checkpoint.
            self.run.curves[name] = [*self.run.curves.get(name, [])[:epoch], float(value)]
        self.results.save(self.run)


class WithoutAverage(keras.callbacks.Callback):
    """Where an optimizer averages weights, also record what the weights that it trains reach: a training without the average.

    After every epoch the curve `validation_bits_without_average` grows by one number, on the images that `fit` validates on.
    After the last one, `result` is the number on `all_images`. On TensorFlow alone.
    """

    def __init__(self, run: Run, images: np.ndarray, all_images: np.ndarray, epochs: int, batch_size: int) -> None:
        super().__init__()
        self.run, self.images, self.all_images, self.epochs, self.batch_size = run, images, all_images, epochs, batch_size
        self.epoch, self.result = 0, {}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch + 1 == self.params["steps"]:  # the end of an epoch, before the average is in the model
            name = "validation_bits_without_average"
            self.run.curves[name] = [*self.run.curves.get(name, [])[: self.epoch], self._bits(self.images)]
            if self.epoch + 1 == self.epochs:
                self.result = {"bits_per_dim_without_average": self._bits(self.all_images)}

    def _bits(self, images: np.ndarray) -> float:
        before = [keras.ops.convert_to_numpy(variable) for variable in self.model.metrics_variables]
        values = self.model.evaluate(images, batch_size=self.batch_size, verbose=0, return_dict=True)
        for variable, value in zip(self.model.metrics_variables, before, strict=True):
            variable.assign(value)  # `fit` is not through with the metrics of its epoch
        return float(values["bits_per_dim"])


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
    afterwards: Callable[[Any], dict[str, Any]] | None = None,
    flips: bool = False,
) -> None:
    """Train a compiled model and record it in `results`, going on from the last readable checkpoint of an unfinished run.

    A checkpoint of the model and its optimizer is kept in the folder `checkpoints` during the run and removed at its end.
    Continuing is not bit for bit the uninterrupted run: the order of the images starts anew. With `steps_per_epoch` an epoch is
    that many steps, whatever the number of images. The trained model goes to the file `save`, what `afterwards` measures on it
    becomes `run.measurements`, and the run counts as finished only then. With `steps_per_epoch` and `flips`, half of
    the images, at random, are mirrored left and right.

    Where a distribution is set, every process takes its share of the training and validation batches, and measures afterwards
    on a copy of the model of its own, so that nothing there waits for the others.
    """
    if not run.curves:
        remove(checkpoints)
    distributed = distribution.is_on()
    gather = distribution.gather if distributed else one_process
    watching = [distribution.watchdog()] if distributed and distribution.processes()[1] > 1 else []
    checked: dict[str, Any] = {"validation_data": validation, "validation_batch_size": validation_batch}
    if distributed:
        feed = {"x": distribution.batches(data, batch_size, run.seed, steps_per_epoch)}
        checked = {"validation_data": distribution.validation_batches(validation, validation_batch)}
        full = tuple(part[:batch_size] for part in data)
        trial = {"x": distribution.batches(full, batch_size, seed=None), "callbacks": watching}
    elif steps_per_epoch:
        # Keras cuts the epoch short in which it comes to the end of arrays, so that steps are counted on data without an end.
        feed = {"x": _endless(data, batch_size, flips), "shuffle": False, "steps_per_epoch": steps_per_epoch}
        trial = {**feed, "steps_per_epoch": 1}
    else:
        feed = _arrays(data, batch_size)
        trial = trial_batches(data, batch_size)
    warm_up(model, trial)
    first = restore(model, checkpoints, gather)
    if distributed:
        feed["x"].epoch = first
    # The record is written before the checkpoint, so that it never has an epoch less.
    recording = [EpochRecorder(run, results, measures), Checkpoint(checkpoints, gather), *callbacks, *watching]
    model.fit(**feed, **checked, epochs=epochs, initial_epoch=first, verbose=verbose, callbacks=recording)
    trained = save or (checkpoints / "trained.keras" if distributed else None)
    if trained:
        save_model(model, trained)
    if afterwards and distributed:
        with distribution.alone():
            run.measurements = afterwards(keras.models.load_model(trained))
    elif afterwards:
        run.measurements = afterwards(model)
    run.finished = True
    results.save(run)
    gather([1])  # waits for the others: one that is lost before it has come so far needs the checkpoints of all
    remove(checkpoints)


def optimizers(rest: keras.optimizers.Optimizer, own: keras.optimizers.Optimizer, path: str) -> keras.optimizers.Optimizer:
    """One optimizer for the variables whose path matches, and another for the rest."""
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        raise SystemExit(
            "The experiment needs keras.optimizers.MultiOptimizer, which this version of Keras lacks: pip install -U keras."
        )
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(rest, {path: own}))


def save_model(model: keras.Model, path: Path) -> None:
    """Write a `.keras` file aside and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.stem}.{os.getpid()}.tmp.keras")
    model.save(aside)
    os.replace(aside, path)


def _arrays(data: Data, batch_size: int) -> dict[str, Any]:
    return {**dict(zip(("x", "y"), data, strict=False)), "batch_size": batch_size}


def _endless(data: Data, batch_size: int, flips: bool = False) -> Any:
    """Full batches of one random order of the data after another, as a `tf.data.Dataset`; with `flips`, half of them mirrored."""
    import tensorflow as tf

    parts = [tf.convert_to_tensor(part) for part in data]
    order = tf.data.Dataset.range(len(data[0])).shuffle(len(data[0])).repeat().batch(batch_size, drop_remainder=True)

    def batch(chosen: Any) -> tuple[Any, ...]:
        x, *rest = (tf.gather(part, chosen) for part in parts)
        return (tf.image.random_flip_left_right(x) if flips else x, *rest)

    return order.map(batch).prefetch(1)


def trial_batches(data: Data, batch_size: int) -> dict[str, Any]:
    """A full batch and one of the size of the last, because XLA compiles for every batch size."""
    sample = min(len(data[0]), batch_size + len(data[0]) % batch_size)
    return _arrays(tuple(part[:sample] for part in data), batch_size)


def warm_up(model: keras.Model, trial: dict[str, Any]) -> None:
    """Trace and compile the training step on a few batches before the clock starts, and leave the model as it was."""
    # Only TensorFlow has strategies.
    strategy = getattr(model, "distribute_strategy", None)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    before = [keras.ops.convert_to_numpy(variable) for variable in variables]
    model.fit(**trial, verbose=0)
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)
