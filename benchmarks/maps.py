"""Speed of one auxiliary reflection beside Dense and the orthogonal maps: forward and backward pass, over d and batch.

    python -m benchmarks.maps --quick           a smoke run of seconds
    python -m benchmarks.maps                   the sweep: a table, maps.json and maps.png
    python -m benchmarks.maps --fcnn            a training step of the paper's network (d = 784, batch 128) with every map

Every candidate computes y from (batch, d) inputs and the gradients of the inputs and of all weights for a given gradient of
y; orthogonal matrices are built from their weights in every step, as in training. Candidates take turns, in a new order in
every round, so that a disturbance meets them all; the table gives the median and the minimum over rounds. Beside each time
stands how well the map keeps its promise: ‖UᵀU − I‖ (Frobenius) of an orthogonal map, the largest relative change of a norm
for the auxiliary reflection. Where PyTorch and geotorch can be imported, their orthogonal parametrizations do the same work,
taking turns among themselves.
"""

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.timing import interleaved
from experiments.harness import cli
from experiments.harness.results import environment, hardware, write_json

ORTHOGONAL = ("householder", "cayley", "exp")
TORCH_NAMES = {"householder": "householder", "cayley": "cayley", "exp": "matrix_exp"}
FCNN = {"dimension": 784, "batch": 128, "classes": 10}


@dataclass
class Candidate:
    """Something to time: `step` returns when all its work is done; `error` says how far the map is from its promise."""

    name: str
    step: Callable[[], Any]
    error: Callable[[], float] | None = None


def keras_candidates(d: int, batch: int, jit: bool) -> list[Candidate]:
    import keras

    from keras_auxref import AuxReflection, OrthogonalDense

    layers = {"dense": keras.layers.Dense(d, use_bias=False), "aux": AuxReflection()}
    layers.update({name: OrthogonalDense(map=name) for name in ORTHOGONAL})
    return [_keras_candidate(name, layer, d, batch, jit) for name, layer in layers.items()]


def _keras_candidate(name: str, layer: Any, d: int, batch: int, jit: bool) -> Candidate:
    import tensorflow as tf

    x, upstream = tf.random.normal((2, batch, d), seed=0)
    layer.build(x.shape)
    weights = [variable.value for variable in layer.trainable_variables]

    @tf.function(jit_compile=jit)
    def step(x: Any, upstream: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        # y is returned too: the gradients of Dense do not need it, and TensorFlow would leave its product out.
        return y, tape.gradient(y, [x, *weights], output_gradients=upstream)

    def run() -> None:
        step(x, upstream)
        tf.test.experimental.sync_devices()

    def norm_error() -> float:
        before, after = tf.norm(x, axis=-1), tf.norm(layer(x), axis=-1)
        return float(tf.reduce_max(tf.abs(after / before - 1)))

    def orthogonality_error() -> float:
        u = tf.convert_to_tensor(layer.matrix)
        return float(tf.norm(tf.matmul(u, u, transpose_a=True) - tf.eye(d)))

    return Candidate(name, run, {"dense": None, "aux": norm_error}.get(name, orthogonality_error))


def torch_candidates(d: int, batch: int) -> list[Candidate]:
    """PyTorch's and geotorch's orthogonal parametrizations, as far as they are installed."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    wrap: dict[str, Callable[[Any], Any]] = {"torch linear": lambda linear: linear}
    wrap |= {
        f"torch {name}": lambda linear, name=name: torch.nn.utils.parametrizations.orthogonal(linear, orthogonal_map=name)
        for name in TORCH_NAMES.values()
    }
    if importlib.util.find_spec("geotorch"):
        import geotorch

        def parametrized(linear: Any) -> Any:
            geotorch.orthogonal(linear, "weight")
            return linear

        wrap["geotorch"] = parametrized
    device = "cuda" if torch.cuda.is_available() and environment()["gpus"] else "cpu"
    return [_torch_candidate(name, function, d, batch, device) for name, function in wrap.items()]


def _torch_candidate(name: str, wrap: Callable[[Any], Any], d: int, batch: int, device: str) -> Candidate:
    import torch

    linear = wrap(torch.nn.Linear(d, d, bias=False)).to(device)
    x = torch.randn(batch, d, device=device, requires_grad=True)
    upstream = torch.randn(batch, d, device=device)
    parameters = list(linear.parameters())

    def run() -> None:
        torch.autograd.grad(linear(x), [x, *parameters], upstream)
        if device == "cuda":
            torch.cuda.synchronize()

    def orthogonality_error() -> float:
        with torch.no_grad():
            return float(torch.linalg.norm(linear.weight.T @ linear.weight - torch.eye(d, device=device)))

    return Candidate(name, run, None if name == "torch linear" else orthogonality_error)


def fcnn_candidates(batch: int, dimension: int, jit: bool) -> list[Candidate]:
    """The training step that `model.fit` runs, for the network of the paper with every map, and with plain Dense layers."""
    import keras
    import tensorflow as tf

    from experiments import fcnn

    x = tf.random.uniform((batch, dimension), seed=0)
    labels = tf.random.uniform((batch,), maxval=FCNN["classes"], dtype=tf.int32, seed=0)
    endless = tf.data.Dataset.from_tensors((x, labels)).repeat()
    found = []
    for name in (fcnn.REFERENCE, *fcnn.MAPS):
        keras.utils.set_random_seed(0)
        model = fcnn.build_model(name, dimension, FCNN["classes"])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(), loss, jit_compile=jit)
        # What `fit` prepares, without its progress bar and callbacks: the variables before the first trace, then the step.
        model.optimizer.build(model.trainable_variables)
        model.make_train_function()
        found.append(Candidate(name, _training_step(model, iter(endless))))
    return found


def _training_step(model: Any, batches: Any) -> Callable[[], None]:
    import tensorflow as tf

    def run() -> None:
        model.train_function(batches)
        tf.test.experimental.sync_devices()

    return run


def measure(groups: Sequence[Sequence[Candidate]], args: argparse.Namespace, **size: int) -> list[dict[str, Any]]:
    """Time candidates of one size; the ratios are to Dense's median and, to be compared with it, minimum.

    Frameworks do not take turns with each other: the threads of one still spin while the other begins.
    """
    times: dict[str, dict[str, float]] = {}
    for group in groups:
        steps = {candidate.name: candidate.step for candidate in group}
        times |= interleaved(steps, rounds=args.rounds, seconds=args.seconds) if group else {}
    candidates = [candidate for group in groups for candidate in group]
    errors = {candidate.name: candidate.error() for candidate in candidates if candidate.error and candidate.name in times}
    return [
        {
            "name": name,
            **size,
            **{key: float(f"{value:.4g}") for key, value in entry.items()},
            "ratio_to_dense": round(entry["median_seconds"] / times["dense"]["median_seconds"], 3),
            "ratio_of_minima": round(entry["min_seconds"] / times["dense"]["min_seconds"], 3),
            "error": float(f"{errors[name]:.3g}") if name in errors else None,
        }
        for name, entry in times.items()
    ]


def sweep(args: argparse.Namespace) -> list[dict[str, Any]]:
    import tensorflow as tf

    rows: list[dict[str, Any]] = []
    header = ("d", "batch", "map", "median ms", "min ms", "× Dense", "error")
    for d in args.d:
        for batch in args.batch:
            tf.random.set_seed(0)
            found = measure([keras_candidates(d, batch, args.jit), torch_candidates(d, batch)], args, d=d, batch=batch)
            rows += found
            print(cli.table(header, [[str(d), str(batch), *_cells(row)] for row in found]), flush=True)
            print()
    return rows


def _cells(row: dict[str, Any]) -> list[str]:
    milliseconds = [f"{1000 * row[key]:.3f}" for key in ("median_seconds", "min_seconds")]
    error = f"{row['error']:.1e}" if row["error"] is not None else "–"
    return [row["name"], *milliseconds, f"{row['ratio_to_dense']:.2f}", error]


def training_steps(args: argparse.Namespace) -> list[dict[str, Any]]:
    d, batch = (64, 32) if args.quick else (FCNN["dimension"], FCNN["batch"])
    rows = measure([fcnn_candidates(batch, d, args.jit)], args, d=d, batch=batch)
    aux = next(row["median_seconds"] for row in rows if row["name"] == "aux")
    cells = [[*_cells(row)[:4], f"{row['median_seconds'] / aux:.2f}"] for row in rows]
    print(f"A training step of three SVD layers, d = {d}, batch {batch}:\n")
    print(cli.table(("map", "median ms", "min ms", "× Dense", "× aux"), cells))
    return rows


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Time over d at one batch, and over batch at one d, both logarithmic: equal growth shows as parallel lines."""
    from experiments.harness import plotting

    sizes = {key: sorted({row[key] for row in rows}) for key in ("d", "batch")}
    fixed = {"d": sizes["d"][-1], "batch": sizes["batch"][len(sizes["batch"]) // 2]}
    names = list(dict.fromkeys(row["name"] for row in rows))
    with plotting.plt.rc_context(plotting.RC):
        figure, axes = plotting.plt.subplots(1, 2, figsize=(10.5, 5), sharey=True, layout="constrained")
        for axis, (x, other) in zip(axes, (("d", "batch"), ("batch", "d")), strict=True):
            for position, name in enumerate(names):
                chosen = [row for row in rows if row["name"] == name and row[other] == fixed[other]]
                axis.plot(
                    [row[x] for row in chosen],
                    [1000 * row["median_seconds"] for row in chosen],
                    **_line(name, position),
                    markersize=4.5,
                    linewidth=1.6,
                )
            axis.set(xscale="log", yscale="log", title=f"{other} = {fixed[other]}", xticks=sizes[x])
            plotting.plain_numbers(axis.xaxis)
            plotting.plain_numbers(axis.yaxis)
        axes[0].set(xlabel="d", ylabel="Forward + backward (ms, median)")
        axes[1].set(xlabel="Batch")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=10)
        plotting.save(figure, path)


def _line(name: str, position: int) -> dict[str, Any]:
    """The colour of the map; PyTorch's version of it is dashed."""
    from experiments.harness import plotting

    ours = {f"torch {torch_name}": name for name, torch_name in TORCH_NAMES.items()} | {"torch linear": "dense"}
    look = plotting.style(ours.get(name, name), position)
    foreign = name in ours or name == "geotorch"
    return {**look, "linestyle": "--" if foreign else "-", **({"label": name} if foreign else {})}


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--d", type=cli.positive, nargs="+", default=[64, 128, 256, 512, 784, 1024], help="dimensions to sweep")
    p.add_argument("--batch", type=cli.positive, nargs="+", default=[32, 128, 512, 2048], help="batch sizes to sweep")
    p.add_argument("--seconds", type=float, default=8.0, help="time to spend on each size (default: %(default)s)")
    p.add_argument("--rounds", type=cli.positive, default=7, help="rounds at least, whatever they take (default: %(default)s)")
    p.add_argument("--fcnn", action="store_true", help="time a training step of the paper's network instead of single layers")
    p.add_argument("--jit", action="store_true", help="compile with XLA; maps that XLA cannot compile are left out")
    p.add_argument("--quick", action="store_true", help="small sizes and few rounds, to see that everything runs")
    p.add_argument("--output", type=Path, default=Path("runs", "benchmarks"), metavar="DIR", help="default: %(default)s")
    args = p.parse_args()
    if args.quick:
        args.d, args.batch, args.seconds, args.rounds = [16, 32, 64], [8, 32], 0.2, 3
    return args


def main() -> None:
    args = arguments()
    print(f"On {hardware(environment())}, {'with' if args.jit else 'without'} XLA\n")
    rows = training_steps(args) if args.fcnn else sweep(args)
    stem = ("maps-fcnn" if args.fcnn else "maps") + ("-jit" if args.jit else "")
    written = [args.output / f"{stem}.json"]
    write_json(written[0], {**report.header(), "measurements": rows})
    if not args.fcnn:
        written.append(args.output / f"{stem}.png")
        plot(rows, written[1])
    print("\n" + "\n".join(str(path) for path in written))


if __name__ == "__main__":
    cli.main(main)
