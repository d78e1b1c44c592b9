"""What a GPU or TPU would have to run, read from traced graphs and lowered modules: the default paths need nothing special."""

from typing import Any

import keras
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

from benchmarks import audit
from keras_auxref import flows, layers, posteriors

ALL_CLEAN = {"host": [], "double": []}


@pytest.fixture(autouse=True)
def _needs_gpu_kernels() -> None:
    if all(kernel.device_type != "GPU" for kernel in kernels.get_registered_kernels_for_op("MatMul").kernel):
        pytest.skip("this build of TensorFlow registers no kernels for GPUs")


@pytest.mark.parametrize("name", audit.CLEAN)
def test_default_paths_run_on_a_gpu_in_single_precision(name: str) -> None:
    found = audit.audit({name: audit.CLEAN[name]})[name]
    assert "training" in found
    assert all(cells == ALL_CLEAN for cells in found.values()), found


def test_every_layer_and_every_mixing_is_asked() -> None:
    """Cells, and what is made of other layers, are asked as part of others."""
    made_of_others = {"Chain", "Flow", "Glow", "MultiScale", "OrthogonalRNNCell", "Repeat", "VariationalDequantisation"}
    public = {name: getattr(module, name) for module in (flows, layers, posteriors) for name in module.__all__}
    found = {name for name, value in public.items() if isinstance(value, type) and issubclass(value, keras.layers.Layer)}
    assert found - made_of_others == {name.split("(")[0] for name in audit.cases()} - {"Glow"}
    assert {f'Glow(mixing="{mixing}")' for mixing in flows.MIXINGS} <= set(audit.cases())


def test_the_audit_finds_what_there_is() -> None:
    layer = audit.cases()["ActNorm()"]()
    layer.build((None, 4))

    def look(function: Any) -> dict[str, list[str]]:
        return audit.on_tensorflow(layer, function, (4, 4), False)

    found = look(lambda x: tf.abs(tf.linalg.eigvals(tf.cast(x, "float64"))))
    assert found["host"] == ["Eig"]
    assert {"Cast", "Eig"} <= set(found["double"])
    nested = tf.function(lambda x: tf.cond(x[0, 0] > 0, lambda: tf.abs(tf.linalg.eigvals(x)), lambda: tf.abs(x[0])))
    assert look(nested)["host"] == ["Eig"]
    assert look(tf.abs) == ALL_CLEAN


@pytest.mark.slow
def test_default_paths_lower_for_cuda_and_tpu_without_custom_calls() -> None:
    pytest.importorskip("jax")
    found = audit.on_backend("jax", {**audit.CLEAN, "InvertibleDense()": ["log-determinant"]})
    calls = found.pop("InvertibleDense()")["log-determinant"]["cuda"]
    assert calls  # where there are some, they are seen
    for name, questions in found.items():
        assert all(cells == {"cuda": [], "tpu": []} for cells in questions.values()), (name, questions)
