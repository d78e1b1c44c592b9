"""What importing costs, and who may import whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import keras_auxref

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "keras_auxref"
FLOORS = {
    "typing": 0,
    "_keras": 0,
    "ops": 1,
    "initializers": 2,
    "regularizers": 2,
    "kernels": 3,
    "invertible": 4,
    "layers": 5,
    "bijectors": 5,
    "flows": 6,
    "serving": 7,
}
BESIDE = {("layers", "bijectors"), ("bijectors", "layers")}
"""On one floor, and strangers all the same."""


def _run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()


def test_importing_adds_nothing_but_itself_to_tensorflow_and_keras():
    """No TFP, no TFDS, no plotting. (Keras imports some of those itself where they are installed.)"""
    code = "import sys, tensorflow, keras; before = set(sys.modules); import keras_auxref; print(*(set(sys.modules) - before))"
    foreign = [name for name in _run(code) if name.split(".")[0] not in {"keras_auxref", *sys.stdlib_module_names}]
    assert foreign == []


def test_bijectors_arrive_when_asked_for():
    assert _run("import keras_auxref, sys; keras_auxref.bijectors; print('tensorflow_probability' in sys.modules)") == ["True"]
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = keras_auxref.nonsense


def test_nothing_imports_upwards():
    """ops → initializers → kernels → the contract of invertible layers → layers, bijectors → flows → serving."""
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        floor = FLOORS.get(room)
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if names == ["keras_auxref"]:
                names = [f"keras_auxref.{alias.name}" for alias in node.names]
            for name in names:
                parts = name.split(".")
                target = FLOORS.get(parts[1]) if len(parts) > 1 and parts[0] == "keras_auxref" else None
                if floor is not None and target is not None and (target > floor or (room, parts[1]) in BESIDE):
                    wrong.append(f"{path.name} imports {name}")
    assert wrong == []


def test_layers_and_what_they_are_made_of_do_not_import_tensorflow():
    """Other backends neither need nor load it: where it is used, it is imported inside of the function that uses it."""
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if room in ("ops", "bijectors", "flows", "serving"):
            continue
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong += [f"{path.name} imports {name}" for name in names if name.split(".")[0].startswith("tensorflow")]
    assert wrong == []


def test_models_load_after_importing_the_package_and_nothing_else(tmp_path):
    import numpy as np

    model = keras_auxref.Glow((4, 4, 1), levels=1, steps=1, hidden=4)
    images = np.random.default_rng(0).integers(0, 256, (8, 4, 4, 1), dtype="uint8")
    model.fit(images, verbose=0)
    model.save(tmp_path / "flow.keras")
    code = f"""
import sys
import keras, keras_auxref
print("keras_auxref.flows" in sys.modules)
model = keras.models.load_model({str(tmp_path / "flow.keras")!r})
print(type(model).__name__, type(model.optimizer).__name__, int(model.optimizer.iterations))
"""
    assert _run(code) == ["False", "Glow", type(model.optimizer).__name__, "1"]


def test_every_class_is_registered_by_importing_the_package():
    names = """
import keras
mine = lambda: {name for name in keras.saving.get_custom_objects() if name.startswith("keras_auxref>")}
import keras_auxref
before = mine()
import importlib, pkgutil
for module in pkgutil.walk_packages(keras_auxref.__path__, "keras_auxref."):
    if not module.name.endswith(("show", "__main__")) and ".backend." not in module.name:
        importlib.import_module(module.name)
print(len(before), *(mine() - before))
"""
    found = _run(names)
    assert int(found[0]) > 15
    assert found[1:] == []


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_forward_maps_run_on_every_backend(backend):
    pytest.importorskip(backend)
    code = f"""
import os
os.environ["KERAS_BACKEND"] = "{backend}"
import numpy as np
from keras import ops as k
from keras_auxref import ops
rng = np.random.default_rng(0)
x, w = rng.normal(size=(3, 5)), rng.normal(size=(5, 5))
w = np.eye(5) + 0.2 * w @ w.T / np.linalg.norm(w @ w.T, 2)
u = x @ w.T
expected = x - 2 * u * (u * x).sum(-1, keepdims=True) / (u * u).sum(-1, keepdims=True)
x, w = (t.astype("float32") for t in (x, w))
for computed, target in [
    (ops.reflect(x, w), expected),
    (ops.householder(u.astype("float32"), x), expected),
    (ops.newton_inverse(expected.astype("float32"), w), x),
    (k.einsum("nij,nj->ni", ops.jacobian(x, w), k.convert_to_tensor(x)), expected),  # f is homogeneous: J x = f(x)
]:
    print(float(np.abs(k.convert_to_numpy(computed) - target).max()) < 1e-4)
"""
    assert _run(code) == ["True"] * 4


def test_docstring_examples():
    import doctest
    import importlib

    ran = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        if ">>>" in path.read_text():
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
            assert result.failed == 0, name
            ran += result.attempted
    assert ran >= 8
