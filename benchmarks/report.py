"""Where a benchmark writes its results, and what every results file says of its making."""

import argparse
import datetime
from pathlib import Path
from typing import Any

from experiments.harness.results import command, environment, write_json

RESULTS = Path(__file__).parent / "results"
QUICK = Path("runs", "benchmarks")
"""Where a smoke run writes: not over results that are kept."""


def add_arguments(parser: argparse.ArgumentParser, name: str, quick: str | None) -> None:
    """`--output`, and unless `quick` is None `--quick` with that help. `name` is that of the results file."""
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    where = f"results/{name}.json here" + (f", with --quick {QUICK / name}.json" if quick else "")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"default: {where}")
    parser.set_defaults(_name=name)


def write(arguments: argparse.Namespace, content: dict[str, Any]) -> None:
    """Write a results file with its header, and print where it is."""
    folder = QUICK if getattr(arguments, "quick", False) else RESULTS
    path = arguments.output or folder / f"{arguments._name}.json"
    write_json(path, {**header(), **content})
    print(f"\n{path}")


def header() -> dict[str, Any]:
    """The command, the date, the versions and the hardware."""
    return {"command": command(), "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **environment()}
