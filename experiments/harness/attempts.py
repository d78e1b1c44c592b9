"""The runs of an experiment one after another: announced, seeded, and skipped where they are finished."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from experiments.harness import cli, distribution
from experiments.harness.checkpoints import one_process
from experiments.harness.results import Results, Run


@dataclass(frozen=True)
class Attempt:
    """A run to be trained now."""

    run: Run
    stem: Path
    """The path that its files begin with."""
    resumed: bool

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return _checkpoints(self.stem)

    @property
    def model(self) -> Path:
        """The file of the trained model."""
        return self.stem.with_name(f"{self.stem.name}.keras")

    @property
    def log(self) -> Path:
        """A table of its epochs."""
        return self.stem.with_name(f"{self.stem.name}.csv")


def attempts(
    args: Any, names: Sequence[str], results: Results, environment: dict[str, Any], measure: bool = False
) -> Iterator[Attempt]:
    """Every run of every name that is not finished, with Keras seeded for it; to `measure`, also finished ones with a model.

    Names take turns within each repetition, so that a machine that slows down slows them all. Of several processes all train a
    run or none does: where one was lost before it wrote the end of a run, the others go through that end again.
    """
    gather = distribution.gather if distribution.is_on() else one_process
    planned = [(name, number) for number in range(args.runs) for name in names]
    for done, (name, number) in enumerate(planned, start=1):
        stored = results.find(name, number) if args.resume else None
        run = stored or Run(name, number, seed=args.seed + number)
        run.finished = all(finished for (finished,) in gather([int(run.finished)]))
        stem = results.path.with_name(f"{results.path.stem}-{name}-{number}")
        attempt = Attempt(run, stem, resumed=stored is not None and _checkpoints(stem).exists())
        if run.finished and not (measure and attempt.model.exists()):
            cli.progress(done, len(planned), run, "finished before")
            continue
        if run.finished:
            cli.progress(done, len(planned), run, "finished before, measured again")
        else:
            run.environment = environment
            cli.progress(done, len(planned), run, "from its last checkpoint" if attempt.resumed else "")
            keras.utils.set_random_seed(run.seed)
        yield attempt
        # Frees the graphs of the last model, which would otherwise pile up, and forgets the distribution.
        distributed = keras.distribution.distribution()
        keras.backend.clear_session()
        keras.distribution.set_distribution(distributed)


def _checkpoints(stem: Path) -> Path:
    return stem.with_name(f"{stem.name}.checkpoint")
