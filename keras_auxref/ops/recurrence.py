"""A whole recurrence h_t = φ(T(h_{t−1}) + V x_t + b) as one function with a closed-form gradient, on TensorFlow and JAX."""

import functools

import keras
from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.activations import ACTIVATIONS
from keras_auxref.ops.checks import HALF, as_tensor, check_vectors_and_matrix
from keras_auxref.ops.transitions import TRANSITIONS, parts
from keras_auxref.typing import Tensor


def recurrence(
    x: Tensor,
    state: Tensor,
    kernel: Tensor,
    input_kernel: Tensor,
    input_bias: Tensor | None = None,
    activation_bias: Tensor | None = None,
    *,
    transition: str = "aux",
    activation: str = "modrelu",
    return_sequences: bool = False,
    closed_form: bool = True,
) -> Tensor:
    """Runs a recurrence over the first axis of x.

        h_t = φ(T(h_{t−1}) + V x_t + b),      t = 1 … time,      h_0 = state
        aux:     T(h) = H(Wh) h, W the kernel, with the rules of `reflect`: T(h) = h where W h = 0, and no overflow
        linear:  T(h) = U h, U the kernel

    V x_t + b is one matrix product for all t. Then one loop runs forward and keeps the states and, for `aux`, the directions of
    the reflections; another runs backward and carries the cotangent of the state and the sums for the weights. Automatic
    differentiation of the same loop would store the result of every operation of every step, and storing takes most of the time
    of a step of this size. Second derivatives are exact: they come from automatic differentiation. Runs on TensorFlow and JAX.

    Args:
        x: Tensor of shape `(time, batch, d)`, in float32 or float64.
        state: Tensor of shape `(batch, n)`.
        kernel: Tensor of shape `(n, n)`.
        input_kernel: Vᵀ, of shape `(d, n)`, as Keras has it.
        input_bias: b, of shape `(n,)`, or None.
        activation_bias: The bias of modReLU, of shape `(n,)`; for the other activations None.
        transition: `"aux"` or `"linear"`.
        activation: φ, one of `ACTIVATIONS`.
        return_sequences: Whether to return every state instead of the last.
        closed_form: If False, nothing is kept for the gradient: for inference and for export (a SavedModel cannot hold what the
            closed form keeps). The value is the same, and automatic differentiation gives the gradient.

    Returns:
        A tensor of shape `(batch, n)`, or `(time, batch, n)` with `return_sequences`.
    """
    if not is_fused():
        raise NotImplementedError(
            f"`recurrence` needs Keras' backend TensorFlow or JAX. Received: KERAS_BACKEND={backend.NAME!r}"
        )
    x, state, kernel, v = (as_tensor(t, n) for t, n in ((x, "x"), (state, "state"), (kernel, "kernel"), (input_kernel, "V")))
    _check(x, state, kernel, v, activation_bias, transition, activation)
    zeros = ops.zeros(kernel.shape[:1], dtype=kernel.dtype)
    biases = (zeros if b is None else as_tensor(b, "bias") for b in (input_bias, activation_bias))
    loop = backend.Loop(functools.partial(parts, transition, activation), return_sequences)
    arguments = (*loop.aligned(x, state), kernel, v, *biases)
    return backend.closed_form(loop.forward, loop.backward, loop.reference, arguments) if closed_form else loop.plain(*arguments)


def is_fused() -> bool:
    """Whether this backend has the loops of `recurrence`."""
    return backend.Loop is not None


def _check(
    x: Tensor, state: Tensor, kernel: Tensor, v: Tensor, activation_bias: Tensor | None, transition: str, activation: str
) -> None:
    if transition not in TRANSITIONS:
        raise ValueError(f"Unknown transition. Expected one of {list(TRANSITIONS)}. Received: {transition!r}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"Unknown activation. Expected one of {list(ACTIVATIONS)}. Received: {activation!r}")
    if (activation_bias is None) == (activation == "modrelu"):
        raise ValueError(
            "`activation_bias` is the bias of modReLU. Expected a tensor for activation='modrelu' and None for the others. "
            f"Received: activation={activation!r}, activation_bias={'None' if activation_bias is None else 'a tensor'}"
        )
    check_vectors_and_matrix(state, kernel, "state")
    shapes = tuple(tuple(t.shape) for t in (x, state, v))
    if [len(shape) for shape in shapes] != [3, 2, 2] or shapes[2] != (shapes[0][2], shapes[1][1]):
        raise ValueError(
            "Expected shapes (time, batch, d) for `x`, (batch, n) for `state` and (d, n) for `input_kernel`. Received: "
            "x {}, state {}, input_kernel {}".format(*shapes)
        )
    dtypes = [keras.backend.standardize_dtype(t.dtype) for t in (x, kernel, v)]
    if len(set(dtypes)) > 1 or dtypes[0] in HALF:
        raise ValueError(f"Expected one dtype, float32 or float64. Received: x {dtypes[0]}, kernel {dtypes[1]}, V {dtypes[2]}")
