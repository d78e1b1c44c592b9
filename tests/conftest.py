"""Before anything imports TensorFlow: quiet, and two threads per worker at most."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _seed():
    keras.utils.set_random_seed(0)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param
