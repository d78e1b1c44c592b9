"""How the package hangs on Keras: the name that it registers under, classes that are found before they are imported, scopes."""

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras

PACKAGE = "keras_auxref"


def register_later(module: str, *names: str) -> None:
    """Lets `keras.models.load_model` find classes of a module that is not imported until one of them is asked for.

    Args:
        module: A module that registers these classes with `keras.saving.register_keras_serializable(PACKAGE)`.
        *names: Their names.
    """
    objects = keras.saving.get_custom_objects()
    for name in names:
        objects.setdefault(f"{PACKAGE}>{name}", type(name, (), {"from_config": classmethod(_from_config), "module": module}))


def _from_config(placeholder: Any, config: dict[str, Any]) -> Any:
    importlib.import_module(placeholder.module)  # puts the class itself in the place of the placeholder
    return keras.saving.get_custom_objects()[f"{PACKAGE}>{placeholder.__name__}"].from_config(config)


def outside_graphs() -> AbstractContextManager[Any]:
    """The scope in which initial values are numbers and not nodes of the graph being traced."""
    if keras.backend.backend() != "tensorflow":
        return nullcontext()
    import tensorflow as tf

    return tf.init_scope()
