"""Checkpoints that a kill cannot break: a file is written aside and renamed, and the one before stays until the next."""

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras

from keras_auxref.flows.averaging import as_trained

SECONDS = 30.0
"""Epochs that take less share a checkpoint: to write one takes time too."""
KEPT = 2
_NAME = re.compile(r"epoch-(\d+)\.weights\.h5")

Gather = Callable[[list[int]], list[list[int]]]
"""The numbers of every process, asked by all of them together: `distribution.gather`."""


def one_process(values: list[int]) -> list[list[int]]:
    return [values]


class Checkpoint(keras.callbacks.Callback):
    """After an epoch, write the weights and the state of the optimizer to `folder`, as one file with the epoch in its name.

    `keras.callbacks.BackupAndRestore` writes weights and epoch one after the other and in place. Killed meanwhile, it leaves what
    it cannot read or, with `double_checkpoint=True`, weights of one epoch with the number of another.

    Of several processes all write or none does, each to a folder of its own: clocks differ, and `restore` needs an epoch that
    every process has.
    """

    def __init__(self, folder: Path, gather: Gather = one_process) -> None:
        super().__init__()
        self.folder, self.gather = folder, gather

    def on_train_begin(self, logs: Any = None) -> None:
        self.written = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        due = int(time.perf_counter() - self.written >= SECONDS)
        if not all(other for (other,) in self.gather([due])):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = self.folder / "writing.weights.h5"
        with as_trained(self.model):
            self.model.save_weights(aside)
        os.replace(aside, self.folder / f"epoch-{epoch + 1}.weights.h5")
        for _, file in _found(self.folder)[KEPT:]:
            file.unlink()
        self.written = time.perf_counter()


def restore(model: keras.Model, folder: Path, gather: Gather = one_process) -> int:
    """Give a model with a built optimizer the newest checkpoint that can be read; returns the epochs that it has seen.

    Without one the model stays as it is, and 0 is returned. Of several processes each has checkpoints of its own, and one may
    have been lost before it wrote the last: they take the newest epoch that all of them can read.
    """
    variables = [*model.variables, *model.optimizer.variables]
    before = [keras.ops.convert_to_numpy(variable) for variable in variables]
    files = {epoch: file for epoch, file in _found(folder)[: KEPT + 1] if _readable(file)}
    known = gather([*files, *[0] * (KEPT + 1 - len(files))])
    for epoch in sorted(set(files).intersection(*known), reverse=True):
        try:
            model.load_weights(files[epoch])
            return epoch
        except Exception as error:  # a whole file of another model
            _skipped(files[epoch], error)
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)
    return 0


def _readable(file: Path) -> bool:
    """Whether all of a file can be read. To find out by loading it would leave other processes waiting for this one."""
    try:
        with h5py.File(file) as content:
            content.visititems(_read)
        return True
    except Exception as error:  # whatever a damaged file leads to
        _skipped(file, error)
        return False


def _read(name: str, item: h5py.Dataset | h5py.Group) -> None:
    if isinstance(item, h5py.Dataset):
        item[()]


def _skipped(file: Path, error: Exception) -> None:
    print(f"{file}: expected a checkpoint, received what cannot be read ({type(error).__name__}); going back further.")


def remove(folder: Path) -> None:
    """Remove all checkpoints of a run."""
    shutil.rmtree(folder, ignore_errors=True)


def _found(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a run with their epochs, the newest first."""
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(((int(match[1]), file) for file in files if (match := _NAME.fullmatch(file.name))), reverse=True)
