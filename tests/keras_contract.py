"""The one place that reaches into Keras' private testing module."""

from typing import Any


def run_layer_test(layer_class: type, **kwargs: Any) -> None:
    """Keras' own contract for layers: construction, serialisation, symbolic and eager calls, masks, training, mixed precision."""
    from keras.src.testing import TestCase

    TestCase().run_layer_test(layer_class, **kwargs)
