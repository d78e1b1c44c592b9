"""A model card: what an exported model is, how it was made and what it answers, as Markdown."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.harness.results import Run

# The last value of a curve, or a measurement, in words: (name, format, factor).
METRICS = {
    "validation_error": ("error on {validation} validation images", "{:.2f} %", 100.0),
    "validation_loss": ("loss on {validation} validation sequences", "{:.4g}", 1.0),
    "bits_per_dim": ("bits per dimension on {validation} validation images", "{:.3f}", 1.0),
    "max_error": ("largest error of n⁻¹(n(x)) in any pixel, of 64 validation images", "{:.1e}", 1.0),
}


@dataclass(frozen=True)
class Training:
    """The run that a `.keras` file of an experiment comes from."""

    run: Run
    dataset: dict[str, Any]
    settings: dict[str, Any]
    commands: list[str]


def find_training(saved: Path) -> Training | None:
    """The run in a results file beside `STEM-NAME-NUMBER.keras` that made it; None where there is no such file."""
    for path in sorted(saved.parent.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        for entry in content.get("runs", []) if isinstance(content, dict) else []:
            if entry.get("finished") and saved.stem == f"{path.stem}-{entry['map']}-{entry['run']}":
                return Training(Run.from_json(entry), content["dataset"], content["settings"], content["commands"])
    return None


def card(title: str, model: Any, training: Training | None, export: str, signatures: Iterable[Any], size: int) -> str:
    """The card as Markdown.

    Args:
        title: Name of the model.
        model: The live Keras model.
        training: Where it comes from, if that is known.
        export: The command that exported it.
        signatures: What `keras_auxref.serving.show.describe` returns.
        size: Bytes of the version.
    """
    lines = [f"# {title}", "", _what(model), ""]
    if training:
        lines += _origin(training, export)
    lines += ["| signature | inputs | outputs |", "|---|---|---|"]
    for table in signatures:
        lines.append(f"| `{table.name}` | {_code(table.inputs)} | {_code(table.outputs)} |")
    lines += ["", f"Size: {size / 1e6:.2f} MB. {_certificate(model)}", ""]
    return "\n".join(lines)


def _code(items: list[str]) -> str:
    return "<br>".join(f"`{item}`" for item in items)


def _what(model: Any) -> str:
    weights = f"{sum(int(v.value.shape.num_elements()) for v in model.trainable_variables):,} trained weights"
    if hasattr(model, "flow"):
        height, width, channels = model.image_shape
        flow = model.flow
        return (
            f"A flow (`keras_auxref.Glow`) for images of {height}×{width}×{channels}, L = {flow.levels}, K = {flow.steps}, "
            f'C = {flow.hidden}, `mixing="{model.mixing}"`; {weights}. '
            f"Images are numbers in [0, 1]: send a pixel k of 0 … {2**model.bits - 1} as k/{2**model.bits - 1}."
        )
    names = " → ".join(_layer(layer) for layer in model.layers)
    return f"A classifier: {names}; {weights}."


def _layer(layer: Any) -> str:
    config = layer.get_config()
    chosen = {key: config[key] for key in ("units", "map", "transition", "activation") if isinstance(config.get(key), str | int)}
    arguments = ", ".join(f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in chosen.items())
    return f"`{type(layer).__name__}({arguments})`"


def _origin(training: Training, export: str) -> list[str]:
    run, data = training.run, training.dataset
    shape = "×".join(map(str, data["image_shape"])) if "image_shape" in data else f"length {data.get('length')}"
    found = {**{key: curve[-1] for key, curve in run.curves.items()}, **run.measurements}
    found |= found.get("reconstruction", {})
    metrics = []
    for key, (words, form, factor) in METRICS.items():
        if isinstance(found.get(key), int | float) and not (key == "validation_loss" and "validation_error" in found):
            metrics.append(f"{words.format(validation=data['validation'])}: **{form.format(factor * found[key])}**")
    return [
        f"* Data: {data['name']}, {data['train']} training examples, {shape}.",
        f"* Seed {run.seed}; {_settings(training.settings)}.",
        *(f"* {text[0].upper()}{text[1:]}." for text in metrics),
        "* Made by:",
        "",
        "```bash",
        *dict.fromkeys(training.commands),
        export,
        "```",
        "",
    ]


def _settings(settings: dict[str, Any]) -> str:
    names = ("epochs", "train_steps", "batch_size", "learning_rate", "transition_learning_rate")
    return ", ".join(f"{re.sub('_', ' ', key)} {settings[key]}" for key in names if settings.get(key) is not None)


def _certificate(model: Any) -> str:
    if hasattr(model, "certificates"):
        certificates = model.certificates().values()
        proven = sum(bool(c.invertible) for c in certificates)
        worst = max(c.condition for c in certificates)
        return (
            f"Certificate: {proven} of {len(certificates)} mixings are proven to be invertible (largest κ(S) {worst:.3f}, where "
            "the bound is 2)."
        )
    return "Certificate: none needed, since a classifier is not inverted."
