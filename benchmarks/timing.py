"""Timing of several functions in one run, so that what is reported is their ratio."""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

BLOCK_SECONDS = 0.005


def interleaved(steps: Mapping[str, Callable[[], Any]], rounds: int, seconds: float = 0.0) -> dict[str, dict[str, float]]:
    """Median and minimum seconds of each step, from `rounds` rounds or as many more as fit into `seconds`.

    Every round calls every step, in a new order: the noise of a shared machine then meets them all. A step returns when its work
    is done; one that cannot run is left out with a note.
    """
    blocks: dict[str, int] = {}
    for name, step in steps.items():
        try:
            step()
        except Exception as error:
            print(f"  {name} left out: {(str(error).strip() or type(error).__name__).splitlines()[0]}")
            continue
        step()
        # Steps of microseconds are timed in blocks, which the clock and the call do not distort.
        blocks[name] = max(1, round(BLOCK_SECONDS / _timed(step, 1)))
    whole = sum(block * _timed(steps[name], block) for name, block in blocks.items())
    rounds = max(rounds, int(seconds / whole))
    times: dict[str, list[float]] = {name: [] for name in blocks}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(blocks), len(blocks)):
            times[name].append(_timed(steps[name], blocks[name]))
    return {n: {"median_seconds": statistics.median(t), "min_seconds": min(t), "rounds": rounds} for n, t in times.items()}


def _timed(step: Callable[[], Any], block: int) -> float:
    started = time.perf_counter()
    for _ in range(block):
        step()
    return (time.perf_counter() - started) / block
