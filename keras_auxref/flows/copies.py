"""Copies of a layer that is not built, each from its configuration and with its own initial values."""

import random
from typing import Any

import keras

from keras_auxref.typing import Config


class Hidden:
    """Hides layers from tracking and saving: templates, whose own variables are not used."""

    def __init__(self, value: Any) -> None:
        self.value = value


def clone(layer: keras.layers.Layer, number: int = 0, **changes: object) -> keras.layers.Layer:
    """A new layer with the configuration of this one, and other seeds where `number` is not 0.

    If the configuration has a seed, the seed of the copy follows from it and the number: copies differ, but are reproducible.
    If it has none (`None`), every copy draws its own, as Keras layers do.
    """
    config = {**_reseeded(_plain(layer.get_config()), number), **changes}
    known = {type(part).__name__: type(part) for part in layer._flatten_layers()}  # registered or not
    with keras.saving.custom_object_scope(known):
        return type(layer).from_config(config)


def serialized(layer: keras.layers.Layer) -> Config:
    """`keras.saving.serialize_keras_object` of a template.

    The shapes it was built for are left out, and its dtype policy is written by name.
    """
    return _plain(keras.saving.serialize_keras_object(layer))


def _plain(nest: Any) -> Any:
    if isinstance(nest, dict):
        if nest.get("class_name") == "DTypePolicy":
            return nest["config"]["name"]
        return {key: _plain(value) for key, value in nest.items() if key != "build_config"}
    return type(nest)(map(_plain, nest)) if isinstance(nest, list | tuple) else nest


def _reseeded(nest: Any, number: int) -> Any:
    """A configuration in which every integer named `seed` is replaced by another; for number 0 it is unchanged."""
    if number == 0:
        return nest
    if isinstance(nest, dict):
        return {key: _new_seed(value, number) if key == "seed" else _reseeded(value, number) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        return type(nest)(_reseeded(value, number) for value in nest)
    return nest


def _new_seed(seed: object, number: int) -> object:
    if isinstance(seed, bool) or not isinstance(seed, int):
        return _reseeded(seed, number)
    return random.Random(f"{seed} {number}").randrange(1, 2**31)
