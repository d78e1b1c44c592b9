"""The activations of recurrences, and their derivatives as functions of their output."""

from collections.abc import Callable
from typing import Any

from keras import ops

from keras_auxref.ops import backend
from keras_auxref.typing import Tensor

ACTIVATIONS = ("linear", "modrelu", "relu", "sigmoid", "tanh")
"""The activations whose derivative is a function of their output: nothing else has to be stored."""


def modrelu(x: Tensor, bias: Tensor) -> Tensor:
    """The real modReLU, sign(x) · relu(|x| + b), for b broadcast against x. Zero stays zero for every b.

    Example:
    >>> import numpy as np
    >>> print(modrelu(np.array([-3.0, 0.5, 0.0]), np.array([-1.0, -1.0, 1.0])).numpy())
    [-2.  0.  0.]

    Reference: Arjovsky, Shah & Bengio, "Unitary Evolution Recurrent Neural Networks", ICML 2016.
    """
    x = ops.convert_to_tensor(x)
    return ops.sign(x) * ops.relu(ops.abs(x) + bias)


def activation(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """φ(z) with the bias of modReLU; and a function from φ(z) and its cotangent g to the cotangents of z and of the bias."""

    def deactivate_modrelu(g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        sign = ops.sign(h)
        gb = g * sign
        return gb * sign, gb

    return {
        "linear": (lambda z, _: z, lambda g, h: (g, None)),
        "modrelu": (modrelu, deactivate_modrelu),
        "relu": (lambda z, _: ops.relu(z), lambda g, h: (g * ops.sign(h), None)),
        "sigmoid": (lambda z, _: ops.sigmoid(z), lambda g, h: (g * h * (1 - h), None)),
        "tanh": (lambda z, _: backend.tanh(z), lambda g, h: (g * (1 - ops.square(h)), None)),
    }[name]
