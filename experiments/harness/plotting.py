"""Figures: one colour per map everywhere, means as lines, standard deviations as shades."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # No display needed: the figures go to files.

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from experiments.harness.results import Run

# Okabe and Ito's palette, which stays distinct for colour-blind readers and in grey.
STYLES: dict[str, dict[str, Any]] = {
    "aux": {"color": "#D55E00", "marker": "o", "label": "auxiliary reflection"},
    "householder": {"color": "#0072B2", "marker": "s", "label": "d Householder reflections"},
    "cayley": {"color": "#009E73", "marker": "^", "label": "Cayley map"},
    "exp": {"color": "#CC79A7", "marker": "D", "label": "matrix exponential"},
    "dense": {"color": "#555555", "marker": "v", "label": "plain Dense"},
    "soft-so": {"color": "#E69F00", "marker": "<", "label": "soft, SO"},
    "soft-dso": {"color": "#8C6D31", "marker": ">", "label": "soft, DSO"},
    "soft-mc": {"color": "#56B4E9", "marker": "X", "label": "soft, MC"},
    "soft-srip": {"color": "#7B4FA3", "marker": "*", "label": "soft, SRIP"},
    # The transitions of a recurrent network.
    "householder-1": {"color": "#56B4E9", "marker": "X", "label": "1 Householder reflection"},
    "simple_rnn": {"color": "#8C6D31", "marker": "P", "label": "SimpleRNN"},
    "lstm": {"color": "#555555", "marker": "v", "label": "LSTM"},
    # The mixings of a flow.
    "aux_factored": {"color": "#7B4FA3", "marker": "*", "label": "factored reflection"},
    "aux_factored_right": {"color": "#B2182B", "marker": "<", "label": "factored reflection, one-sided"},
    "aux_relaxed_cayley": {"color": "#009E73", "marker": "^", "label": "auxiliary, relaxed Cayley W"},
    "aux_spectral": {"color": "#E69F00", "marker": "D", "label": "auxiliary, spectral W"},
    "qr": {"color": "#8C6D31", "marker": "P", "label": "QR form"},
    "aux_factored_qr": {"color": "#CC79A7", "marker": ">", "label": "factored reflection and R"},
    "conv": {"color": "#333333", "marker": "v", "label": "1×1 convolution"},
    "fixed": {"color": "#56B4E9", "marker": "X", "label": "fixed rotation"},
}
SPARE_COLORS = ("#E69F00", "#56B4E9", "#8C6D31", "#7B4FA3", "#B2182B", "#1B7837")
BROKEN_LINES = ("--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)))
RC = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def style(name: str, position: int = 0) -> dict[str, Any]:
    """Colour, marker and label of a map; the others get a spare colour by their position.

    `map+setting+…` is a map with settings of its own: it looks like the map, with a broken line.
    """
    map, *settings = name.split("+")
    look = STYLES.get(map) or {"color": SPARE_COLORS[position % len(SPARE_COLORS)], "marker": "P", "label": map}
    if not settings:
        return look
    label = f"{look['label']}, {', '.join(settings).replace('_', ' ').replace('=', ' ')}"
    return {**look, "linestyle": BROKEN_LINES[position % len(BROKEN_LINES)], "label": label}


def learning_curves(
    runs: Sequence[Run],
    path: Path,
    *,
    measure: str = "validation_error",
    label: str = "Validation error (%)",
    scale: float = 100.0,
    title: str = "",
    steps_per_epoch: int | None = None,
    skip: float = 0.0,
    more: Sequence[tuple[str, str, float]] = (),
    baseline: tuple[float, str] | None = None,
) -> None:
    """Draw one measure over epochs (left) and over seconds of training (right), as in the paper's figure 2.

    With `steps_per_epoch` the left side counts training steps. The vertical axis ends where the slowest map is after a share
    `skip` of the epochs, because late differences are small beside the first descent. Every (measure, label, scale) of `more` is
    drawn below in the same way, as in the paper's figure 3. `baseline` is a value of the first measure, and what it is.
    """
    names = list(dict.fromkeys(run.map for run in runs))
    rows = [(measure, label, scale), *more]
    with plt.rc_context(RC):
        size = (10.5, 4.4 + 3.4 * len(more))
        figure, grid = plt.subplots(len(rows), 2, figsize=size, sharex="col", sharey="row", layout="constrained", squeeze=False)
        for row, (measure, label, scale) in enumerate(rows):
            also = [baseline[0]] if baseline and row == 0 else []
            _curves(grid[row], runs, measure, scale, steps_per_epoch, skip, also)
            grid[row, 0].set(ylabel=label)
        if baseline is not None:
            value, of = baseline
            for axis in grid[0]:
                axis.axhline(value, color="#333333", linestyle="--", linewidth=1.2, label=of, zorder=1)
        grid[-1, 0].set(xlabel="Training step" if steps_per_epoch else "Epoch")
        grid[-1, 1].set(xlabel="Seconds of training")
        _time_scale(grid[-1, 1], [run.curves["seconds"] for run in runs])
        grid[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
        counts = {sum(run.map == name for run in runs) for name in names}
        number = f"{max(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
        repeated = f"mean ± standard deviation over {number} runs" if counts != {1} else "one run"
        figure.suptitle(f"{title} ({repeated})" if title else repeated, fontsize=12)
        handles, labels = grid[0, 0].get_legend_handles_labels()
        columns = 5 if sum(len(text) + 6 for text in labels) < 125 else 3
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), columns))
        save(figure, path)


def _curves(
    axes: Any,
    runs: Sequence[Run],
    measure: str,
    scale: float,
    steps_per_epoch: int | None,
    skip: float,
    shown_too: Sequence[float] = (),
) -> None:
    """One measure of every map, over epochs on the first of two axes and over seconds on the second."""
    lows, highs = list(shown_too), list(shown_too)
    for position, name in enumerate(dict.fromkeys(run.map for run in runs)):
        values, seconds = _stacked(runs, name, measure)
        mean, deviation = scale * values.mean(axis=0), scale * _deviation(values)
        look = style(name, position)
        epochs = np.arange(1, len(mean) + 1) * (steps_per_epoch or 1)
        line = {"markersize": 4, "linewidth": 1.8, **look}
        for axis, x in zip(axes, (epochs, seconds.mean(axis=0)), strict=True):
            axis.plot(x, mean, **line, markevery=max(1, len(mean) // 10))
            axis.fill_between(x, _above_zero(mean - deviation, mean), mean + deviation, color=look["color"], alpha=0.18, lw=0)
        shown = (mean + deviation)[int(skip * len(mean)) :]
        lows.append((mean - deviation).min() if skip else mean.min())
        highs.append(shown.max() if skip else mean.max())
    for axis in axes:
        _error_scale(axis, min(lows), max(highs))
    if skip and np.isfinite([*lows, *highs]).all():
        margin = 0.05 * (max(highs) - min(lows)) or 1e-3
        axes[0].set_ylim(min(lows) - margin, max(highs) + margin)


def save(figure: Any, path: Path) -> None:
    """Write a PNG aside and rename it, and let the figure go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.tmp")
    # Without metadata the same results give the same file.
    figure.savefig(aside, dpi=150, format="png", metadata={"Software": None})
    plt.close(figure)
    os.replace(aside, path)


def plain_numbers(axis: Any) -> None:
    """Write 0.5, 10 and 2000 on a logarithmic axis instead of powers of ten, and nothing between the ticks."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(which="minor", length=0)


def _stacked(runs: Sequence[Run], name: str, measure: str) -> tuple[np.ndarray, np.ndarray]:
    """(runs, epochs) of a measure and of the seconds; epochs that not every run has are left out."""
    chosen = [run.curves for run in runs if run.map == name]
    epochs = min(len(curves["seconds"]) for curves in chosen)
    stacked = [np.array([curves[key][:epochs] for curves in chosen]) for key in (measure, "seconds")]
    return stacked[0], stacked[1]


def _deviation(values: np.ndarray) -> np.ndarray:
    return values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])


def _above_zero(low: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """A lower edge that a logarithmic axis can show."""
    return np.maximum(low, 0.25 * mean)


def _error_scale(axis: Any, low: float, high: float) -> None:
    """Logarithmic where the values span much and stay above zero: late differences are small beside early ones."""
    if low > 0 and high / low > 4:
        axis.set_yscale("log")
        ticks = [m * 10.0**e for e in range(-8, 5) for m in ((1, 2, 5) if high / low < 1e3 else (1,))]
        axis.set_yticks([t for t in ticks if low / 2.2 <= t <= high * 2.2])
        plain_numbers(axis.yaxis)


def _time_scale(axis: Any, seconds: Sequence[Sequence[float]]) -> None:
    """Logarithmic where one map takes over twelve times as long as another: the fast one would be a stroke at the edge."""
    ends = [run[-1] for run in seconds if len(run)]
    first = min((run[0] for run in seconds if len(run)), default=0)
    if first <= 0 or max(ends) <= 12 * min(ends):
        axis.set_xlim(left=0)
        return
    axis.set_xscale("log")
    ticks = [m * 10.0**e for e in range(-3, 8) for m in (1, 2, 5)]
    axis.set_xticks([t for t in ticks if first / 1.2 <= t <= max(ends) * 1.2])
    plain_numbers(axis.xaxis)
