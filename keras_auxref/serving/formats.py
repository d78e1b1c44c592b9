"""Classifiers as ONNX and LiteRT files, through Keras' own converters."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import keras

from keras_auxref.flows import Glow
from keras_auxref.layers._frozen import frozen
from keras_auxref.ops._checks import require_tensorflow


def export_onnx(model: keras.Model, path: Any, **kwargs: Any) -> Path:
    """Writes a model as an ONNX file: `model.export(path, format="onnx")`."""
    return _export(model, path, "onnx", kwargs)


def export_litert(model: keras.Model, path: Any, **kwargs: Any) -> Path:
    return _export(model, path, "litert", kwargs)


def _export(model: keras.Model, path: Any, format: str, kwargs: dict[str, Any]) -> Path:
    with frozen(model):
        model.export(path, format=format, **kwargs)
    return Path(path)
