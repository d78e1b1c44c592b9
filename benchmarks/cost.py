"""What every kernel, map and the factored reflection cost: forward and backward pass of one layer, as ratios to Dense.

    python -m benchmarks.cost --quick    a smoke run of seconds
    python -m benchmarks.cost            one table: d = 12 and 48 with as many rows as a Glow on CIFAR-10 has there, 256 and 784
                                         with a batch of 128

Every candidate computes y from (rows, d) inputs and the gradients of the inputs and of all weights for a given gradient of y;
kernels and orthogonal matrices are built from their weights in every step, as in training. Candidates take turns; the ratios
are of minima.
"""

import argparse
from typing import Any

from benchmarks import report
from benchmarks.maps import _keras_candidate
from benchmarks.timing import interleaved
from experiments.harness import cli
from experiments.harness.results import environment, hardware

SIZES = ((16384, 12), (1024, 48), (128, 256), (128, 784))
QUICK_SIZES = ((64, 4), (32, 8))


def layers(d: int) -> dict[str, Any]:
    """One layer of every kind, by name."""
    import keras

    from keras_auxref import AuxReflection, FactoredReflection, OrthogonalDense

    found: dict[str, Any] = {"dense": keras.layers.Dense(d, use_bias=False)}
    found |= {f"aux, {kernel}": AuxReflection(kernel) for kernel in ("free", "spectral", "relaxed_cayley")}
    found |= {name: OrthogonalDense(name) for name in ("householder", "cayley", "exp")}
    found |= {f"factored, {name}": FactoredReflection(name) for name in ("householder", "cayley")}
    found["factored, one-sided"] = FactoredReflection(sides="right")
    return found


def measure(rows: int, d: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds and ratios to Dense of every layer at one size."""
    steps = {name: _keras_candidate(name, layer, d, rows, args.jit).step for name, layer in layers(d).items()}
    times = interleaved(steps, args.rounds, args.seconds)
    return [
        {
            "rows": rows,
            "d": d,
            "name": name,
            "min_seconds": float(f"{entry['min_seconds']:.4g}"),
            "median_seconds": float(f"{entry['median_seconds']:.4g}"),
            "ratio_of_min": round(entry["min_seconds"] / times["dense"]["min_seconds"], 3),
        }
        for name, entry in times.items()
    ]


def table(measured: list[dict[str, Any]]) -> str:
    """A row for every layer, a column for every size."""
    sizes = list(dict.fromkeys((entry["rows"], entry["d"]) for entry in measured))
    ratio = {(entry["name"], entry["rows"], entry["d"]): f"{entry['ratio_of_min']:.2f}" for entry in measured}
    names = dict.fromkeys(entry["name"] for entry in measured)
    body = [[name, *(ratio.get((name, *size), "–") for size in sizes)] for name in names]
    return cli.table(("× Dense", *(f"d = {d}, {rows} rows" for rows, d in sizes)), body)


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_arguments(p, "cost", quick="small sizes and few rounds, to see that everything runs")
    p.add_argument("--seconds", type=float, default=10.0, help="time to spend on each size (default: %(default)s)")
    p.add_argument("--rounds", type=cli.positive, default=7, help="rounds at least, whatever they take (default: %(default)s)")
    p.add_argument("--jit", action="store_true", help="compile with XLA")
    args = p.parse_args()
    if args.quick:
        args.seconds, args.rounds = 0.1, 2
    return args


def main() -> None:
    args = arguments()
    print(f"On {hardware(environment())}, {'with' if args.jit else 'without'} XLA\n")
    measured: list[dict[str, Any]] = []
    for rows, d in QUICK_SIZES if args.quick else SIZES:
        measured += measure(rows, d, args)
    print(table(measured))
    report.write(args, {"measurements": measured})


if __name__ == "__main__":
    cli.main(main)
