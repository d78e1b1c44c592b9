"""The gradient of the inverse, by the implicit function theorem.

f(x) = y gives J dx + (∂f/∂W) dW = dy, so that for a cotangent g of x, gy = J⁻ᵀg and gW = −(∂f/∂W)ᵀ gy. Nothing is
differentiated through the search.
"""

from typing import Any

from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.at_points import at_points
from keras_auxref.ops.checks import is_concrete
from keras_auxref.ops.equation import bracket_of_factors
from keras_auxref.ops.factors import PAIRED_WIDE, Factors
from keras_auxref.ops.jacobian import jacobian
from keras_auxref.ops.point import Point, jacobian_solve_transposed
from keras_auxref.ops.reflect import reflection, reflection_vjp
from keras_auxref.ops.rows import dtype_of, matmul, power_of_two, size_of
from keras_auxref.ops.search import search
from keras_auxref.typing import Tensor


def differentiable_inverse(y: Tensor, w: Tensor, constants: Any, possible: tuple[int, ...], max_steps: int) -> Tensor:
    """x with the gradient of the implicit function theorem: for a cotangent g, gy = J⁻ᵀg and gW = −(∂f/∂W)ᵀ J⁻ᵀg."""

    def forward(y: Tensor, w: Tensor, constants: Any) -> tuple[Tensor, Tensor]:
        x = backend.shared(search, y, w, constants, rows=1, possible=possible, max_steps=max_steps)[0]
        return x, x

    def backward(g: Tensor, x: Tensor, y: Tensor, w: Tensor, constants: Any) -> Any:
        factors, ways = _with_enough_digits(constants[0], possible, dtype_of(w))
        return backend.shared(_gradients, g, x, w, factors, possible=ways)

    def reference(g: Tensor, y: Tensor, w: Tensor, constants: Any) -> Any:
        # The function itself, whose first derivative is known.
        x = differentiable_inverse(y, w, constants, possible, max_steps)
        transposed = ops.swapaxes(jacobian(x, w), -1, -2)
        t = ops.solve(transposed, g[..., None])[..., 0]
        return t, -backend.vjp(lambda w: reflection(x, w).y)(t, w)[0]

    return backend.closed_form(forward, backward, reference, (y, w), constants)


def _with_enough_digits(factors: Factors, possible: tuple[int, ...], dtype: str) -> tuple[Factors, tuple[int, ...]]:
    """Factors with a float64 route for an ill-conditioned W, and the routes that remain possible."""
    if dtype == backend.wide_dtype() or min(possible) >= PAIRED_WIDE:
        return factors, possible
    route = ops.where(bracket_of_factors(factors).mild, factors.route, ops.maximum(factors.route, PAIRED_WIDE))
    return factors._replace(route=route), (int(route),) if is_concrete(route) else tuple(sorted({*possible, PAIRED_WIDE}))


def _gradients(g: Tensor, x: Tensor, w: Tensor, factors: Factors, *, possible: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """J⁻ᵀg and −(∂f/∂W)ᵀJ⁻ᵀg at x = f⁻¹(y)."""
    scale = ops.cast(factors.scale, w.dtype)
    w = w / scale
    forward = reflection(x, w, size=power_of_two(size_of(x)))
    nothing = (ops.zeros_like(x), ops.zeros_like(x)), ()
    t, gu = at_points(_implicit, g, forward, w, factors, possible, nothing)[0]
    return t, -matmul(ops.transpose(gu), x) / scale


def _implicit(point: Point, g: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[()]]:
    """t = J⁻ᵀg, and the gu of f for the cotangent t."""
    t = jacobian_solve_transposed(point, g)
    return (t, reflection_vjp(t, point.forward, point.w)[1]), ()
