"""Before anything imports TensorFlow: the backend, and quiet. Tests find `quiet` by pytest's `pythonpath`, as examples do."""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
# Some virtual machines announce AMX and do not have it: there a product of bfloat16 matrices ends the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import quiet  # noqa: F401  Keras without TensorFlow's start-up notices

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
