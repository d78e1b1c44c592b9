"""Before anything imports TensorFlow: the backend, and quiet."""

import os
from pathlib import Path

# Two processes of pytest, and matrices far too small to share among threads.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
# Some virtual machines announce AMX and do not have it: there a product of bfloat16 matrices ends the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import numpy as np
import pytest

from experiments.harness.notices import silenced
from tests import slow

with silenced():
    import keras
    import tensorflow as tf

LONG = slow.listed()
PROGRAMS = [Path(__file__).with_name(name) for name in ("examples", "experiments")]


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    for item in items:
        if any(folder in item.path.parents for folder in PROGRAMS):
            item.add_marker(pytest.mark.programs)
        if item.nodeid in LONG:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _seed():
    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def _optimiser_of_graphs(request):
    """Grappler takes half of the time of a first call. It is on only where a test asks whether it breaks a formula."""
    off = request.node.get_closest_marker("grappler") is None
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": off})


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param
