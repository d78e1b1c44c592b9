"""Files of version 0.2, in which every step of a flow had weights of its own, read as those of today, which are stacked."""

import io
import tempfile
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from keras_auxref.flows.repeat import Repeat
from keras_auxref.layers import FactoredReflection

OLD, NEW = "flow/steps_of_level", "flow/steps_of_levels"


def stack_old_steps(levels: list[Repeat], trainable: int, store: Any) -> None:
    """Converts a store of weights that is being loaded from the layout of version 0.2 to that of today.

    Args:
        levels: The steps of every level.
        trainable: How many trainable variables the model has.
        store: What `load_own_variables` of the model gets from Keras.
    """
    old = getattr(store, "h5_file", None)
    if not isinstance(old, h5py.File) or OLD not in old:
        return
    new = h5py.File(io.BytesIO(), "w")
    for name in old:
        if name != "flow":
            old.copy(name, new)
    new.create_group("flow")
    for name in old["flow"]:
        if name != "steps_of_level":
            old.copy(f"flow/{name}", new["flow"])
    for number, steps in enumerate(levels):
        group = old[f"{OLD}/{_nth('container', number)}"]
        values = [_values(steps, group[_nth("container", k)]) for k in range(steps.times)]
        _write(new, f"{NEW}/{_nth('repeat', number)}", [np.stack(arrays) for arrays in zip(*values, strict=True)])
    if "optimizer/vars" in old:
        moments = [old["optimizer/vars"][str(i)][()] for i in range(len(old["optimizer/vars"]))]
        del new["optimizer"]
        _write(new, "optimizer", _stacked_moments(moments, levels, trainable))
    store.h5_file = new


def _nth(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name


def _write(file: h5py.File, path: str, arrays: list[np.ndarray]) -> None:
    group = file.create_group(f"{path}/vars")
    for i, array in enumerate(arrays):
        group.create_dataset(str(i), data=array)


def _values(steps: Repeat, group: h5py.Group) -> list[np.ndarray]:
    """The weights of one step, in the order in which `steps` saves its own. They pass through the variables of its template."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.weights.h5"
        with h5py.File(path, "w") as file:
            group.file.copy(group, file, name="layers")
        template = steps.template()
        keras.saving.load_weights(template, path)
    found = {id(weight): variable for weight, variable in zip(steps._stacked, template.variables, strict=True)}
    rates = _rates(steps)
    own = [*steps._trainable_variables, *steps._non_trainable_variables]
    return [keras.ops.convert_to_numpy(found[id(weight)]) / rates.get(id(weight), 1) for weight in own]


def _rates(steps: Repeat) -> dict[int, float]:
    """The `eigenvalue_rate` a of every weight ρ of factored reflections, which was 1: tanh(a ρ/a) leaves λ as it is."""
    layers = [layer for layer in steps.template()._flatten_layers() if isinstance(layer, FactoredReflection)]
    rates = {id(layer.exponents): layer.eigenvalue_rate for layer in layers}
    pairs = zip(steps._stacked, steps.template().variables, strict=True)
    return {id(weight): rates[id(variable)] for weight, variable in pairs if id(variable) in rates}


def _stacked_moments(arrays: list[np.ndarray], levels: list[Repeat], trainable: int) -> list[np.ndarray]:
    """The variables of an optimizer: a few of its own, and after them one or more of the shape of every weight, in turn."""
    counts = [len(steps.trainable_variables) for steps in levels]
    before = trainable + sum((steps.times - 1) * count for steps, count in zip(levels, counts, strict=True))
    own = next((n for n in (1, 2) if before and (len(arrays) - n) % before == 0), None)  # its steps, and its learning rate
    if own is None:
        return arrays
    slots = (len(arrays) - own) // before
    stacked, start = arrays[:own], own
    for steps, count in zip(levels, counts, strict=True):
        size = count * slots
        parts = [arrays[start + k * size : start + (k + 1) * size] for k in range(steps.times)]
        rates = _rates(steps)
        # With a ρ in place of ρ gradients grow by a: the first moment by a, the second by a².
        powers = [rates.get(id(weight), 1.0) ** (slot + 1) for weight in steps.trainable_variables for slot in range(slots)]
        stacked += [power * np.stack(moments) for power, moments in zip(powers, zip(*parts, strict=True), strict=True)]
        start += steps.times * size
    return stacked + arrays[start:]
