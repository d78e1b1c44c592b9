"""Before anything imports TensorFlow: the backend, and quiet. Then what makes tests of graphs quick."""

import gc
import os
from pathlib import Path

# Two processes of pytest, and matrices far too small to share among threads.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
# For the processes that tests start on JAX: to compile takes longer there than to run.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Some virtual machines announce AMX and do not have it: there a product of bfloat16 matrices ends the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import numpy as np
import pytest

from experiments.harness.notices import silenced
from tests import slow

with silenced():
    import keras
    import tensorflow as tf
    from tensorflow.python.util import tf_stack

# Every operation of a graph keeps the stack that made it, which takes a tenth of the time of a test. One stack serves them all.
STACK = tf_stack.extract_stack()
tf_stack.extract_stack = lambda stacklevel=1: STACK

LONG = slow.listed()
PROGRAMS = [Path(__file__).with_name(name) for name in ("examples", "experiments")]


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    for item in items:
        if any(folder in item.path.parents for folder in PROGRAMS):
            item.add_marker(pytest.mark.programs)
        if item.nodeid in LONG:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """What is imported stays, so the garbage collector need not go through it again and again: another tenth."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


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
