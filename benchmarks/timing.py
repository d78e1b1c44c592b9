"""Timing of several functions in one run, so that what is reported is their ratio."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def interleaved(functions: Mapping[Any, Callable[[], Any]], rounds: int) -> dict[Any, dict[str, float]]:
    """Calls every function once per round, after one warm-up, and returns milliseconds: `median` and `best`.

    Rounds over all candidates spread the noise of a shared machine evenly, which a loop per candidate does not. Functions
    return a tensor, which is read back, so that asynchronous devices are waited for.
    """
    for function in functions.values():
        np.asarray(function())
    seconds: dict[Any, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            np.asarray(function())
            seconds[name].append(time.perf_counter() - start)
    return {name: {"median": 1e3 * float(np.median(s)), "best": 1e3 * float(np.min(s))} for name, s in seconds.items()}
