"""Draws docs/figures/cost.png, the figure of the README, from results that are kept: `python docs/figures/cost.py`.

Left, forward and backward pass as a multiple of a Dense layer (`benchmarks/results/maps.json`). Right, the error on MNIST over
the time of training: the mean of all runs (`experiments/results/fcnn-mnist.json`), each step at the median time that it takes
on a quiet machine (`benchmarks/results/maps-fcnn.json`), before training: later steps of the exponential take longer. Householder
reflections stand there as in the paper, and as a dashed line with the settings that suit them best.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).parents[2]
BATCH = 128
STYLES = {
    "exp": ("matrix exponential", "#cc79a7", "D"),
    "cayley": ("Cayley map", "#009e73", "^"),
    "householder": ("d Householder reflections", "#0072b2", "s"),
    "aux": ("auxiliary reflection", "#d55e00", "o"),
}
# Large letters: on a phone the picture is four fingers wide.
plt.rcParams.update(
    {"font.size": 13, "axes.titlesize": 13, "axes.spines.top": False, "axes.spines.right": False, "savefig.facecolor": "white"}
)


def costs(axis):
    rows = json.loads((ROOT / "benchmarks/results/maps.json").read_text())["measurements"]
    rows = [row for row in rows if row["batch"] == BATCH]
    sizes = sorted({row["d"] for row in rows})
    for name, (label, colour, marker) in STYLES.items():
        ratio = {row["d"]: row["ratio_to_dense"] for row in rows if row["name"] == name}
        axis.plot(sizes, [ratio[d] for d in sizes], marker=marker, color=colour, label=label, linewidth=2)
    axis.axhline(1, color="0.35", linestyle="--", linewidth=1.5)
    axis.text(sizes[-1], 1.0, "Dense", color="0.35", ha="right", va="bottom")
    axis.set(xscale="log", yscale="log", xlabel="d", title="Time, multiple of Dense")
    axis.set_xticks([64, 256, 1024], ["64", "256", "1024"])
    axis.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axis.minorticks_off()


def errors(axis):
    results = json.loads((ROOT / "experiments/results/fcnn-mnist.json").read_text())
    steps = results["dataset"]["train"] / results["settings"]["batch_size"]
    times = json.loads((ROOT / "benchmarks/results/maps-fcnn.json").read_text())["measurements"]
    seconds = {row["name"]: steps * row["median_seconds"] for row in times}
    runs = [run for run in results["runs"] if run["finished"]]
    for name in dict.fromkeys(run["map"] for run in runs):
        map = name.split("+")[0]
        _, colour, marker = STYLES[map]
        error = 100 * np.mean([run["curves"]["validation_error"] for run in runs if run["map"] == name], axis=0)
        epochs = np.arange(1, len(error) + 1)
        axis.plot(seconds[map] * epochs, error, "--" if name != map else "-", marker=marker, color=colour, linewidth=2)
    axis.set(xscale="log", xlabel="seconds of training", title="Error on MNIST (%)", ylim=(0, None))
    axis.set_xticks([20, 100, 500, 2000], ["20", "100", "500", "2000"])
    axis.minorticks_off()


figure, axes = plt.subplots(1, 2, figsize=(7.2, 4.2), layout="constrained")
costs(axes[0])
errors(axes[1])
for axis in axes:
    axis.grid(color="0.9")
    axis.set_axisbelow(True)
handles, labels = axes[0].get_legend_handles_labels()
tuned = plt.Line2D([], [], color=STYLES["householder"][1], marker="s", linestyle="--", linewidth=2)
order = [labels.index(STYLES[name][0]) for name in ("aux", "cayley", "exp", "householder")]
handles, labels = [*(handles[i] for i in order), tuned], [*(labels[i] for i in order), "… with its own settings"]
figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=12)
figure.savefig(Path(__file__).with_suffix(".png"), dpi=200, metadata={"Software": None})
