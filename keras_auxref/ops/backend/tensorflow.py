"""TensorFlow: eager, in graphs and under XLA."""

import contextlib
import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import keras
import tensorflow as tf

from keras_auxref.ops.backend._pfor import let_vectorise
from keras_auxref.ops.backend._squaring import expm, squared, squared_vjp
from keras_auxref.ops.backend._tape import inside_xla, vjp
from keras_auxref.ops.backend._while import Loop
from keras_auxref.ops.backend.numpy import Sizes, sizes_between
from keras_auxref.typing import Tensor

__all__ = ["Loop", "expm", "inside_xla", "squared", "squared_vjp", "vjp"]
T = TypeVar("T")
N = TypeVar("N")


def as_tensor(value: object) -> tf.Tensor:
    """A tensor: Keras returns a variable unchanged, and custom gradients refuse variables."""
    return tf.convert_to_tensor(keras.ops.convert_to_tensor(value))


def kind_of(tensor: object) -> str:
    """Whether a tensor is "dense", "sparse" or "ragged"."""
    if isinstance(tensor, tf.RaggedTensor):
        return "ragged"
    return "sparse" if isinstance(tensor, tf.SparseTensor | tf.IndexedSlices) else "dense"


def is_concrete(tensor: object) -> bool:
    """Whether the values of a tensor can be read now: not while a function is being traced, and not of a variable there."""
    return not tf.is_symbolic_tensor(tensor) if isinstance(tensor, tf.Tensor) else tf.executing_eagerly()


def outside_graphs() -> AbstractContextManager[object]:
    """The scope in which initial values are numbers and not nodes of the graph being traced."""
    return tf.init_scope()


def compiled(method: Callable[..., T]) -> Callable[..., T]:
    """A method of a model as a `tf.function`, traced once for all batch sizes. Its arguments are batches, or None."""
    name = f"_traced_{method.__name__}"

    @functools.wraps(method)
    def call(self: Any, *args: Tensor | None) -> T:
        if name not in self.__dict__:
            object.__setattr__(self, name, {})  # hidden from Keras' tracking
        traced, args = self.__dict__[name], tuple(arg if arg is None else tf.convert_to_tensor(arg) for arg in args)
        key = tuple(None if arg is None else (tuple(arg.shape[1:]), arg.dtype) for arg in args)
        if key not in traced:
            specs = [None if part is None else tf.TensorSpec((None, *part[0]), part[1]) for part in key]

            def whole(*tensors: tf.Tensor) -> T:
                given = iter(tensors)
                return method(self, *(None if part is None else next(given) for part in key))

            known = [spec for spec in specs if spec is not None]
            # TensorFlow warns of functions that are traced often, by their code, which is the same for all models and methods. A
            # partial has none.
            traced[key] = tf.function(functools.partial(whole), input_signature=known, autograph=False)
        return traced[key](*(arg for arg in args if arg is not None))

    return call


def normal(shape: Sizes, seed: Sizes, dtype: str) -> tf.Tensor:
    """Draws from N(0, 1), the same for the same pair of whole numbers as seed on every backend."""
    return tf.random.stateless_normal(shape, _as_int64(seed), dtype=dtype, alg="philox")


def uniform(shape: Sizes, seed: Sizes, dtype: str) -> tf.Tensor:
    """Draws from the uniform distribution on [0, 1), the same for the same pair of whole numbers as seed on every backend."""
    return tf.random.stateless_uniform(shape, _as_int64(seed), dtype=dtype, alg="philox")


def _as_int64(seed: Sizes) -> tf.Tensor:
    return tf.cast(tf.convert_to_tensor(seed, dtype_hint=tf.int64), tf.int64)


def split(x: Tensor, indices: list[int]) -> list[Tensor]:
    """The parts of x before, between and after these places of the last axis. Keras computes their sizes with 20 nodes."""
    if isinstance(x, keras.KerasTensor):
        return keras.ops.split(x, indices, axis=-1)
    return tf.split(x, sizes_between(x, indices), axis=-1)


def closed_form(
    forward: Callable[..., tuple[T, object]],
    backward: Callable[..., Iterable[Tensor | None]],
    reference: Callable[..., Iterable[Tensor]],
    arguments: tuple[tf.Tensor, ...],
    constants: object = (),
    plain: Callable[..., T] | None = None,
) -> T:
    """forward(*arguments, constants), differentiated by `backward`, and a second time through `reference`.

    A gradient that is computed from saved intermediates is a constant to an outer tape, so differentiating it again would
    be silently wrong. Second and higher derivatives come from automatic differentiation of `reference`, which is the same
    gradient in differentiable operations. It runs only when such a derivative is needed.

    Args:
        forward: (*arguments, constants) → (outputs, saved).
        backward: (cotangents, saved, *arguments, constants) → gradients for the arguments. With one output, `cotangents` is one
            tensor; with several, a tuple.
        reference: (cotangents, *arguments, constants) → the same gradients, differentiable.
        arguments: Tensors, not variables.
        constants: A nest of tensors that get no gradients.
        plain: (*arguments) → outputs in differentiable operations, for forward mode, which does not support custom gradients;
            without it forward mode is refused.
    """
    if _forward_mode(arguments):
        if plain is None:
            raise NotImplementedError(
                "Forward-mode differentiation (`tf.autodiff.ForwardAccumulator`) does not know the gradient of this function. "
                "Expected reverse mode (`tf.GradientTape`)."
            )
        return plain(*arguments)

    # What is computed inside is a constant to tapes and forward accumulators: they use the gradient below.
    @tf.custom_gradient
    def function(*arguments: tf.Tensor) -> Any:
        still = tuple(tf.stop_gradient(t) for t in arguments)
        outputs, saved = forward(*still, constants)

        def gradient(*cotangents: tf.Tensor) -> Any:
            count = len(cotangents)
            # In a graph this runs in the graph of the gradient. Tensors of the forward graph are brought there, because the
            # graph of a second derivative sees only the graph that it differentiates.
            inputs = [tf.identity(argument) for argument in arguments]
            kept = tf.nest.map_structure(lambda t: tf.identity(t) if tf.is_tensor(t) else t, constants)

            def pack(cotangents: Any) -> Any:
                return cotangents[0] if count == 1 else tuple(cotangents)

            if _saving():
                first = backward(pack(cotangents), saved, *arguments, constants)
                return [tf.raw_ops.PreventGradient(input=g, message=_ONCE) for g in first]

            @tf.custom_gradient
            def differentiable(*tensors: tf.Tensor) -> Any:
                def second(*seconds: tf.Tensor) -> Any:
                    def plain(*tensors: tf.Tensor) -> Any:
                        return reference(pack(tensors[:count]), *tensors[count:], kept)

                    return vjp(plain)(list(seconds), *tensors)

                return backward(pack(tensors[:count]), saved, *tensors[count:], kept), second

            return differentiable(*cotangents, *inputs)

        return outputs, gradient

    return function(*arguments)


_ONCE = "A SavedModel keeps the first derivatives of these layers. Second derivatives need the Keras model."


def _saving() -> bool:
    """Whether TensorFlow traces this gradient to put it in a SavedModel, which cannot hold the gradient of a gradient.

    TensorFlow has no public function for this; if the private one is missing, loading such a model logs a warning.
    """
    try:
        from tensorflow.python.saved_model.save_context import in_save_context
    except ImportError:
        return False
    return bool(in_save_context())


def _forward_mode(arguments: tuple[tf.Tensor, ...]) -> bool:
    """Whether a forward accumulator watches an argument. TensorFlow has no public function for this."""
    try:
        from tensorflow.python.eager.forwardprop_util import pack_tangents
    except ImportError:
        return False
    return bool(pack_tangents(list(arguments)).tangents)


def shared(function: Callable[..., T], *arguments: object, rows: int = 0, **static: object) -> T:
    """function(*arguments, **static), in a graph as the call of a function that is traced once for its shapes and dtypes.

    The functions that factor W and use its factors have a branch for every route. A flow has dozens of layers with the same
    sizes: if the function is traced and optimised once and then called, they cost TensorFlow as much as one. Outside graphs
    nothing is traced.

    Args:
        function: A module-level function of nests of tensors (and of integers, which stay integers). It is a constant to
            automatic differentiation: call it inside a closed form.
        *arguments: Its positional arguments.
        rows: How many of its first arguments are batches of rows, (n, …), as all its outputs then are: `tf.vectorized_map` makes
            one call with the rows of all iterations. With 0 it calls the function once for each.
        **static: Its keyword arguments: constants that can be hashed.
    """
    if tf.executing_eagerly():
        return function(*arguments, **static)
    # Without a tape, TensorFlow does not build the gradient of the function as well.
    arguments = tf.nest.map_structure(lambda t: tf.stop_gradient(t) if tf.is_tensor(t) else t, arguments)
    call = _traced(function, tuple(sorted(static.items())), inside_xla())
    call.get_concrete_function(*arguments)  # traced with tapes active, because the function may have its own
    with _unrecorded():
        outputs = call(*arguments)
    let_vectorise(outputs, call, arguments, rows)
    # What is saved for a gradient becomes an output of the enclosing function, and would be differentiated: stop that here.
    return tf.nest.map_structure(lambda t: tf.stop_gradient(t) if tf.is_tensor(t) else t, outputs)


def _unrecorded() -> contextlib.AbstractContextManager[object]:
    """A context in which no tape records. TensorFlow offers this for a given tape, but not for all active ones."""
    try:
        from tensorflow.python.eager.record import stop_recording
    except ImportError:
        return contextlib.nullcontext()
    return stop_recording()


@functools.lru_cache(maxsize=256)
def _traced(function: Callable[..., Any], static: tuple[tuple[str, Any], ...], xla: bool) -> Any:
    # `xla` is part of the key, because what is traced for XLA avoids operations that it lacks. Without inlining the
    # function is also optimised only once, not for every call.
    return tf.function(
        functools.partial(function, **dict(static)), autograph=False, experimental_attributes=None if xla else {"_noinline": True}
    )


def picks_rows() -> bool:
    """Whether `only_rows` costs in proportion to the rows that are chosen. XLA has static shapes."""
    return not inside_xla()


def only_rows(
    chosen: tf.Tensor, function: Callable[..., tuple[N, object]], current: N, *rows: object, total: object = ()
) -> tuple[N, object]:
    """`current`, a nest of (n, …), with the rows where `chosen` (n, 1) replaced by what a function returns for these rows alone.

    Args:
        chosen: Which rows.
        function: (*chosen rows) → (their part of `current`, what to add to `total`). What it adds must vanish for rows whose
            first argument is zero: if rows cannot be picked, all are computed.
        current: The values to replace.
        *rows: Nests of tensors of (n, …).
        total: A nest of tensors without rows.

    Returns:
        (current, total).
    """

    def add(extra: object) -> object:
        return tf.nest.map_structure(tf.add, total, extra)

    def picked() -> tuple[N, object]:
        index = tf.where(chosen[:, 0])
        # Along the second axis of t[None] instead of the first of t: the gradient of the latter is not a tensor, which
        # `tf.cond` refuses if it is one in the other branch.
        new, extra = function(*tf.nest.map_structure(lambda t: tf.gather(t[None], index[:, 0], axis=1)[0], rows))
        return tf.nest.map_structure(lambda a, b: tf.tensor_scatter_nd_update(b, index, a), new, current), add(extra)

    def all_of_them() -> tuple[N, object]:
        masked = tf.nest.map_structure(lambda t: tf.where(chosen, t, tf.zeros_like(t)), rows[0])
        new, extra = function(masked, *rows[1:])
        return tf.nest.map_structure(lambda a, b: tf.where(chosen, a, b), new, current), add(extra)

    return tf.cond(tf.reduce_any(chosen), picked if picks_rows() else all_of_them, lambda: (current, total))


def prefers_loops(x: tf.Tensor, convolves: bool) -> bool:
    """Whether equal steps on x run faster as a loop than written out: in a graph yes, eagerly no.

    Keras compiles with XLA where there is an accelerator, and on a CPU only for `compile(jit_compile=True)`. XLA on a CPU is slow
    at the gradients of a convolution inside a loop (see `convolve`), if the steps have others than ours.
    """
    return not tf.executing_eagerly() and not (convolves and _xla_on_a_cpu())


def _xla_on_a_cpu() -> bool:
    return inside_xla() and not any(tf.config.list_physical_devices(kind) for kind in ("GPU", "TPU"))


def convolve(x: tf.Tensor, kernel: tf.Tensor, padding: str) -> tf.Tensor:
    """The convolution of images x (batch, rows, columns, channels in) with a kernel (…, channels in, channels out).

    For XLA on a CPU the gradients have their axes in this order, too: see the version for JAX.
    """
    if isinstance(x, keras.KerasTensor) or not _xla_on_a_cpu():
        return keras.ops.conv(x, kernel, padding=padding, data_format="channels_last")
    pads = [((k - 1) // 2, k // 2) if padding == "same" else (0, 0) for k in kernel.shape[:-2]]

    def convolved(x: tf.Tensor, kernel: tf.Tensor, pads: list[tuple[int, int]]) -> tf.Tensor:
        return tf.nn.conv2d(x, kernel, strides=1, padding=[(0, 0), *pads, (0, 0)])

    @tf.custom_gradient
    def run(x: tf.Tensor, kernel: tf.Tensor) -> Any:
        def gradient(g: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            turned = tf.transpose(tf.reverse(kernel, (0, 1)), (0, 1, 3, 2))
            others = [(k - 1 - a, k - 1 - b) for k, (a, b) in zip(kernel.shape[:-2], pads, strict=True)]
            of_kernel = convolved(tf.transpose(x, (3, 1, 2, 0)), tf.transpose(g, (1, 2, 0, 3)), pads)
            return convolved(g, turned, others), tf.transpose(of_kernel, (1, 2, 0, 3))

        return convolved(x, kernel, pads), gradient

    return run(x, tf.convert_to_tensor(kernel))


def loop(
    body: Callable[..., tuple[T, list[Tensor]]], carry: T, steps: list[Tensor], states: list[Tensor], reverse: bool = False
) -> tuple[T, list[Tensor]]:
    """One loop over the first axis of all `steps` and `states`.

    Args:
        body: (carry, one slice of every step, one slice of every state) → (carry, the new slices of the states).
        carry: A nest of tensors whose shapes and dtypes do not change.
        steps: Tensors of (K, …).
        states: Tensors of (K, …).
        reverse: From the last slice to the first.

    Returns:
        (carry, states).
    """
    count = (steps + states)[0].shape[0]
    # Read from arrays: slicing a tensor inside a loop would make the cost of the gradient quadratic in K.
    given = [tf.TensorArray(t.dtype, count, element_shape=t.shape[1:]).unstack(t) for t in steps + states]
    new = [tf.TensorArray(t.dtype, count, element_shape=t.shape[1:]) for t in states]

    def run(i: tf.Tensor, carry: Any, new: list[tf.TensorArray]) -> Any:
        k = count - 1 - i if reverse else i
        slices = [array.read(k) for array in given]
        moved, changed = body(carry, slices[: len(steps)], slices[len(steps) :])
        tf.nest.map_structure(lambda a, b: a.set_shape(b.shape), moved, carry)
        return i + 1, moved, [array.write(k, value) for array, value in zip(new, changed, strict=True)]

    _, carry, new = tf.while_loop(lambda i, *_: i < count, run, (tf.constant(0), carry, new), maximum_iterations=count)
    return carry, [array.stack() for array in new]


def recomputed(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """A function of tensors that keeps only its arguments for the backward pass and is recomputed there.

    `tf.recompute_grad` fails if an argument is an integer or has no gradient.
    """

    @tf.custom_gradient
    def run(*arguments: tf.Tensor) -> Any:
        outputs = function(*(tf.stop_gradient(t) for t in arguments))

        def gradient(*cotangents: tf.Tensor) -> Any:
            floating = [t.dtype.is_floating for t in arguments]
            # If the arguments were the same, XLA would see that this has been computed before.
            known = next(c for c, output in zip(cotangents, outputs, strict=True) if output.dtype.is_floating)
            first = tf.reshape(known, (-1,))[:1]
            nothing = tf.reduce_sum(tf.where(tf.equal(first, first), tf.zeros_like(first), first))
            again = [t + tf.cast(nothing, t.dtype) if f else t for t, f in zip(arguments, floating, strict=True)]
            inputs = [t for t, f in zip(again, floating, strict=True) if f]
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                results = function(*again)
            pairs = [(r, c) for r, c in zip(results, cotangents, strict=True) if r.dtype.is_floating]
            found = iter(
                tape.gradient(
                    [r for r, _ in pairs], inputs, [c for _, c in pairs], unconnected_gradients=tf.UnconnectedGradients.ZERO
                )
            )
            return [next(found) if f else None for f in floating]

        return outputs, gradient

    return run


def together(*tensors: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """The same tensors, each available only when all are, so that nothing that depends on one runs ahead."""
    return tuple(tf.tuple(tensors))


def replicas() -> int:
    """How many replicas of a model a strategy of `tf.distribute` trains at once."""
    return int(tf.distribute.get_strategy().num_replicas_in_sync)
