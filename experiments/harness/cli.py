"""The command line of the experiments: common arguments, errors in one sentence, and a table at the end."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.harness import distribution
from experiments.harness.data import DataUnavailableError
from experiments.harness.notices import silenced
from experiments.harness.results import Results, ResultsMismatchError, Run, mean_and_deviation

BACKENDS = ("tensorflow", "jax", "torch")


def parser(description: str, datasets: Sequence[str], defaults: dict[str, dict[str, int]]) -> argparse.ArgumentParser:
    """The arguments that every experiment takes.

    Args:
        description: First paragraph of `--help`.
        datasets: Names for `--dataset`; the first is the default.
        defaults: For each data set its `epochs`, `batch_size` and `runs` where the user gives none (see `parse`), and values for
            arguments of the experiment's own; more entries for another `choice`. Without `epochs` there is no such argument.
    """

    def by_dataset(key: str) -> str:
        return ", ".join(f"{name}: {values[key]}" for name, values in defaults.items() if key in values)

    p = argparse.ArgumentParser(description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dataset", choices=datasets, default=datasets[0], help="data to train on (default: %(default)s)")
    if "epochs" in defaults[datasets[0]]:
        p.add_argument("--epochs", type=positive, metavar="N", help=f"epochs of each run (default: {by_dataset('epochs')})")
    p.add_argument("--batch-size", type=positive, metavar="N", help=f"images per step (default: {by_dataset('batch_size')})")
    p.add_argument("--runs", type=positive, metavar="N", help=f"repetitions with different seeds (default: {by_dataset('runs')})")
    p.add_argument("--seed", type=natural, default=0, metavar="N", help="seed of the first run; run r uses N + r (default: 0)")
    p.add_argument("--train-size", type=positive, metavar="N", help="train on the first N images only, for a trial")
    p.add_argument(
        "--strategy",
        choices=("none", "mirrored"),
        default="none",
        help="mirrored: split each batch over all GPUs, if there are several (default: one GPU if there is one, else the CPU)",
    )
    p.add_argument("--jit", action=argparse.BooleanOptionalAction, help="compile the training step with XLA (default: on a GPU)")
    p.add_argument("--output", type=Path, metavar="DIR", help="folder for results and figure (default: runs/EXPERIMENT-DATASET)")
    p.add_argument("--resume", action="store_true", help="skip runs that are finished in the output folder, continue the others")
    p.add_argument(
        "--save",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="write every trained model as a .keras file (default: yes)",
    )
    p.add_argument("--download", action=argparse.BooleanOptionalAction, default=True, help="allow a download of the data")
    p.add_argument(
        "--verbose", type=int, choices=(0, 1, 2), default=1, help="Keras: 0 silent, 1 progress bar (default), 2 a line per epoch"
    )
    p.set_defaults(_defaults=defaults)
    return p


def add_backend(p: argparse.ArgumentParser) -> None:
    """The arguments of an experiment that trains on every backend, and on JAX over several devices and processes."""
    p.add_argument("--backend", choices=BACKENDS, help="of Keras (default: KERAS_BACKEND, or else tensorflow)")
    p.add_argument(
        "--distribute",
        action="store_true",
        help="with --backend jax: split each batch over all devices, of all processes if there are several (docs/distributed.md)",
    )


def parse(p: argparse.ArgumentParser, arguments: Sequence[str] | None = None, choice: str = "dataset") -> argparse.Namespace:
    """Parse, and fill in what depends on the data set, or on another argument, `choice`, where that has defaults.

    Keras, which is imported later, then has its backend.
    """
    args = p.parse_args(arguments)
    if hasattr(args, "backend"):
        args.backend = args.backend or os.environ.get("KERAS_BACKEND") or BACKENDS[0]
        if args.distribute and args.backend != "jax":
            p.error(f"argument --distribute: expected --backend jax, received {args.backend}")
        if args.strategy != "none" and args.backend != "tensorflow":
            p.error(f"argument --strategy: expected none with --backend {args.backend}, received {args.strategy}")
        distribution.choose_backend(args.backend, args.distribute)
    for key, value in args._defaults.get(getattr(args, choice), args._defaults[args.dataset]).items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    del args._defaults
    return args


def settings(args: argparse.Namespace, keys: Sequence[str]) -> dict[str, Any]:
    """What `Results` compares: these arguments, and backend and distribution where a file from before them would differ."""
    chosen = {key: getattr(args, key) for key in keys}
    backend = {} if args.backend == BACKENDS[0] else {"backend": args.backend}
    return {**chosen, **backend, **({"distribute": True} if args.distribute else {})}


def output(args: argparse.Namespace, stem: str) -> Path:
    """The folder that this process writes to."""
    chosen = args.output or Path("runs", stem)
    return distribution.folder(chosen) if args.distribute else chosen


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, 0)


def positive_number(text: str) -> float:
    """A number above 0."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number above 0, received {text!r}")


def _whole(text: str, least: int) -> int:
    with contextlib.suppress(ValueError):
        if int(text) >= least:
            return int(text)
    raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, received {text!r}")


def jit_compile(args: argparse.Namespace) -> Any:
    """The argument of `model.compile`: Keras decides unless the user did."""
    return "auto" if args.jit is None else args.jit


def scope(args: argparse.Namespace) -> Any:
    """The context to build a model in: `tf.distribute.MirroredStrategy` where there are several GPUs, or nothing.

    Under a strategy Keras drops an iterator over the data at the start of every `fit`, and TensorFlow 2.21 may crash when that
    happens while it fetches a batch: rarely, but there is no reason to risk it on a single device.
    """
    if args.strategy == "none":
        return contextlib.nullcontext()
    import tensorflow as tf

    several = len(tf.config.list_logical_devices("GPU")) > 1
    return tf.distribute.MirroredStrategy().scope() if several else contextlib.nullcontext()


def import_keras(args: argparse.Namespace | None = None) -> None:
    """Import Keras and TensorFlow without start-up notices; with `--distribute` join the other processes.

    TensorFlow on other backends too: Keras takes it for its own data, and so would the notices come later.
    """
    with silenced():
        import keras  # noqa: F401
        import tensorflow  # noqa: F401
    if args and args.distribute:
        distribution.start(args.seed)


def main(run: Callable[[], None]) -> None:
    """Run an experiment; an expected failure ends it with one sentence and exit code 1."""
    try:
        with distribution.noticing_losses():
            run()
    except (DataUnavailableError, ResultsMismatchError, distribution.UnevenError) as error:
        sys.exit(str(error))
    except ModuleNotFoundError as error:
        if error.name in ("jax", "torch"):
            sys.exit(f"--backend {error.name} needs {error.name}: pip install {error.name}.")
        if error.name not in ("matplotlib", "keras_auxref"):
            raise
        sys.exit(f"The experiment needs {error.name}: pip install -e '.[examples]'.")
    except KeyboardInterrupt:
        sys.exit("\nInterrupted: the same command with --resume continues after the last checkpoint.")


def progress(done: int, total: int, run: Run, note: str = "") -> None:
    """Announce a run."""
    print(f"\n[{done}/{total}] {run.map}, run {run.run + 1}, seed {run.seed}{note and f': {note}'}", flush=True)


def comparison(
    results: Results,
    reference: str = "aux",
    measure: str = "validation_error",
    scale: float = 100.0,
    steps_per_epoch: int = 1,
) -> list[list[str]]:
    """Rows of the closing table: map, runs, last error in percent, seconds per epoch, and their ratio to the reference's.

    With other values: `scale` times the last `measure`, and seconds per step.
    """

    def seconds(name: str) -> float:
        return mean_and_deviation([run.seconds_per_epoch for run in results.runs(name)])[0]

    names = list(dict.fromkeys(run.map for run in results.runs()))
    rows = []
    for name in names:
        runs = results.runs(name)
        mean, deviation = mean_and_deviation([scale * run.curves[measure][-1] for run in runs])
        error = f"{mean:.2f}" + (f" ± {deviation:.2f}" if deviation is not None else "")
        ratio = f"{seconds(name) / seconds(reference):.2f}" if reference in names else "–"
        rows.append([name, str(len(runs)), error, f"{seconds(name) / steps_per_epoch:.3g}", ratio])
    return rows


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown with aligned columns, the first to the left."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        aligned = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return f"| {' | '.join(aligned)} |"

    rule = [("-" * w if i == 0 else "-" * (w - 1) + ":") for i, w in enumerate(widths)]
    return "\n".join([line(header), line(rule), *(line(row) for row in rows)])
