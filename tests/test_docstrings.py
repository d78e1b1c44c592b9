"""Every public name has an example that can be pasted: it imports its own name, and all else that it uses."""

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

MODULES = ("", ".layers", ".flows", ".posteriors", ".ops", ".kernels", ".initializers", ".regularizers", ".bijectors", ".serving")
NEEDED = {"export_onnx": ("tf2onnx", "onnxruntime"), "export_litert": ("ai_edge_litert",)}

RESULTS = ("Branches", "Certificate", "Factors", "Inverse", "Reflected")
"""What methods and functions return, and nobody makes."""


def _public() -> Iterator[tuple[str, Any]]:
    """Classes and functions by the name under which they are imported; each once."""
    seen = set()
    for name in MODULES:
        module = importlib.import_module(f"keras_auxref{name}")
        for public in module.__all__:
            value = getattr(module, public)
            if (inspect.isclass(value) or inspect.isfunction(value)) and value not in seen:
                seen.add(value)
                yield f"{module.__name__}.{public}", value


PUBLIC = dict(_public())


@pytest.mark.parametrize("name", PUBLIC)
def test_example_can_be_pasted(name):
    for package in NEEDED.get(name.rpartition(".")[-1], ()):
        pytest.importorskip(package)
    documentation = inspect.getdoc(PUBLIC[name])
    examples = doctest.DocTestParser().get_doctest(documentation, {"__name__": "__main__"}, name, None, 0)
    assert examples.examples, f"{name} has no example"
    short = name.rpartition(".")[-1]
    assert short in RESULTS or any(short in example.source for example in examples.examples)
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(examples, out=said.append)
    assert result.failed == 0, "".join(said)


@pytest.mark.parametrize("name", MODULES[1:])
def test_the_reference_has_every_public_name(name):
    page = (ROOT / "docs" / "api" / f"{name[1:]}.md").read_text()
    listed = re.findall(r"^\.\. auto(?:class|function|data):: (\w+)$", page, re.M)
    assert sorted(listed) == sorted(set(importlib.import_module(f"keras_auxref{name}").__all__))


def test_examples_of_other_functions_run():
    from keras_auxref.ops import activations

    result = doctest.testmod(activations)
    assert result.attempted > 0
    assert result.failed == 0
