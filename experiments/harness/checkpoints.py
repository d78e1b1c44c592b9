"""Checkpoints that a kill cannot break: a file is written aside and renamed, and the one before stays until the next."""

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

SECONDS = 30.0
"""Epochs that take less share a checkpoint: to write one takes time too."""
KEPT = 2
_NAME = re.compile(r"epoch-(\d+)\.weights\.h5")


class Checkpoint(keras.callbacks.Callback):
    """After an epoch, write the weights and the state of the optimizer to `folder`, as one file with the epoch in its name.

    `keras.callbacks.BackupAndRestore` writes weights and epoch one after the other and in place. Killed meanwhile, it leaves what
    it cannot read or, with `double_checkpoint=True`, weights of one epoch with the number of another.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_begin(self, logs: Any = None) -> None:
        self.written = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if time.perf_counter() - self.written < SECONDS:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = self.folder / "writing.weights.h5"
        self.model.save_weights(aside)
        os.replace(aside, self.folder / f"epoch-{epoch + 1}.weights.h5")
        for _, file in _found(self.folder)[KEPT:]:
            file.unlink()
        self.written = time.perf_counter()


def restore(model: keras.Model, folder: Path, agreed: Callable[[int], int] = lambda epoch: epoch) -> int:
    """Give a model with a built optimizer the newest checkpoint that can be read; returns the epochs that it has seen.

    Without one the model stays as it is, and 0 is returned. Of several processes each has checkpoints of its own, and one may
    have been lost before it wrote the last: `agreed` says from the newest epoch here what to begin with (`distribution.agreed`).
    """
    latest = agreed(max((epoch for epoch, _ in _found(folder)), default=0))
    variables = [*model.variables, *model.optimizer.variables]
    before = [keras.ops.convert_to_numpy(variable) for variable in variables]
    for epoch, file in _found(folder):
        if epoch > latest:
            continue
        try:
            model.load_weights(file)
            return epoch
        except Exception as error:  # whatever a damaged file leads to
            print(f"{file}: expected a checkpoint, received what cannot be read ({type(error).__name__}); going back further.")
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)
    return 0


def remove(folder: Path) -> None:
    """Remove all checkpoints of a run."""
    shutil.rmtree(folder, ignore_errors=True)


def _found(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a run with their epochs, the newest first."""
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(((int(match[1]), file) for file in files if (match := _NAME.fullmatch(file.name))), reverse=True)
