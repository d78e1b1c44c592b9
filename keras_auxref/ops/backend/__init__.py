"""What the backends of Keras do differently: everything else in `ops` is written in `keras.ops`.

Each module of this folder offers the same names. `closed_form` gives a function a gradient of its own; `vjp` differentiates a
function; `shared` keeps graphs small; `only_rows` works on a few rows of a batch; `inside_xla` and `wide_dtype` tell what the
backend can do; `tanh` keeps the dtype; `solve_upper` solves with a triangular matrix.
"""

import importlib
from typing import Any

import keras

_NAME = keras.backend.backend()
_CHOSEN: Any = importlib.import_module(f"{__name__}.{_NAME if _NAME in ('tensorflow', 'jax', 'torch') else 'numpy'}")

closed_form = _CHOSEN.closed_form
inside_xla = _CHOSEN.inside_xla
only_rows = _CHOSEN.only_rows
picks_rows = _CHOSEN.picks_rows
shared = _CHOSEN.shared
solve_upper = _CHOSEN.solve_upper
tanh = _CHOSEN.tanh
vjp = _CHOSEN.vjp
wide_dtype = _CHOSEN.wide_dtype
