"""K steps of a flow as one layer: ActNorm → a mixing of the channels → a coupling, K times."""

from collections.abc import Callable
from typing import Literal, TypeVar

import keras

from keras_auxref.flows.chain import Chain
from keras_auxref.flows.copies import clone
from keras_auxref.flows.parts import ActNorm
from keras_auxref.flows.repeat import Repeat
from keras_auxref.typing import DType, Tensor

Visit = Callable[[str, keras.layers.Layer, Tensor], None]
T = TypeVar("T")


def flow_steps(
    mixing: keras.layers.Layer,
    coupling: keras.layers.Layer,
    times: int,
    name: str,
    dtype: DType,
    unroll: bool | None = None,
    remat: bool | Literal["inverse"] = False,
) -> Repeat:
    """`times` copies of ActNorm → mixing → coupling, from templates of the two.

    The layers of a step are called `act_norm`, `mixing` and `coupling`. A `Chain` as mixing gives its layers, under their names.
    """
    parts = [clone(layer) for layer in mixing.layers] if isinstance(mixing, Chain) else [clone(mixing, name="mixing")]
    step = Chain([ActNorm(name="act_norm", dtype=dtype), *parts, clone(coupling, name="coupling")], name="step", dtype=dtype)
    return Repeat(step, times, unroll=unroll, remat=remat, name=name, dtype=dtype)


def each_mixing(steps: Repeat, function: Callable[[keras.layers.Layer], T]) -> dict[str, T]:
    """function(layer) for the mixings of every step, by names such as `level_1_step_3_mixing`."""
    found = {}
    for k in range(steps.times):
        with steps.copy(k) as step:
            found.update({f"{steps.name}_step_{k + 1}_{layer.name}": function(layer) for layer in step.layers[1:-1]})
    return found


def walk_mixings(steps: Repeat, x: Tensor, visit: Visit) -> Tensor:
    """The output of the steps for x, with a call of visit(name, layer, its input) for every mixing in between."""
    for k in range(steps.times):
        with steps.copy(k) as step:
            for i, layer in enumerate(step.layers):
                if 0 < i < len(step.layers) - 1:
                    visit(f"{steps.name}_step_{k + 1}_{layer.name}", layer, x)
                x = layer(x)
    return x
