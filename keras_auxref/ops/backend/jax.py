"""JAX: eager and under jit, in float64 where `jax_enable_x64` is set."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras


def wide_dtype() -> str:
    """The most precise floating-point dtype: float32 unless JAX was told to have float64."""
    return "float64" if jax.config.jax_enable_x64 else "float32"


def inside_xla() -> bool:
    """XLA is everywhere in JAX, with an eigendecomposition of general matrices and an exact one of symmetric ones."""
    return False


def tanh(x: Any) -> Any:
    """tanh in the dtype of x: Keras' own passes float64 through float32 on JAX."""
    return keras.ops.tanh(x) if isinstance(x, keras.KerasTensor) else jnp.tanh(x)


def solve_upper(t: Any, b: Any) -> Any:
    """T⁻¹b for an upper triangular T of (m, m), by its inverse: for a T whose inverse has no large entries.

    XLA's triangular solve is a call of LAPACK, whose threads wait for the cores that XLA's own are on: a millisecond for a matrix
    that takes ten microseconds.
    """
    if isinstance(t, keras.KerasTensor) or isinstance(b, keras.KerasTensor):
        return keras.ops.solve_triangular(t, b)
    return jnp.matmul(_inverse_upper(t), b)


@jax.custom_jvp
def _inverse_upper(t: Any) -> Any:
    """T⁻¹ from the inverses of its diagonal blocks, of one entry, of two, of four, …: about log₂ m products of small matrices.

    [[A, B], [0, C]]⁻¹ = [[A⁻¹, −A⁻¹BC⁻¹], [0, C⁻¹]].
    """
    m = t.shape[0]
    size = 1 << (m - 1).bit_length()
    # With ones on the diagonal below, and so zero in the inverse beside it.
    t = jnp.pad(t, (0, size - m)) + jnp.diag(jnp.arange(size) >= m).astype(t.dtype)
    inverse, width = (1 / jnp.diagonal(t))[:, None, None], 1
    while width < size:
        count = size // (2 * width)
        blocks = jnp.einsum("iaib->iab", t.reshape(count, 2 * width, count, 2 * width))
        first, last = inverse[0::2], inverse[1::2]
        corner = -_exactly(_exactly(first, blocks[:, :width, width:]), last)
        above, below = jnp.concatenate([first, corner], axis=2), jnp.concatenate([jnp.zeros_like(corner), last], axis=2)
        inverse, width = jnp.concatenate([above, below], axis=1), 2 * width
    return inverse[0, :m, :m]


@_inverse_upper.defjvp
def _inverse_upper_jvp(primals: Any, tangents: Any) -> Any:
    """−T⁻¹ Ṫ T⁻¹."""
    inverse = _inverse_upper(*primals)
    return inverse, -_exactly(inverse, _exactly(jnp.triu(tangents[0]), inverse))


def _exactly(a: Any, b: Any) -> Any:
    """a b in full precision, which accelerators do not take by default."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def vjp(function: Callable[..., Any]) -> Callable[..., Any]:
    """(cotangents, *arguments) → gradients: the vector-Jacobian product of a function, by automatic differentiation."""
    return lambda cotangents, *arguments: jax.vjp(function, *arguments)[1](cotangents)


def closed_form(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    reference: Callable[..., Any],
    arguments: tuple[Any, ...],
    constants: Any = (),
    plain: Callable[..., Any] | None = None,
) -> Any:
    """forward(*arguments, constants), differentiated by `backward`, and a second time through `reference`.

    The arguments are those of the TensorFlow version. Forward mode is refused by JAX.
    """

    @jax.custom_vjp
    def both(constants: Any, *arguments: Any) -> Any:
        return forward(*arguments, constants)

    def both_forward(constants: Any, *arguments: Any) -> Any:
        # The function itself, whose own rule a second derivative then uses.
        outputs, saved = both(constants, *arguments)
        return (outputs, saved), (constants, arguments, saved)

    def both_backward(residuals: Any, cotangents: Any) -> Any:
        constants, arguments, saved = residuals
        return (None, *gradient((constants, saved), cotangents[0], *arguments))

    @jax.custom_vjp
    def gradient(kept: Any, cotangents: Any, *arguments: Any) -> Any:
        constants, saved = kept
        return tuple(backward(cotangents, saved, *arguments, constants))

    def gradient_forward(kept: Any, cotangents: Any, *arguments: Any) -> Any:
        return gradient(kept, cotangents, *arguments), (kept[0], cotangents, arguments)

    def gradient_backward(residuals: Any, seconds: Any) -> Any:
        constants, cotangents, arguments = residuals
        plain = lambda cotangents, *arguments: tuple(reference(cotangents, *arguments, constants))  # noqa: E731
        return (None, *jax.vjp(plain, cotangents, *arguments)[1](seconds))

    both.defvjp(both_forward, both_backward)
    gradient.defvjp(gradient_forward, gradient_backward)
    return both(constants, *arguments)[0]


def shared(function: Callable[..., Any], *arguments: Any, rows: int = 0, **static: Any) -> Any:
    """function(*arguments, **static): XLA finds what is the same by itself."""
    return function(*arguments, **static)


def picks_rows() -> bool:
    """Whether `only_rows` costs in proportion to the rows that are chosen: shapes are static here."""
    return False


def only_rows(chosen: Any, function: Callable[..., Any], current: Any, *rows: Any, total: Any = ()) -> Any:
    """`current`, a nest of (n, …), with the rows where `chosen` (n, 1) replaced by what a function gives for these rows alone.

    The arguments are those of the TensorFlow version. All rows are computed, if any is chosen.
    """

    def replaced() -> Any:
        masked = jax.tree.map(lambda t: jnp.where(chosen, t, 0), rows[0])
        new, extra = function(masked, *rows[1:])
        return jax.tree.map(lambda a, b: jnp.where(chosen, a, b), new, current), jax.tree.map(jnp.add, total, extra)

    return jax.lax.cond(jnp.any(chosen), replaced, lambda: (current, total))
