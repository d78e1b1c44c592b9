"""A folder of SavedModels as TensorFlow Serving lays it out, `NAME/1/`, `NAME/2/`, …, loaded by TensorFlow alone."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .notices import silenced
from .protocol import DTYPES, Request, RequestError, Signature, Tensor


class ModelError(Exception):
    """A folder that cannot be served; the message is one sentence."""


@dataclass(frozen=True)
class Description:
    """What there is to know of a model without loading it."""

    folder: Path
    version: int
    signatures: Mapping[str, Signature]

    @property
    def name(self) -> str:
        return self.folder.name


def describe(folders: Sequence[Path]) -> list[Description]:
    """Load the highest version in each folder, to see that it can be served, and tell what it is."""
    models = [SavedModel(folder, latest_version(folder)) for folder in folders]
    return [Description(model.folder, model.version, model.signatures) for model in models]


def end_with_parent() -> None:
    """Have this process end when the one that started it was killed, and can stop it no more."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def latest_version(folder: Path) -> int:
    """The highest number among the sub-folders with a SavedModel."""
    versions = [int(path.parent.name) for path in folder.glob("*/saved_model.pb") if path.parent.name.isdecimal()]
    if not versions:
        raise ModelError(
            f"Expected SavedModels in numbered folders, {folder.name}/1/saved_model.pb and so on, found none in {folder}."
        )
    return max(versions)


class SavedModel:
    """One version of a model, loaded.

    Args:
        folder: The folder that holds the versions.
        version: Which of them.
    """

    def __init__(self, folder: Path, version: int) -> None:
        with silenced():
            import tensorflow as tf

        self.folder, self.version = folder, version
        try:
            # The functions hold their variables weakly: the model has to live as long as they do.
            self._model: Any = tf.saved_model.load(str(folder / str(version)))
        except (OSError, ValueError, tf.errors.OpError) as error:
            raise ModelError(
                f"Expected a SavedModel in {folder}/{version}, received one that does not load: {_line(error)}."
            ) from error
        self._functions = {name: function for name, function in self._model.signatures.items() if not name.startswith("__")}
        self.signatures = {name: _signature(function) for name, function in self._functions.items()}
        if not self.signatures:
            raise ModelError(f"Expected a SavedModel with signatures in {folder}/{version}, received one without.")
        for name, signature in self.signatures.items():
            others = {tensor.dtype for tensor in [*signature.inputs.values(), *signature.outputs.values()]} - set(DTYPES)
            if others:
                raise ModelError(
                    f"Expected numbers, truth values or text in {folder.name}:{name}, received {', '.join(sorted(others))}."
                )

    def warm_up(self) -> None:
        """Call every signature once, with zeros: TensorFlow optimises a graph at its first call, which takes up to seconds."""
        for name, signature in self.signatures.items():
            inputs = {key: _smallest(tensor) for key, tensor in signature.inputs.items()}
            # A model may refuse zeros. If there is more to it, the first request will tell.
            with contextlib.suppress(Exception):
                self.run(Request(name, inputs, False))

    def run(self, request: Request) -> dict[str, np.ndarray]:
        """Compute the outputs of a request."""
        import tensorflow as tf

        specs = self.signatures[request.signature].inputs
        inputs = {name: tf.constant(array, specs[name].dtype) for name, array in request.inputs.items()}
        try:
            return {name: value.numpy() for name, value in self._functions[request.signature](**inputs).items()}
        except tf.errors.InvalidArgumentError as error:
            # What only the model knows, such as a temperature below 0.
            raise RequestError(f"The model refused its inputs: {_line(error)}.") from error


def _signature(function: Any) -> Signature:
    def tensors(specs: dict[str, Any]) -> dict[str, Tensor]:
        return {
            name: Tensor(None if spec.shape.rank is None else tuple(spec.shape.as_list()), spec.dtype.name)
            for name, spec in sorted(specs.items())
        }

    return Signature(tensors(function.structured_input_signature[1]), tensors(function.structured_outputs))


def _smallest(tensor: Tensor) -> np.ndarray:
    """One row of zeros, or the number 1."""
    shape = tuple(size or 1 for size in tensor.shape or ())
    return np.full(
        shape, "" if tensor.dtype == "string" else int(not shape), object if tensor.dtype == "string" else tensor.dtype
    )


def _line(error: Exception) -> str:
    """What went wrong, which is the last line of TensorFlow's messages that is not about where."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line[0].isspace()]
    return (lines[-1] if lines else type(error).__name__).rstrip(". ")
