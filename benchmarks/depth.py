"""What depth costs: the first training step, later steps, the first decoding and the memory of flows of K = 4 … 32 steps.

    python -m benchmarks.depth                    # the paper's size: 32×32×3, L = 3, C = 64, batch 64; about eight minutes of
                                                  # seconds and six of memory on two cores
    python -m benchmarks.depth --part seconds     # or --part memory, which does not mind a busy machine
    python -m benchmarks.depth --before FOLDER    # the seconds of version 0.2, from a checkout of commit 591384b; six minutes
    python -m benchmarks.depth --quick            # a smoke run

Every flow has a process of its own, so that nothing is traced before and the peak of memory is its own. The ways:

* `loop`: the default on a CPU without XLA, one loop for the steps of a level;
* `unrolled`: the same steps written out;
* `remat`: the loop, with every step computed again in the backward pass from its input;
* `inverse`: the loop, with every step computed again from its output;
* `XLA` and `XLA, unrolled`: the loop and the steps written out, compiled by XLA on a CPU;
* `jax` and `jax, unrolled`: the same on JAX.

A measurement that the results file has is not made again: delete it there, or use `--again`. `peak_megabytes` is the largest
resident memory of two training steps less that before them. The figure is beside the results file.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import report
from experiments.harness import cli

FULL = {"size": 32, "levels": 3, "hidden": 64, "batch": 64, "rounds": 7}
QUICK = {"size": 8, "levels": 1, "hidden": 4, "batch": 4, "rounds": 2}
WAYS: dict[str, dict[str, Any]] = {
    "loop": {"unroll": False},
    "unrolled": {"unroll": True},
    "remat": {"unroll": False, "remat": True},
    "inverse": {"unroll": False, "remat": "inverse"},
    "XLA": {"unroll": False},
    "XLA, unrolled": {"unroll": True},
    "jax": {"unroll": False},
    "jax, unrolled": {"unroll": True},
}
MIXINGS = ("conv", "aux_factored", "aux_conv")
MEASURED = {"seconds": "first_step_seconds", "memory": "weights_megabytes"}
"""What a row has when this part of it is measured."""

Key = tuple[str, str, int]


def plan(part: str, quick: bool, before: bool) -> list[Key]:
    """The way, mixing and depth of every process."""
    if part == "memory":
        depths = (2, 4) if quick else (4, 8, 16, 32)
        ways = ("remat", "inverse") if quick else ("loop", "unrolled", "remat", "inverse")
        return [(way, mixing, k) for mixing in MIXINGS[:2] for way in ways for k in depths]
    depth, deep = (2, 4) if quick else (8, 32)
    if before:
        return [(way, mixing, depth) for mixing in MIXINGS[:2] for way in ("unrolled", "XLA", "jax")]
    ways = ("loop", "unrolled", "XLA", "XLA, unrolled", "jax", "jax, unrolled")
    one = [(way, mixing, depth) for mixing in MIXINGS for way in ways]
    return [*one, *(("loop", mixing, deep) for mixing in MIXINGS[:2])]


def measure(part: str, key: Key, sizes: dict[str, int], before: Path | None) -> dict[str, Any]:
    way, mixing, depth = key
    arguments = {} if before else WAYS[way]
    task = {
        **sizes,
        "part": part,
        "mixing": mixing,
        "steps": depth,
        "arguments": arguments,
        "compiled": "XLA" in way or "jax" in way,
    }
    environment = {**os.environ, "KERAS_BACKEND": "jax" if "jax" in way else "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment["PYTHONPATH"] = str((before or Path(__file__).parents[1]).resolve())
    command = [sys.executable, str(Path(__file__).with_name("depth_worker.py")), json.dumps(task)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=None, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    found = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in found.items()}
    told = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found.items())
    print(f"{mixing}, K = {depth}, {way}{', before' if before else ''}: {told}", flush=True)
    return found


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt

    keys = {"first_step_seconds": "first training step (s)", "step_seconds": "later step (s)", "peak_megabytes": "memory (MB)"}
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.4), layout="constrained")
    for axis, (key, title) in zip(axes, keys.items(), strict=True):
        for way in ("unrolled", "loop", "remat", "inverse"):
            chosen = [row for row in rows if row["way"] == way and row["mixing"] == "aux_factored" and key in row]
            chosen.sort(key=lambda row: row["steps"])
            axis.plot([row["steps"] for row in chosen], [row[key] for row in chosen], marker="o", label=way)
        axis.set(title=title, xlabel="K", ylim=(0, None))
        axis.grid(color="0.9")
    axes[-1].legend(frameon=False)
    figure.savefig(path, dpi=160, metadata={"Software": None})
    print(path)


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_arguments(p, "depth", quick="small flows, to see that everything runs")
    p.add_argument("--part", choices=MEASURED, help="default: both")
    p.add_argument("--way", action="append", choices=WAYS, help="only this one; repeat for several")
    p.add_argument("--mixing", action="append", choices=MIXINGS, help="only this one; repeat for several")
    p.add_argument("--before", type=Path, metavar="FOLDER", help="a checkout of version 0.2: its seconds, as rows of their own")
    p.add_argument("--again", action="store_true", help="measure what the results file has, too")
    return p.parse_args()


def main() -> None:
    args = arguments()
    sizes = QUICK if args.quick else FULL
    path = args.output = args.output or (report.QUICK if args.quick else report.RESULTS) / "depth.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["measurements"] if path.exists() else []
    for part in [args.part] if args.part else ["seconds"] if args.before else MEASURED:
        for key in plan(part, args.quick, bool(args.before)):
            if (args.way and key[0] not in args.way) or (args.mixing and key[1] not in args.mixing):
                continue
            names = dict(zip(("way", "mixing", "steps"), key, strict=True)) | ({"version": "0.2"} if args.before else {})
            row = next((row for row in rows if {k: row.get(k) for k in (*names, "version")} == {"version": None, **names}), None)
            if row is None:
                rows.append(row := names)
            if args.again or MEASURED[part] not in row:
                row |= measure(part, key, sizes, args.before)
                report.write(args, {"settings": sizes, "measurements": rows})
    draw([row for row in rows if "version" not in row], path.with_suffix(".png"))


if __name__ == "__main__":
    cli.main(main)
