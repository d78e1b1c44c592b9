import importlib
import sys

import keras
import pytest


@pytest.mark.parametrize("backend", ["jax", "torch", "numpy"])
@pytest.mark.parametrize("name", ["keras_auxref.bijectors", "keras_auxref.bijectors.householder"])
def test_another_backend_is_refused_at_the_import(monkeypatch, backend, name):
    for module in [module for module in sys.modules if module.startswith("keras_auxref.bijectors")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(keras.backend, "backend", lambda: backend)
    with pytest.raises(
        NotImplementedError, match=rf"Expected the TensorFlow backend of Keras. Received: KERAS_BACKEND='{backend}'"
    ):
        importlib.import_module(name)
