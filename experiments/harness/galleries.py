"""Figures of images: samples, reconstructions and interpolations of flows, a row per flow."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm

from experiments.harness.flows import TEMPERATURES, Pictures
from experiments.harness.plotting import plt, save

NAMES = {
    "aux_factored": "factored reflection",
    "aux_factored_right": "factored reflection\none-sided",
    "aux": "auxiliary reflection\nfree W",
    "aux_spectral": "auxiliary reflection\nspectral W",
    "aux_relaxed_cayley": "auxiliary reflection\nrelaxed Cayley",
    "householder": "Householder\nreflections",
    "conv": "1×1 convolution",
    "fixed": "fixed rotation",
}
NOT_FOUND = (1.0, 0.0, 1.0)
# Of one image, of the names beside the rows, and the gap between images as a share of one.
INCH, NAME_INCHES, GAP = 0.72, 1.65, 0.07
ERROR_RANGE = (1e-8, 1e-1)


def samples(flows: Mapping[str, Pictures], path: Path, title: str) -> None:
    """A row per flow, samples at the lower temperature on the left and at the higher on the right."""
    rows = [(_name(name), list(pictures.samples)) for name, pictures in flows.items()]
    _gallery(rows, path, title, [f"temperature {t:g}" for t in TEMPERATURES], _missing(flows))


def interpolations(flows: Mapping[str, Pictures], path: Path, title: str) -> None:
    """A row per flow: straight lines in z between two pairs of validation images."""
    rows = [(_name(name), list(pictures.interpolations)) for name, pictures in flows.items()]
    _gallery(rows, path, title, ["between two validation images", "between two others"], _missing(flows))


def reconstructions(flows: Mapping[str, Pictures], path: Path, title: str) -> None:
    """Validation images on top, and for each flow what comes back, with the error below on a logarithmic scale."""
    first = next(iter(flows.values()))
    figure, grid = _figure(1 + 2 * len(flows), [len(first.originals)], title, right=0.95, note=_missing(flows))
    axes = [line[0] for line in grid]
    _show(axes[0], first.originals, "validation images")
    shown: Any = None
    for position, (name, pictures) in enumerate(flows.items()):
        error = np.abs(pictures.reconstructions - pictures.originals).max(axis=-1)
        largest = np.nanmax(error) if np.isfinite(error).any() else np.nan
        _show(axes[1 + 2 * position], pictures.reconstructions, _name(name))
        strip = _strip(np.clip(error, *ERROR_RANGE)[..., None], fill=np.nan)[..., 0]
        colours = plt.get_cmap("viridis").with_extremes(bad="white")
        axis = axes[2 + 2 * position]
        shown = axis.imshow(strip, norm=LogNorm(*ERROR_RANGE), cmap=colours, interpolation="nearest")
        _label(axis, f"error in these,\nat most {largest:.1e}")
    _colorbar(figure, shown, axes[1 : min(len(axes), 6)])
    save(figure, path)


def _colorbar(figure: Any, shown: Any, beside: Sequence[Any]) -> None:
    top, bottom = beside[0].get_position(), beside[-1].get_position()
    width = figure.get_size_inches()[0]
    place = (top.x1 + 0.15 / width, bottom.y0, 0.16 / width, top.y1 - bottom.y0)
    figure.colorbar(shown, cax=figure.add_axes(place), label="error, largest channel")


def _gallery(rows: Sequence[tuple[str, list[np.ndarray]]], path: Path, title: str, headings: Sequence[str], note: bool) -> None:
    widths = [len(block) for block in rows[0][1]]
    figure, axes = _figure(len(rows), widths, title, heading=0.28, note=note)
    for line, (name, blocks) in zip(axes, rows, strict=True):
        for column, (axis, block) in enumerate(zip(line, blocks, strict=True)):
            _show(axis, block, name if column == 0 else "")
    for axis, heading in zip(axes[0], headings, strict=True):
        axis.set_title(heading, fontsize=11)
    save(figure, path)


def _figure(
    rows: int, widths: Sequence[int], title: str, heading: float = 0.0, right: float = 0.1, note: bool = False
) -> tuple[Any, list[list[Any]]]:
    """A figure with axes for strips of `widths` images, a row of them for each name, laid out in inches."""
    strips = [INCH * (n + (n - 1) * GAP) for n in widths]
    between = 3 * GAP * INCH
    width = NAME_INCHES + sum(strips) + between * (len(widths) - 1) + right
    top = 0.45 + heading
    height = top + rows * INCH * (1 + GAP) + (0.3 if note else 0.05)
    figure = plt.figure(figsize=(width, height))
    if note:
        figure.text(0.5, 0.06 / height, "magenta: no preimage was found", ha="center", va="bottom", fontsize=10)
    figure.suptitle(title, fontsize=12, y=1 - 0.1 / height, va="top")
    axes = []
    for row in range(rows):
        bottom, line, left = height - top - INCH - row * INCH * (1 + GAP), [], NAME_INCHES
        for strip in strips:
            line.append(figure.add_axes((left / width, bottom / height, strip / width, INCH / height)))
            left += strip + between
        axes.append(line)
    return figure, axes


def _show(axis: Any, images: np.ndarray, name: str) -> None:
    missing = np.isnan(images).any(axis=-1, keepdims=True)
    axis.imshow(_strip(np.where(missing, np.array(NOT_FOUND), np.clip(images, 0, 1)), fill=1.0), interpolation="nearest")
    _label(axis, name)


def _strip(images: np.ndarray, fill: float) -> np.ndarray:
    """Images side by side, with a gap between them, every pixel repeated so that a gap can be narrower than a pixel."""
    times = max(1, 96 // images.shape[1])
    large = images.repeat(times, axis=1).repeat(times, axis=2)
    gap = np.full((large.shape[1], max(1, round(GAP * large.shape[2])), large.shape[3]), fill)
    parts = [part for image in large for part in (gap, image)][1:]
    return np.concatenate(parts, axis=1)


def _label(axis: Any, name: str) -> None:
    axis.set_axis_off()
    if name:
        axis.text(-0.012, 0.5, name, transform=axis.transAxes, ha="right", va="center", fontsize=10)


def _missing(flows: Mapping[str, Pictures]) -> bool:
    shown = [getattr(pictures, kind) for pictures in flows.values() for kind in ("samples", "reconstructions", "interpolations")]
    return any(bool(np.isnan(images).any()) for images in shown)


def _name(name: str) -> str:
    return NAMES.get(name, name)
