"""The results of an experiment: one JSON file, complete after every epoch, merged per (map, run)."""

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from experiments.harness.notices import silenced

PACKAGES = ("keras-auxref", "keras", "tensorflow", "numpy")


class ResultsMismatchError(Exception):
    """A results file belongs to an experiment with other settings; the message is one sentence."""


@dataclass
class Run:
    """One training: which map, which repetition, and what was measured after every epoch.

    `curves` holds one list per quantity with one value per epoch; `"seconds"` are cumulative seconds of training steps,
    without validation and without compiling. `measurements` holds what was measured once, on the trained model.
    """

    map: str
    run: int
    seed: int
    finished: bool = False
    date: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, list[float]] = field(default_factory=dict)
    measurements: dict[str, Any] = field(default_factory=dict)

    @property
    def epoch_seconds(self) -> list[float]:
        """Seconds of training in each epoch."""
        total = self.curves.get("seconds", [])
        return [b - a for a, b in zip([0.0, *total], total, strict=False)]

    @property
    def seconds_per_epoch(self) -> float:
        """The median over epochs, which one disturbed epoch does not move."""
        return statistics.median(self.epoch_seconds) if self.epoch_seconds else float("nan")

    def to_json(self) -> dict[str, Any]:
        rounded = {key: _rounded(getattr(self, key)) for key in ("seconds_per_epoch", "curves", "measurements")}
        entry = {**asdict(self), **rounded}
        return entry if self.measurements else {key: value for key, value in entry.items() if key != "measurements"}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "Run":
        known = {item.name for item in fields(cls)}
        run = cls(**{key: value for key, value in entry.items() if key in known})
        run.curves = {key: [float("nan") if v is None else v for v in curve] for key, curve in run.curves.items()}
        return run


class Results:
    """A results file: what was run, on what, and every run.

    Args:
        path: The JSON file. It is written aside and renamed, so that it is whole at any moment.
        experiment: Name of the example.
        dataset: What `Dataset.describe()` returns.
        settings: Everything that changes what one run measures (epochs, batch size, seed, …). Runs are only ever merged with
            runs of the same settings.
        resume: Keep what the file holds and refuse, with a `ResultsMismatchError`, a file made with other settings. Without
            it such a file is renamed to `<name>.previous.json`.
    """

    def __init__(
        self, path: Path, experiment: str, dataset: dict[str, Any], settings: dict[str, Any], resume: bool = False
    ) -> None:
        self.path = Path(path)
        self.header = {"experiment": experiment, "dataset": dataset, "settings": settings}
        if self.path.exists():
            differences = self._differences(self._read())
            if differences and resume:
                raise ResultsMismatchError(
                    f"{self.path.name} holds runs with other settings ({', '.join(differences)}): "
                    "give the same arguments to resume them, or another --output."
                )
            if differences:
                os.replace(self.path, self.path.with_suffix(".previous.json"))

    def runs(self, name: str | None = None, finished: bool = True) -> list[Run]:
        """The runs in the file, of one map or of all, in order."""
        runs = [Run.from_json(entry) for entry in self._read().get("runs", [])]
        return [r for r in runs if name in (None, r.map) and (r.finished or not finished)]

    def find(self, name: str, run: int) -> Run | None:
        """The run of one map, finished or not."""
        return next((r for r in self.runs(name, finished=False) if r.run == run), None)

    def save(self, run: Run) -> None:
        """Add a run to the file, or replace the same (map, run)."""
        run.date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        stored = self._read()
        commands = [*(c for c in stored.get("commands", []) if c != command()), command()]
        others = [entry for entry in stored.get("runs", []) if (entry["map"], entry["run"]) != (run.map, run.run)]
        order = list(dict.fromkeys([*(entry["map"] for entry in stored.get("runs", [])), run.map]))
        runs = sorted([*others, run.to_json()], key=lambda entry: (order.index(entry["map"]), entry["run"]))
        write_json(self.path, {**self.header, "commands": commands, "runs": runs})

    def _read(self) -> dict[str, Any]:
        return json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}

    def _differences(self, stored: dict[str, Any]) -> list[str]:
        """What the stored header says otherwise, as `name=stored value`."""
        found = []
        for part in ("dataset", "settings"):
            old, new = stored.get(part, {}), self.header[part]
            found += [f"{key}={old.get(key)}" for key in {**old, **new} if old.get(key) != new.get(key)]
        return found if stored.get("experiment") == self.header["experiment"] else ["another experiment"]


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and the sample standard deviation, which needs two values."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def environment() -> dict[str, Any]:
    """Versions and hardware of this process, without anything that names the machine."""
    with silenced():
        import tensorflow as tf

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    details = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.list_physical_devices("GPU")]
    versions = {"python": platform.python_version()}
    for package in dict.fromkeys((*PACKAGES, os.environ.get("KERAS_BACKEND") or "tensorflow")):
        # TensorFlow has other names in the registry (tensorflow-cpu, tf-nightly).
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {"versions": versions, "cpu_cores": cores, "gpus": [d.get("device_name", "unnamed") for d in details]}


def hardware(environment: dict[str, Any]) -> str:
    """The hardware of an `environment()` in a few words."""
    cores = f"{environment.get('cpu_cores')} CPU cores"
    return ", ".join([*environment.get("gpus", []), cores])


def command(arguments: list[str] | None = None, program: str | None = None) -> str:
    """The command that runs this module again, without the folder of the results and the folders of absolute paths."""
    script = Path(program or sys.argv[0])
    kept, skip = [], False
    for argument in sys.argv[1:] if arguments is None else arguments:
        if not skip and not argument.startswith("--output="):
            skip = argument == "--output"
            kept += [] if skip else [Path(argument).name if Path(argument).is_absolute() else argument]
        else:
            skip = False
    return shlex.join(["python", "-m", f"{script.resolve().parent.name}.{script.stem}", *kept])


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON so that a reader, and a process killed meanwhile, never sees half a file."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    # A list of numbers on one line: a curve is read across.
    text = re.sub(r"\[[\s\d.,eE+-]+\]", lambda match: re.sub(r"\s+", " ", match[0]).replace("[ ", "[").replace(" ]", "]"), text)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.tmp")
    aside.write_text(text + "\n", encoding="utf-8")
    os.replace(aside, path)


def _rounded(value: Any) -> Any:
    """Six significant digits: more is noise, and JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if abs(value) < float("inf") else None
