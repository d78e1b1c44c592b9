"""The only code that depends on the backend of Keras: nothing outside this folder asks which one runs.

Everything else in `ops` is written in `keras.ops`. `numpy` has the defaults; the other modules replace what their backend does
differently.

* Gradients: `closed_form` gives a function a custom gradient, `closed_or_plain` does so where it pays, `vjp` differentiates.
* Graphs: `shared` keeps them small, `only_rows` works on a few rows of a batch and `picks_rows` tells whether that saves time,
  `compiled` compiles a method of a model, `at_the_start` one that runs a few times, `outside_graphs` computes initial values,
  `is_concrete` and `inside_xla` tell how a function runs.
* Numbers: `wide_dtype`, `as_tensor`, `kind_of`, `tanh`, `split`, `solve_upper`, `normal` and `uniform`.
* Loops: `Loop` is the recurrence, None if the backend has none; `squared`, `squared_vjp` and `expm` serve the closed form of the
  exponential.
* Depth: `loop` runs equal steps as a loop, `prefers_loops` tells whether that is faster, and `convolve` is a convolution that is
  fast there; `recomputed` and `together` save memory.
* Devices: `on_each_device` computes with the rows of each device apart, `replicas` counts the replicas that `tf.distribute` makes
  of a model.
"""

import importlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import keras

from keras_auxref.ops.backend import numpy as _default
from keras_auxref.typing import Tensor

T = TypeVar("T")
NAME: str = keras.backend.backend()
_CHOSEN: Any = importlib.import_module(f"{__name__}.{NAME}") if NAME in ("tensorflow", "jax", "torch") else _default


def _of(name: str) -> Any:
    return getattr(_CHOSEN, name, None) or getattr(_default, name, None)


Loop = _of("Loop")
as_tensor = _of("as_tensor")
at_the_start = _of("at_the_start")
closed_form = _of("closed_form")
compiled = _of("compiled")
convolve = _of("convolve")
expm = _of("expm")
inside_xla = _of("inside_xla")
is_concrete = _of("is_concrete")
kind_of = _of("kind_of")
loop = _of("loop")
normal = _of("normal")
on_each_device = _of("on_each_device")
only_rows = _of("only_rows")
outside_graphs = _of("outside_graphs")
picks_rows = _of("picks_rows")
prefers_loops = _of("prefers_loops")
recomputed = _of("recomputed")
replicas = _of("replicas")
shared = _of("shared")
solve_upper = _of("solve_upper")
split = _of("split")
squared = _of("squared")
squared_vjp = _of("squared_vjp")
tanh = _of("tanh")
together = _of("together")
uniform = _of("uniform")
vjp = _of("vjp")
wide_dtype = _of("wide_dtype")


def closed_or_plain(
    forward: Callable[..., tuple[T, object]],
    backward: Callable[..., Iterable[Tensor | None]],
    reference: Callable[..., Iterable[Tensor]],
    arguments: tuple[object, ...],
    plain: Callable[..., T],
    forward_mode: bool = True,
) -> T:
    """`closed_form` on TensorFlow, which does not fuse the operations of automatic differentiation; elsewhere plain(*arguments).

    The arguments are those of `closed_form`. Placeholders of a functional model go through `plain`, and so does TensorFlow's
    forward mode, unless `plain` is not the same function everywhere: `forward_mode=False` refuses it.
    """
    if NAME != "tensorflow" or any(isinstance(argument, keras.KerasTensor) for argument in arguments):
        return plain(*arguments)
    return closed_form(forward, backward, reference, arguments, plain=plain if forward_mode else None)


def require_tensorflow(function: str) -> None:
    """For everything that needs TensorFlow itself: SavedModels, TensorFlow Probability."""
    if NAME != "tensorflow":
        raise NotImplementedError(
            f"`{function}` needs TensorFlow. Expected the TensorFlow backend of Keras. Received: KERAS_BACKEND={NAME!r}"
        )
