"""JAX: eager and under jit, in float64 where `jax_enable_x64` is set."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.experimental.sparse
import jax.extend.core
import jax.numpy as jnp
import keras
import numpy as np
from jax.interpreters import ad, batching, mlir

from keras_auxref.ops.backend._scan import Scan as Loop
from keras_auxref.typing import Tensor

__all__ = ["Loop"]
T = TypeVar("T")
N = TypeVar("N")


def wide_dtype() -> str:
    """The most precise floating-point dtype: float32 unless float64 is enabled in JAX."""
    return "float64" if jax.config.jax_enable_x64 else "float32"


def is_concrete(tensor: object) -> bool:
    """Whether the values of a tensor can be read now: not while JAX traces."""
    return not isinstance(tensor, jax.core.Tracer)


def kind_of(tensor: object) -> str:
    """Whether a tensor is "dense", or "sparse" as JAX's BCOO."""
    return "sparse" if isinstance(tensor, jax.experimental.sparse.JAXSparse) else "dense"


def compiled(method: Callable[..., T]) -> Callable[..., T]:
    """A method of a model as a `jax.jit` of the function of the model's weights and the arguments."""
    name = f"_jitted_{method.__name__}"

    @functools.wraps(method)
    def call(self: Any, *args: Tensor | None) -> T:
        if name not in self.__dict__:
            # Not tracked by Keras. The function and the model refer to each other, so they are freed together.
            def pure(values: list[Tensor], *args: object) -> T:
                with keras.StatelessScope(state_mapping=list(zip(self.variables, values, strict=True))):
                    return method(self, *args)

            object.__setattr__(self, name, jax.jit(pure))
        return self.__dict__[name]([variable.value for variable in self.variables], *args)

    return call


def at_the_start(method: Callable[..., T]) -> Callable[..., T]:
    """A method of a layer that runs a few times, on numbers. It is compiled here, because eagerly XLA compiles every operation.

    A method that looks at values cannot be compiled and runs eagerly.
    """
    jitted = compiled(method)

    @functools.wraps(method)
    def call(self: Any, *args: Tensor | None) -> T:
        try:
            return jitted(self, *args)
        except jax.errors.JAXTypeError:
            return method(self, *args)

    return call


def tanh(x: Tensor) -> Tensor:
    """tanh in the dtype of x: Keras' own passes float64 through float32."""
    return keras.ops.tanh(x) if isinstance(x, keras.KerasTensor) else jnp.tanh(x)


def solve_upper(t: Tensor, b: Tensor) -> Tensor:
    """T⁻¹b for an upper triangular T of (m, m), by its inverse: for a T whose inverse has no large entries.

    XLA's triangular solve calls LAPACK, whose threads wait for the cores that XLA's own threads occupy: a millisecond for a
    matrix that takes ten microseconds.
    """
    if isinstance(t, keras.KerasTensor) or isinstance(b, keras.KerasTensor):
        return keras.ops.solve_triangular(t, b)
    return jnp.matmul(_inverse_upper(t), b)


@jax.custom_jvp
def _inverse_upper(t: jax.Array) -> jax.Array:
    """T⁻¹ from the inverses of its diagonal blocks, of one entry, of two, of four, …: about log₂ m products of small matrices.

    [[A, B], [0, C]]⁻¹ = [[A⁻¹, −A⁻¹BC⁻¹], [0, C⁻¹]].
    """
    m = t.shape[0]
    size = 1 << (m - 1).bit_length()
    # Padded with ones on the diagonal, so the padding is zero in the inverse next to T⁻¹.
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
def _inverse_upper_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    """−T⁻¹ Ṫ T⁻¹."""
    inverse = _inverse_upper(*primals)
    return inverse, -_exactly(inverse, _exactly(jnp.triu(tangents[0]), inverse))


def _exactly(a: Tensor, b: Tensor) -> Tensor:
    """a b in full precision, which is not the default on accelerators."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def vjp(function: Callable[..., object]) -> Callable[..., tuple[Tensor, ...]]:
    """(cotangents, *arguments) → gradients: the vector-Jacobian product of a function, by automatic differentiation."""
    return lambda cotangents, *arguments: jax.vjp(function, *arguments)[1](cotangents)


def closed_form(
    forward: Callable[..., tuple[T, object]],
    backward: Callable[..., Iterable[Tensor | None]],
    reference: Callable[..., Iterable[Tensor]],
    arguments: tuple[object, ...],
    constants: object = (),
    plain: Callable[..., T] | None = None,
) -> T:
    """forward(*arguments, constants), differentiated by `backward`, and a second time through `reference`.

    The arguments are those of the TensorFlow version. JAX refuses forward mode for the function itself; for its gradient, as in
    `jax.hessian`, it works where there is a `plain`.
    """

    @jax.custom_vjp
    def both(constants: object, *arguments: Tensor) -> tuple[T, object]:
        return forward(*arguments, constants)

    def both_forward(constants: object, *arguments: Tensor) -> tuple[tuple[T, object], object]:
        # Without `plain`, the function itself; a second derivative then uses its own rule.
        outputs, saved = both(constants, *arguments) if plain is None else value(constants, *arguments)
        return (outputs, saved), (constants, arguments, saved)

    @jax.custom_jvp
    def value(constants: object, *arguments: Tensor) -> tuple[T, object]:
        return forward(*arguments, constants)

    @value.defjvp
    def value_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        outputs, saved = value(*primals)
        moved = jax.jvp(plain, primals[1:], tangents[1:])[1]
        return (outputs, saved), (moved, jax.tree.map(_still, saved))

    def both_backward(residuals: Any, cotangents: Any) -> Any:
        constants, arguments, saved = residuals
        return (None, *gradient((constants, saved), cotangents[0], *arguments))

    @jax.custom_jvp
    def gradient(kept: Any, cotangents: Any, *arguments: Any) -> Any:
        constants, saved = kept
        return tuple(backward(cotangents, saved, *arguments, constants))

    @gradient.defjvp
    def gradient_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        constants = primals[0][0]
        again = lambda *tensors: tuple(reference(*tensors, constants))  # noqa: E731
        return gradient(*primals), jax.jvp(again, primals[1:], tangents[1:])[1]

    both.defvjp(both_forward, both_backward)
    return both(constants, *arguments)[0]


def _still(x: Tensor) -> Tensor | np.ndarray:
    """The tangent of a constant."""
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)


def shared(function: Callable[..., T], *arguments: object, rows: int = 0, **static: object) -> T:
    """function(*arguments, **static), compiled once for its shapes and dtypes, and reused by every later call.

    Called with numbers it is compiled in a hurry: seven times sooner, for code that takes up to twice as long. Inside a `jit` of
    the caller it is compiled with the rest.
    """
    given = (*jax.tree.leaves(arguments), jnp.zeros(()))  # the last is a tracer wherever JAX traces
    return _compiled(function, tuple(sorted(static.items())), all(map(is_concrete, given)))(*arguments)


@functools.lru_cache(maxsize=256)
def _compiled(function: Callable[..., Any], static: tuple[tuple[str, Any], ...], hurry: bool) -> Any:
    return jax.jit(functools.partial(function, **dict(static)), compiler_options=_sooner() if hurry else None)


@functools.cache
def _sooner() -> dict[str, Any] | None:
    """Options of XLA on a CPU that leave out optimisations; None where it does not know them."""
    options = {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 0}
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(lambda: 0, compiler_options=options)()
    except Exception:  # of another kind in every version
        return None
    return options


def picks_rows() -> bool:
    """Whether `only_rows` costs in proportion to the rows that are chosen."""
    return True


def only_rows(
    chosen: Tensor, function: Callable[..., tuple[N, object]], current: N, *rows: object, total: object = ()
) -> tuple[N, object]:
    """`current`, a nest of (n, …), with the rows where `chosen` (n, 1) replaced by what a function returns for these rows alone.

    The arguments are those of the TensorFlow version. Shapes are static here: a sixteenth of the batch is processed at a time,
    until no row is left.
    """
    many = chosen.shape[0]
    if many == 0:
        return current, total
    few = min(many, max(8, many // 16))

    def some(state: Any) -> Any:
        left, current, total = state
        index = jax.lax.top_k(left[:, 0].astype("int32"), few)[1]
        mine = left[index]
        first, *others = jax.tree.map(lambda t: t[index], rows)
        new, extra = function(jax.tree.map(lambda t: jnp.where(mine, t, 0), first), *others)
        current = jax.tree.map(lambda a, b: b.at[index].set(jnp.where(mine, a, b[index])), new, current)
        return left.at[index].set(False), current, jax.tree.map(jnp.add, total, extra)

    return jax.lax.while_loop(lambda state: jnp.any(state[0]), some, (chosen, current, total))[1:]


def prefers_loops(x: Tensor, convolves: bool) -> bool:
    """Whether equal steps on x run faster as a loop than written out: under `jit` yes, eagerly no.

    XLA on a CPU is slow at the gradients of a convolution inside a loop (see `convolve`), if the steps have others than ours.
    """
    return isinstance(x, jax.core.Tracer) and not (convolves and jax.default_backend() == "cpu")


def convolve(x: Tensor, kernel: Tensor, padding: str) -> Tensor:
    """The convolution of x (batch, …, channels in) with a kernel (…, channels in, channels out), in steps of one pixel.

    XLA on a CPU has its fast convolution only for axes in this order. It brings others into it, such as those of the gradients
    of a convolution, but not inside a loop: these would take 10 to 40 times as long. So the gradients here are in this order.
    """
    if not isinstance(x, jax.core.Tracer) or jax.default_backend() != "cpu":
        return keras.ops.conv(x, kernel, padding=padding, data_format="channels_last")
    pads = tuple(((k - 1) // 2, k // 2) if padding == "same" else (0, 0) for k in kernel.shape[:-2])
    return _convolution.bind(x, keras.ops.convert_to_tensor(kernel), pads=pads)


Pads: TypeAlias = tuple[tuple[int, int], ...]


def _convolved(x: Tensor, kernel: Tensor, *, pads: Pads) -> Tensor:
    axes = "DHW"[-len(pads) :]
    order = (f"N{axes}C", f"{axes}IO", f"N{axes}C")
    return jax.lax.conv_general_dilated(x, kernel, (1,) * len(pads), pads, dimension_numbers=order)


def _to_inputs(g: Tensor, x: Any, kernel: Tensor, *, pads: Pads) -> Tensor:
    turned = jnp.swapaxes(jnp.flip(kernel, range(len(pads))), -1, -2)
    return _convolution.bind(
        g, turned, pads=tuple((k - 1 - a, k - 1 - b) for k, (a, b) in zip(kernel.shape[:-2], pads, strict=True))
    )


def _to_kernel(g: Tensor, x: Tensor, kernel: Any, *, pads: Pads) -> Tensor:
    found = _convolution.bind(jnp.swapaxes(x, 0, -1), jnp.moveaxis(g, 0, -2), pads=pads)
    return jnp.moveaxis(found, 0, -2)


def _convolved_for_each(arguments: Any, axes: Any, *, pads: Pads) -> Any:
    return jax.vmap(functools.partial(_convolved, pads=pads), in_axes=axes)(*arguments), 0


def _convolved_shape(x: Any, kernel: Any, *, pads: Pads) -> Any:
    found = jax.eval_shape(functools.partial(_convolved, pads=pads), x, kernel)
    return jax.core.ShapedArray(found.shape, found.dtype)


# Linear in both arguments, with gradients that are convolutions of the same kind: JAX derives everything else from this.
_convolution = jax.extend.core.Primitive("convolution")
_convolution.def_impl(_convolved)
_convolution.def_abstract_eval(_convolved_shape)
mlir.register_lowering(_convolution, mlir.lower_fun(_convolved, multiple_results=False))
ad.defbilinear(_convolution, _to_inputs, _to_kernel)
batching.primitive_batchers[_convolution] = _convolved_for_each


def loop(
    body: Callable[..., tuple[T, list[Tensor]]], carry: T, steps: list[Tensor], states: list[Tensor], reverse: bool = False
) -> tuple[T, list[Tensor]]:
    """One loop over the first axis of all `steps` and `states`. See the TensorFlow version."""
    return jax.lax.scan(lambda carry, slices: body(carry, *slices), carry, (steps, states), reverse=reverse)


def on_each_device(
    function: Callable[[T, list[Tensor]], tuple[T, list[Tensor]]], rows: T, weights: list[Tensor]
) -> tuple[T, list[Tensor]]:
    """function(rows, weights), for its own rows on each device over which Keras splits batches.

    Left to itself, XLA sums the gradients of weights over all devices inside a loop, in every step. Here they are summed once,
    after the loop, all in one array. The weights that the function returns are averages over the devices, or equal if they are
    whole numbers.
    """
    chosen = keras.distribution.distribution()
    if not isinstance(chosen, keras.distribution.DataParallel):
        return function(rows, weights)
    tensors, count = jax.tree.leaves(rows), int(np.prod(chosen.device_mesh.shape))
    if count == 1 or not all(isinstance(t, jax.core.Tracer) and t.shape[:1] and t.shape[0] % count == 0 for t in tensors):
        return function(rows, weights)
    axis, kinds = chosen.batch_dim_name, [weight.dtype for weight in weights]
    one_of_each = {kind: jnp.concatenate([jnp.ravel(w) for w in weights if w.dtype == kind]) for kind in kinds}

    def here(rows: T, joined: dict[Any, Tensor]) -> tuple[T, list[Tensor]]:
        ends = {kind: np.cumsum([math.prod(w.shape) for w in weights if w.dtype == kind])[:-1] for kind in joined}
        parts = {kind: iter(jnp.split(joined[kind], ends[kind])) for kind in joined}
        rows, changed = function(rows, [next(parts[w.dtype]).reshape(w.shape) for w in weights])
        exact = [jnp.issubdtype(value.dtype, jnp.inexact) for value in changed]
        return rows, [jax.lax.pmean(value, axis) if e else value for value, e in zip(changed, exact, strict=True)]

    split, whole = jax.sharding.PartitionSpec(axis), jax.sharding.PartitionSpec()
    mesh = chosen.device_mesh.backend_mesh
    return jax.shard_map(here, mesh=mesh, in_specs=(split, whole), out_specs=(split, whole), check_vma=False)(rows, one_of_each)


def recomputed(function: Callable[..., T]) -> Callable[..., T]:
    """A function of tensors that keeps only its arguments for the backward pass and is recomputed there."""
    return keras.remat(function)


def together(*tensors: Any) -> tuple[Any, ...]:
    """The same tensors, each available only when all are, so that nothing that depends on one runs ahead."""
    return jax.lax.optimization_barrier(tensors)
