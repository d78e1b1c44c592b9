"""The transitions T of recurrences, each with its vector-Jacobian product."""

from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from keras_auxref.ops.activations import activation
from keras_auxref.ops.reflect import Reflection, null_bound, reflection, reflection_vjp
from keras_auxref.typing import Tensor

TRANSITIONS = ("aux", "linear")


class Transition(NamedTuple):
    """T with its vector-Jacobian product. `forward(h)` gives T(h) and what to save; `backward(g, h, *saved)` gives the cotangent
    of h and the gu whose Σ gu hᵀ is the gradient of the kernel.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    saved_sizes: tuple[int, ...]


def parts(transition: str, phi: str, kernel: Tensor) -> tuple[Transition, Callable[..., Any], Callable[..., Any]]:
    """T for this kernel, φ, and the gradient of φ from its output."""
    return ({"aux": _aux, "linear": _linear}[transition](kernel), *activation(phi))


def _linear(kernel: Tensor) -> Transition:
    transposed = ops.transpose(kernel)
    return Transition(lambda h: (ops.matmul(h, transposed), ()), lambda g, h: (ops.matmul(g, kernel), g), ())


def _aux(kernel: Tensor) -> Transition:
    """f(h) = H(Wh) h, with what depends on W alone computed once. Saves what `reflection_vjp` needs, except h."""
    bound = null_bound(kernel)

    def forward(h: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        result = reflection(h, kernel, bound)
        return result.y, (result.direction, result.size, result.scale, result.factor, result.relative)

    def backward(g: Tensor, h: Tensor, direction: Tensor, size: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return reflection_vjp(g, Reflection(h, size, h / size, direction, *rest), kernel)

    return Transition(forward, backward, (kernel.shape[0], 1, 1, 1, 1))
