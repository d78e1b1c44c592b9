"""What the backends of Keras do differently: everything else in `ops` is written in `keras.ops`.

Each module of this folder offers the same names. `closed_form` gives a function a gradient of its own; `vjp` differentiates a
function; `shared` keeps graphs small; `only_rows` works on a few rows of a batch; `inside_xla` and `wide_dtype` tell what the
backend can do; `tanh` keeps the dtype; `solve_upper` solves with a triangular matrix.
"""

import keras

if keras.backend.backend() == "tensorflow":
    from keras_auxref.ops.backend.tensorflow import (
        closed_form,
        inside_xla,
        only_rows,
        picks_rows,
        shared,
        solve_upper,
        tanh,
        vjp,
        wide_dtype,
    )
elif keras.backend.backend() == "jax":
    from keras_auxref.ops.backend.jax import (
        closed_form,
        inside_xla,
        only_rows,
        picks_rows,
        shared,
        solve_upper,
        tanh,
        vjp,
        wide_dtype,
    )
elif keras.backend.backend() == "torch":
    from keras_auxref.ops.backend.torch import (
        closed_form,
        inside_xla,
        only_rows,
        picks_rows,
        shared,
        solve_upper,
        tanh,
        vjp,
        wide_dtype,
    )
else:
    from keras_auxref.ops.backend.numpy import (
        closed_form,
        inside_xla,
        only_rows,
        picks_rows,
        shared,
        solve_upper,
        tanh,
        vjp,
        wide_dtype,
    )

__all__ = ["closed_form", "inside_xla", "only_rows", "picks_rows", "shared", "solve_upper", "tanh", "vjp", "wide_dtype"]
