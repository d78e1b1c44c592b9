"""The signatures of a served model: functions of named tensors."""

import re
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import keras
import tensorflow as tf

from keras_auxref.typing import Tensor

Nest: TypeAlias = dict[str, Tensor] | list[Tensor] | tuple[Tensor, ...]
OUTPUTS = ("auto", "logits", "probabilities", "raw")
_AUTOMATIC_NAME = re.compile(r"(input_layer|keras_tensor|input|inputs)(_?\d+)?(_connection)?$")


class Signature(NamedTuple):
    """A function from named tensors to a dictionary of tensors, and what it takes."""

    function: Callable[..., dict[str, Tensor]]
    inputs: dict[str, tf.TensorSpec]


def signatures_of(model: keras.Model, outputs: str = "auto", input_signature: object = None) -> dict[str, Signature]:
    """The signatures of a classifier or of any other Keras model, by name, or the model's own, as for a flow.

    A model with a method `export_signatures` has its own: see `Glow.export_signatures`. For the rest see `export_saved_model`.
    """
    if outputs not in OUTPUTS:
        raise ValueError(f"Unknown kind of outputs. Expected one of {list(OUTPUTS)}. Received: {outputs!r}")
    if hasattr(model, "export_signatures"):
        return _offered(model)
    structure, specs = _inputs(model, input_signature)
    kind = _kind_of_outputs(model) if outputs == "auto" else outputs

    def serve(**tensors: object) -> dict[str, Tensor]:
        arguments = keras.tree.pack_sequence_as(structure, [tensors[name] for name in specs])
        return _named(model, model(arguments, training=False), kind)

    return {"serving_default": Signature(serve, specs)}


def _offered(model: keras.Model) -> dict[str, Signature]:
    """The signatures that a model has itself, with shapes and dtypes as specifications."""
    return {
        name: Signature(function, {key: tf.TensorSpec(shape, dtype, name=key) for key, (shape, dtype) in inputs.items()})
        for name, (function, inputs) in model.export_signatures().items()
    }


def _inputs(model: keras.Model, given: object) -> tuple[object, dict[str, tf.TensorSpec]]:
    """The nest of inputs that the model is called with, and the name and specification of each, in the order of the nest."""
    symbolic = getattr(model, "inputs", None)
    if given is not None:
        structure = given
    elif symbolic:
        # A functional model may take a dictionary; if Keras has no record of that, it takes its inputs one after another.
        structure = getattr(model, "_inputs_struct", symbolic[0] if len(symbolic) == 1 else list(symbolic))
    else:
        structure = _shape_of_call(model)
    leaves = keras.tree.flatten(structure)
    names = _names([getattr(leaf, "name", None) for leaf in leaves], structure)
    return structure, {name: _batched(leaf, name) for name, leaf in zip(names, leaves, strict=True)}


def _shape_of_call(model: keras.Model) -> keras.KerasTensor:
    """The input of a subclassed model that has been called, as Keras remembers it for `load_model`."""
    shapes = (getattr(model, "_build_shapes_dict", None) or {}) if model.built else {}
    shape = next(iter(shapes.values()), None)
    if len(shapes) != 1 or not isinstance(shape, tuple | list) or not all(n is None or isinstance(n, int) for n in shape):
        raise ValueError(
            "Nothing tells the shape of the inputs. Expected a functional or sequential model, a model that has been called with "
            "one tensor, or `input_signature`, a nest of tf.TensorSpec or of examples. Received: "
            f"{type(model).__name__}, built={model.built}"
        )
    return keras.KerasTensor(tuple(shape), dtype=model.input_dtype)


def _names(given: list[str | None], structure: object) -> list[str]:
    """A name for every input: its key, its own name or, if Keras generated that, `inputs`, `inputs_1`, …"""
    if isinstance(structure, dict):
        names = [str(key) for key in sorted(structure)]
        if len(names) == len(given):
            return [_identifier(name) for name in names]
    names = []
    for name in given:
        plain = _identifier(str(name).split(":")[0]) if name else ""
        candidate = "inputs" if not plain or _AUTOMATIC_NAME.match(plain) else plain
        number, unique = 0, candidate
        while unique in names:
            number += 1
            unique = f"{candidate}_{number}"
        names.append(unique)
    return names


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name, flags=re.ASCII)


def _batched(leaf: Tensor, name: str) -> tf.TensorSpec:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype") or len(leaf.shape) < 1:
        raise ValueError(
            "`input_signature` must be a nest of tensors with a batch axis. Expected tf.TensorSpec or examples. "
            f"Received: {leaf!r}"
        )
    return tf.TensorSpec((None, *leaf.shape[1:]), keras.backend.standardize_dtype(leaf.dtype), name=name)


def _kind_of_outputs(model: keras.Model) -> str:
    """The kind of outputs that the compiled loss implies; without one, probabilities after a softmax; otherwise raw."""
    loss = getattr(model, "loss", None)
    if isinstance(loss, list | tuple) and len(loss) == 1:
        loss = loss[0]
    name = getattr(loss, "name", None) or getattr(loss, "__name__", None) or loss
    if isinstance(name, str) and "crossentropy" in name.lower():
        return "logits" if getattr(loss, "from_logits", False) else "probabilities"
    if loss is None:
        last = model.layers[-1] if getattr(model, "layers", None) else None
        activation = getattr(last, "activation", None)
        if activation is keras.activations.softmax or isinstance(last, keras.layers.Softmax):
            return "probabilities"
    return "raw"


def _named(model: keras.Model, y: Tensor | Nest, kind: str) -> dict[str, Tensor]:
    if kind == "raw":
        return _raw(model, y)
    if isinstance(y, dict | list | tuple):
        raise ValueError(
            f"A classifier has one output. Expected a tensor for outputs={kind!r}. Received: {type(y).__name__} of "
            f"{len(y)}. Pass outputs='raw'."
        )
    binary = y.shape[-1] == 1
    probabilities = y
    if kind == "logits":
        probabilities = keras.ops.sigmoid(y) if binary else keras.ops.softmax(y, axis=-1)
    # Not `keras.ops.argmax`, which uses an operation that the converters to ONNX and LiteRT do not know.
    chosen = keras.ops.cast(probabilities[..., 0] > 0.5, "int64") if binary else tf.argmax(probabilities, axis=-1)
    return {"probabilities": probabilities, "class": chosen}


def _raw(model: keras.Model, y: Tensor | Nest) -> dict[str, Tensor]:
    if isinstance(y, dict):
        return {_identifier(str(key)): value for key, value in y.items()}
    if not isinstance(y, list | tuple):
        return {"outputs": y}
    names = getattr(model, "output_names", None) or []
    if len(set(names)) != len(y):
        names = [f"outputs_{i}" for i in range(len(y))]
    return {_identifier(name): value for name, value in zip(names, y, strict=True)}
