"""What a GPU or a TPU would run, found without one: `python -m benchmarks.audit`.

Traces a training step, a log-determinant with its gradient and an inverse of every layer and every mixing of `Glow`, and lists

* on TensorFlow the nodes for which the wheel registers no GPU kernel (they run on the host), and those in float64 or complex128;
* on JAX the custom calls in what is lowered for CUDA and for a TPU, and what does not lower at all.

Nothing is run. `--write` puts the table into docs/guides/accelerators.md.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "accelerators.md"
MARKS = ("<!-- audit: begin -->", "<!-- audit: end -->")
D, ROWS = 6, 5
EVERYTHING = ("training", "log-determinant", "inverse")
CLEAN = {
    "FactoredReflection()": EVERYTHING,
    "AuxReflection()": ("training",),  # of a free W the rest needs factorisations
    "OrthogonalDense()": EVERYTHING,
    "OrthogonalDense(units=3)": EVERYTHING,
    'SVDDense(map="aux")': ("training",),
    'SVDDense(map="householder")': EVERYTHING,
    "OrthogonalRNN(4)": EVERYTHING,
    'Glow(mixing="aux_factored")': EVERYTHING,
}
"""The default paths, and what is asked of them: these need nothing that an accelerator lacks."""

Found = dict[str, dict[str, dict[str, list[str]]]]


def cases() -> dict[str, Callable[[], Any]]:
    """Every layer, and `Glow` with every mixing, by the call that makes it."""
    from keras_auxref import Glow, flows, layers, posteriors

    def glow(mixing: str) -> Callable[[], Any]:
        return lambda: Glow((4, 4, 3), levels=1, steps=1, hidden=4, mixing=mixing)

    found: dict[str, Callable[[], Any]] = {
        "AuxReflection()": layers.AuxReflection,
        'AuxReflection("spectral")': lambda: layers.AuxReflection("spectral"),
        'AuxReflection("relaxed_cayley")': lambda: layers.AuxReflection("relaxed_cayley"),
        "FactoredReflection()": layers.FactoredReflection,
        "OrthogonalDense()": layers.OrthogonalDense,
        'OrthogonalDense("cayley")': lambda: layers.OrthogonalDense("cayley"),
        'OrthogonalDense("exp")': lambda: layers.OrthogonalDense("exp"),
        "OrthogonalDense(units=3)": lambda: layers.OrthogonalDense(units=3),
        'SVDDense(map="aux")': lambda: layers.SVDDense(map="aux"),
        'SVDDense(map="householder")': lambda: layers.SVDDense(map="householder"),
        "ModReLU()": layers.ModReLU,
        "OrthogonalRNN(4)": lambda: layers.OrthogonalRNN(4),
        'OrthogonalRNN(4, "householder")': lambda: layers.OrthogonalRNN(4, "householder"),
        'OrthogonalRNN(4, kernel="relaxed_cayley")': lambda: layers.OrthogonalRNN(4, kernel="relaxed_cayley"),
        "ActNorm()": flows.ActNorm,
        "AffineCoupling()": lambda: flows.AffineCoupling(hidden=4),
        "AdditiveCoupling()": lambda: flows.AdditiveCoupling(hidden=4),
        "LogisticMixtureCoupling()": lambda: flows.LogisticMixtureCoupling(hidden=4),
        "SplineCoupling()": lambda: flows.SplineCoupling(hidden=4),
        "InvertibleDense()": flows.InvertibleDense,
        "ReflectedDense()": flows.ReflectedDense,
        "QRDense()": flows.QRDense,
        "Permutation()": flows.Permutation,
        "Squeeze()": flows.Squeeze,
        "FactoredFlow()": posteriors.FactoredFlow,
        "HouseholderFlow()": posteriors.HouseholderFlow,
        "SylvesterFlow()": posteriors.SylvesterFlow,
    }
    return found | {f'Glow(mixing="{mixing}")': glow(mixing) for mixing in flows.MIXINGS}


def questions_of(name: str, make: Callable[[], Any]) -> Iterator[tuple[str, Any, Callable[[Any], Any], tuple[int, ...], bool]]:
    """What is asked of a layer: (question, layer, function of x, shape of x, whether its gradient belongs to it)."""
    layer = make()
    if name.startswith("Glow"):
        shape: tuple[int, ...] = (ROWS, 4, 4, 3)
        yield "training", layer, lambda x: layer(x, training=True), shape, True
        yield "log-determinant", layer, lambda x: layer.encode(x)[1], shape, True
        yield "inverse", layer, layer.decode, (ROWS, 48), False
        return
    if name.endswith("Flow()"):  # of a posterior: its input is the output of the encoder too
        shape = (ROWS, D)
        layer.build(shape, shape)
        yield "training", layer, lambda x: layer(x, x, training=True), shape, True
        yield "log-determinant", layer, lambda x: layer.forward_and_log_det(x, x)[1], shape, True
        yield "inverse", layer, lambda y: layer.inverse(y, y), shape, False
        return
    shape = (ROWS, 7, D) if "RNN" in name else (ROWS, 4, 4, 3) if "Squeeze" in name else (ROWS, D)
    layer.build(shape)
    yield "training", layer, lambda x: layer(x, training=True), shape, True
    if "RNN" in name or "units" in name or "ModReLU" in name:
        return
    yield "log-determinant", layer, lambda x: layer.forward_and_log_det(x)[1], shape, True
    yield "inverse", layer, layer.inverse, tuple(layer.compute_output_shape(shape)), False


def on_tensorflow(layer: Any, function: Callable[[Any], Any], shape: tuple[int, ...], gradient: bool) -> dict[str, list[str]]:
    """The nodes of a traced function without a GPU kernel, and those in double precision."""
    import tensorflow as tf

    def traced(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.square(function(x)))
        variables = [v.value for v in layer.trainable_variables]
        return (y, tape.gradient(y, [x, *variables])) if gradient else y

    graph = tf.function(traced).get_concrete_function(tf.TensorSpec(shape)).graph.as_graph_def()
    host, double = set(), set()
    for node in _nodes(graph):
        if not _has_gpu_kernel(node):
            host.add(node.op)
        if _types(node) & {tf.float64.as_datatype_enum, tf.complex128.as_datatype_enum}:
            double.add(node.op)
    return {"host": sorted(host), "double": sorted(double)}


def _nodes(graph: Any) -> Iterator[Any]:
    """The nodes of a graph and of every function that it calls."""
    functions = {function.signature.name: function for function in graph.library.function}
    seen: set[str] = set()
    waiting = [list(graph.node)]
    while waiting:
        for node in waiting.pop():
            yield node
            for value in node.attr.values():
                for name in [value.func.name, *(f.name for f in value.list.func)]:
                    if name in functions and name not in seen:
                        seen.add(name)
                        waiting.append(list(functions[name].node_def))


_STRUCTURE = {"Placeholder", "_Arg", "_Retval", "NoOp"}
"""What is no computation."""


def _has_gpu_kernel(node: Any) -> bool:
    from tensorflow.python.framework import kernels

    if node.op in _STRUCTURE or any(value.func.name or value.list.func for value in node.attr.values()):
        return True
    for kernel in kernels.get_registered_kernels_for_op(node.op).kernel:
        if kernel.device_type in ("GPU", "DEFAULT") and all(
            node.attr[c.name].type in c.allowed_values.list.type for c in kernel.constraint if c.name in node.attr
        ):
            return True
    return False


def _types(node: Any) -> set[int]:
    """The dtypes among the attributes of a node."""
    return {t for value in node.attr.values() for t in (value.type, *value.list.type)}


def on_jax(layer: Any, function: Callable[[Any], Any], shape: tuple[int, ...], gradient: bool) -> dict[str, list[str]]:
    """The custom calls of a function that is lowered for CUDA and for a TPU, or the reason why it is not."""
    import jax
    import jax.numpy as jnp
    import keras

    trained, other = layer.trainable_variables, layer.non_trainable_variables

    def pure(values: Any, x: Any) -> Any:
        mapping = [*zip(trained, values, strict=True), *((v, v.value) for v in other)]
        with keras.StatelessScope(state_mapping=mapping):
            return jnp.sum(jnp.square(function(x)))

    values = [v.value for v in trained]
    lowered = jax.jit(jax.value_and_grad(pure, argnums=(0, 1)) if gradient else pure)
    found: dict[str, list[str]] = {}
    for platform in ("cuda", "tpu"):
        try:  # `jax.export` lowers in the same way, and refuses the calls that are to be listed
            module = lowered.trace(values, jax.ShapeDtypeStruct(shape, "float32")).lower(lowering_platforms=(platform,)).as_text()
        except NotImplementedError as error:
            primitive = re.search(r"primitive '(\w+)'", str(error))
            found[platform] = [f"`{primitive.group(1)}` does not lower" if primitive else str(error)]
            continue
        found[platform] = sorted(set(re.findall(r"custom_call @(\w+)", module)))
    return found


def audit(asked: dict[str, Any] | None = None) -> Found:
    """{case: {question: {"host": …, "double": …} or {"cuda": …, "tpu": …}}} on the backend that Keras runs on.

    Args:
        asked: The questions by case; by default all of all.
    """
    import keras

    keras.utils.set_random_seed(0)
    look = {"tensorflow": on_tensorflow, "jax": on_jax}[keras.backend.backend()]
    made = cases()
    return {
        name: {question: look(*rest) for question, *rest in questions_of(name, made[name]) if question in questions}
        for name, questions in (asked or dict.fromkeys(made, EVERYTHING)).items()
    }


def on_backend(backend: str, asked: dict[str, Any] | None = None) -> Found:
    """`audit` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.audit", "--json", *(["--only", json.dumps(asked)] if asked else [])]
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    if run.returncode:
        raise RuntimeError(run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


def table(tensorflow: Found, jax: Found) -> str:
    """The table of the guide: rows that need nothing special are one, at the end."""
    lines = [
        "| | TensorFlow, on the host | TensorFlow, in double precision | JAX, custom calls on CUDA | JAX, on a TPU |",
        "|---|---|---|---|---|",
    ]
    clean = []
    for name, questions in tensorflow.items():
        for question, found in questions.items():
            cells = [found["host"], found["double"], jax[name][question]["cuda"], jax[name][question]["tpu"]]
            if not any(cells):
                clean.append((name, question))
                continue
            double = [f"{len(cells[1])} kinds of node"] if len(cells[1]) > 4 else cells[1]
            shown = [", ".join(f"`{c}`" if " " not in c else c for c in cell) for cell in (cells[0], double, *cells[2:])]
            lines.append(f"| `{name}`, {question} | " + " | ".join(shown) + " |")
    everything = [name for name in tensorflow if all((name, question) in clean for question in tensorflow[name])]
    some = [f"`{name}` ({question})" for name, question in clean if name not in everything]
    text = "Nothing of the kind in any part of " + ", ".join(f"`{name}`" for name in everything)
    text += (", nor in " + ", ".join(some) if some else "") + "."
    return "\n".join([*lines, "", *textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", action="store_true", help="print what is found on this backend")
    p.add_argument("--only", type=json.loads, help='questions by case: {"FactoredReflection()": ["training", "inverse"]}')
    p.add_argument("--write", action="store_true", help="put the table into the guide")
    args = p.parse_args()
    if args.json:
        print(json.dumps(audit(args.only)))
        return
    text = table(*(on_backend(backend, args.only) for backend in ("tensorflow", "jax")))
    print(text)
    if args.write:
        before, rest = GUIDE.read_text().split(MARKS[0])
        GUIDE.write_text(f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{rest.split(MARKS[1])[1]}")


if __name__ == "__main__":
    main()
