"""Draws docs/figures/cost.png, the figure of the README, from results that are kept: `python docs/figures/cost.py`.

Left, forward and backward pass as a multiple of a Dense layer (`benchmarks/results/maps.json`). Right, the error on MNIST over
the seconds of training (`experiments/results/fcnn-mnist.json`), the mean of all runs.
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
plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "savefig.facecolor": "white"})


def costs(axis):
    rows = json.loads((ROOT / "benchmarks/results/maps.json").read_text())["measurements"]
    rows = [row for row in rows if row["batch"] == BATCH]
    sizes = sorted({row["d"] for row in rows})
    for name, (label, colour, marker) in STYLES.items():
        ratio = {row["d"]: row["ratio_to_dense"] for row in rows if row["name"] == name}
        axis.plot(sizes, [ratio[d] for d in sizes], marker=marker, color=colour, label=label, linewidth=2)
    axis.axhline(1, color="0.35", linestyle="--", linewidth=1.5)
    axis.text(sizes[-1], 1.0, "Dense", color="0.35", ha="right", va="bottom")
    axis.set(xscale="log", yscale="log", xlabel="d", title="Time of a layer, as a multiple of Dense")
    axis.set_xticks([d for d in sizes if d != 784], [str(d) for d in sizes if d != 784])
    axis.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axis.minorticks_off()


def errors(axis):
    runs = json.loads((ROOT / "experiments/results/fcnn-mnist.json").read_text())["runs"]
    for name, (label, colour, marker) in STYLES.items():
        curves = [run["curves"] for run in runs if run["map"] == name and run["finished"]]
        length = min(len(curve["seconds"]) for curve in curves)
        seconds = np.mean([curve["seconds"][:length] for curve in curves], axis=0)
        error = 100 * np.mean([curve["validation_error"][:length] for curve in curves], axis=0)
        axis.plot(seconds, error, marker=marker, color=colour, label=label, linewidth=2)
    axis.set(xscale="log", xlabel="seconds of training", title="Error on MNIST (%)", ylim=(0, None))
    axis.set_xticks([20, 50, 100, 200, 500], ["20", "50", "100", "200", "500"])
    axis.minorticks_off()


figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.6), layout="constrained")
costs(axes[0])
errors(axes[1])
for axis in axes:
    axis.grid(color="0.9")
    axis.set_axisbelow(True)
handles, labels = axes[0].get_legend_handles_labels()
figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=4, frameon=False, fontsize=10)
figure.savefig(Path(__file__).with_suffix(".png"), dpi=160, metadata={"Software": None})
