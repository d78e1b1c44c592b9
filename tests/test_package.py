"""What importing costs, and who may import whom."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import keras_auxref

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "keras_auxref"
FLOORS = {
    "typing": 0,
    "package": 0,
    "ops": 1,
    "initializers": 2,
    "regularizers": 2,
    "certificate": 2,
    "kernels": 3,
    "methods": 2,
    "invertible": 3,
    "lipschitz": 3,
    "layers": 4,
    "bijectors": 4,
    "flows": 5,
    "posteriors": 5,
    "serving": 6,
}
BESIDE = {("layers", "bijectors"), ("bijectors", "layers"), ("flows", "posteriors"), ("posteriors", "flows")}
"""On one floor, and strangers all the same."""


def _run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()


FRESH = """
import json, sys
import tensorflow, keras

found, modules = {}, set(sys.modules)
mine = lambda: {name for name in keras.saving.get_custom_objects() if name.startswith("keras_auxref>")}
import keras_auxref

found["modules"], registered = sorted(set(sys.modules) - modules), mine()
model = keras.models.load_model(sys.argv[1])
found["model"] = [type(model).__name__, type(model.optimizer).__name__, int(model.optimizer.iterations)]
keras_auxref.bijectors
found["probability"] = "tensorflow_probability" in sys.modules

import importlib, pkgutil

for module in pkgutil.walk_packages(keras_auxref.__path__, "keras_auxref."):
    if not module.name.endswith(("show", "__main__")) and ".backend." not in module.name:
        importlib.import_module(module.name)
found["registered"], found["late"] = len(registered), sorted(mine() - registered)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """What a new process finds that imports the package, loads a model, and then looks further: one, since each takes seconds."""
    import numpy as np

    path = str(tmp_path_factory.mktemp("fresh") / "flow.keras")
    model = keras_auxref.Glow((4, 4, 1), levels=1, steps=1, hidden=4)
    model.fit(np.random.default_rng(0).integers(0, 256, (8, 4, 4, 1), dtype="uint8"), verbose=0)
    model.save(path)
    done = subprocess.run([sys.executable, "-c", FRESH, path], capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_adds_nothing_but_itself_to_tensorflow_and_keras(fresh):
    """No TFP, no TFDS, no plotting. (Keras imports some of those itself where they are installed.)"""
    own = {"keras_auxref", *sys.stdlib_module_names}
    assert [name for name in fresh["modules"] if name.split(".")[0] not in own] == []


def test_bijectors_arrive_when_asked_for(fresh):
    assert fresh["probability"]
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = keras_auxref.nonsense


def test_models_load_after_importing_the_package_and_nothing_else(fresh):
    assert fresh["model"] == ["Glow", type(keras_auxref.Glow.optimizer()).__name__, 1]


def test_every_class_is_registered_by_importing_the_package(fresh):
    assert fresh["registered"] > 15
    assert fresh["late"] == []


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


def _imported(path):
    """Every name that a file imports, in full."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_room_uses_what_another_keeps_private():
    """A name or a file with an underscore belongs to its folder."""
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        for name in _imported(path):
            parts = name.split(".")
            private = [i for i, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")]
            if private and parts[0] == "keras_auxref":
                owner = PACKAGE.parent.joinpath(*parts[: private[0]])
                folder = owner if owner.is_dir() else owner.parent
                wrong += [] if path.is_relative_to(folder) else [f"{path.name} imports {name}"]
    assert wrong == []


def test_neither_tests_nor_benchmarks_import_examples():
    files = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    assert [path.name for path in files if any(name.split(".")[0] == "examples" for name in _imported(path))] == []


KNOWS_TENSORFLOW = {"model.py"}
"""The distribution of a flow is made of TensorFlow Probability, and what it serves of TensorFlow."""


def test_nothing_but_the_seam_knows_the_backends():
    """`ops/backend` is the only place that asks which backend runs or imports one; bijectors and serving live on TensorFlow."""
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if path.parent.name == "backend" or room in ("bijectors", "serving") or path.name in KNOWS_TENSORFLOW:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            frameworks = [
                name for name in names if name.split(".")[0] in {"tensorflow", "tensorflow_probability", "jax", "torch"}
            ]
            wrong += [f"{path.name} imports {name}" for name in frameworks]
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("keras.backend.backend", "keras.config.backend"):
                wrong.append(f"{path.name} asks for the backend")
    assert wrong == []


def _uses(node, names):
    """Whether an annotation contains one of these names, also inside quotes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval")
    return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))


def _annotations():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
                yield from (argument.annotation for argument in arguments if argument is not None and argument.annotation)
                yield from filter(None, [node.returns])


def test_few_annotations_are_any():
    """Of parameters and results, those that contain `Any`; an alias that contains it counts as `Any` itself."""
    aliases = [
        node
        for path in PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias"
    ]
    assert len(aliases) > 5
    anything = {"Any", *(alias.target.id for alias in aliases if _uses(alias.value, {"Any"}))}
    annotations = list(_annotations())
    share = sum(_uses(annotation, anything) for annotation in annotations) / len(annotations)
    assert len(annotations) > 3000
    assert share <= 0.10


def test_names_that_moved_warn_and_work():
    with pytest.warns(DeprecationWarning, match=r"keras_auxref\.flows\.ActNorm"):
        assert keras_auxref.layers.ActNorm is keras_auxref.flows.ActNorm
    with pytest.warns(DeprecationWarning, match=r"keras_auxref\.posteriors\.SylvesterFlow"):
        assert keras_auxref.layers.SylvesterFlow is keras_auxref.posteriors.SylvesterFlow
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        _ = keras_auxref.layers.Nonsense


def test_every_public_name_can_be_imported():
    names = {}
    exec("from keras_auxref import *", names)
    assert {"Glow", "layers", "export_saved_model"} <= set(dir(keras_auxref))
    assert names["layers"].AuxReflection is names["AuxReflection"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_names_and_forward_maps_on_every_backend(backend):
    pytest.importorskip(backend)
    code = f"""
import os
os.environ["KERAS_BACKEND"] = "{backend}"
import numpy as np
from keras import ops as k
from keras_auxref import *
from keras_auxref import ops
import keras_auxref
print({{"Glow", "layers", "export_saved_model"}} <= set(dir(keras_auxref)))
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
    assert _run(code) == ["True"] * 5
