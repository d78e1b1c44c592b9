"""Independent routes to what the package computes, and matrices to try it on."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf


def quick(values: Iterable[Any], keep: int = 1, exhaustive: bool = False) -> list[Any]:
    """For `parametrize`: the first `keep` values in the default run, the others with the slow tests, or only by hand."""
    marks = [pytest.mark.slow, *([pytest.mark.exhaustive] if exhaustive else [])]
    values = list(values)
    rest = (value if isinstance(value, tuple) else (value,) for value in values[keep:])
    return [*values[:keep], *(pytest.param(*value, marks=marks) for value in rest)]


def pairwise(*lists: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Few combinations, among which every two values of two lists meet: for `parametrize` where the full product is long."""
    options = [list(values) for values in lists]
    combinations = list(itertools.product(*(range(len(values)) for values in options)))
    left = {pair for choice in combinations for pair in itertools.combinations(enumerate(choice), 2)}
    chosen = []
    while left:
        best = max(combinations, key=lambda choice: len(left.intersection(itertools.combinations(enumerate(choice), 2))))
        left.difference_update(itertools.combinations(enumerate(best), 2))
        chosen.append(tuple(values[position] for values, position in zip(options, best, strict=True)))
    return chosen


def orthogonal(d: int, rng: np.random.Generator, determinant: int | None = None) -> np.ndarray:
    """A random orthogonal matrix, with a given determinant if asked."""
    q = np.linalg.qr(rng.normal(size=(d, d)))[0]
    if determinant is not None and np.sign(np.linalg.det(q)) != determinant:
        q[:, 0] *= -1
    return q


def skew(d: int, norm: float, rng: np.random.Generator) -> np.ndarray:
    """A random skew matrix with a given spectral norm."""
    k = rng.normal(size=(d, d))
    k = k - k.T
    return k * (norm / np.linalg.norm(k, 2)) if d > 1 and norm else 0 * k


def certified(d: int, condition: float, norm: float, rng: np.random.Generator) -> np.ndarray:
    """W = (S + K)⁻¹ with κ(S) = condition and ‖K‖₂ = norm."""
    q = orthogonal(d, rng)
    s = np.linspace(1, condition, d) if d > 1 else np.ones(1)
    return np.linalg.inv(q * s @ q.T + skew(d, norm, rng))


def reflect(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """f(x) = H(Wx) x, as the paper writes it, H as a matrix for every vector."""
    v = (x @ w.T)[..., :, None]
    transposed = np.swapaxes(v, -1, -2)
    return ((np.eye(x.shape[-1]) - 2 * v @ transposed / (transposed @ v)) @ x[..., None])[..., 0]


def gradients(function: Callable[..., tf.Tensor], arguments: Sequence[Any], cotangent: Any) -> list[np.ndarray]:
    """The value and the vector-Jacobian products of a function."""
    arguments = [tf.convert_to_tensor(a) for a in arguments]
    with tf.GradientTape() as tape:
        tape.watch(arguments)
        value = function(*arguments)
    return [value.numpy(), *(g.numpy() for g in tape.gradient(value, arguments, tf.cast(cotangent, value.dtype)))]


def weighted_gradient(function: Callable[..., tf.Tensor], weights: Sequence[np.ndarray]) -> Callable[..., tf.Tensor]:
    """Σ weights · gradients of a function of two arguments, as a function of both and of the cotangent: something to
    differentiate again.
    """

    def first(a: Any, b: Any, cotangent: Any) -> tf.Tensor:
        a, b, cotangent = (tf.convert_to_tensor(t) for t in (a, b, cotangent))
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            value = function(a, b)
        ga, gb = tape.gradient(value, [a, b], cotangent)
        return tf.reduce_sum(ga * weights[0]) + tf.reduce_sum(gb * weights[1])

    return first


def differences(
    function: Callable[..., Any], arguments: Sequence[np.ndarray], cotangent: np.ndarray, step: float = 1e-6, rows: int = 0
) -> list[np.ndarray]:
    """Central differences of Σ cotangent · function, entry by entry, in float64.

    The first `rows` arguments are batches, of which the function makes row by row one row of its result: for these it is
    called once, with all moved copies of the batch below each other.
    """
    arguments = [np.array(a, np.float64) for a in arguments]
    result = []
    for position, argument in enumerate(arguments):
        if position < rows:
            n, size = len(argument), argument[0].size
            moves = step * np.concatenate([np.eye(size), -np.eye(size)])
            copies = [np.tile(a, (2 * size, *(1,) * (a.ndim - 1))) for a in arguments[:rows]]
            copies[position] += np.repeat(moves, n, axis=0).reshape(copies[position].shape)
            values = np.asarray(function(*copies, *arguments[rows:]))
            totals = np.sum(
                (np.tile(cotangent, (2 * size, *(1,) * (np.ndim(cotangent) - 1))) * values).reshape(2, size, n, -1), -1
            )
            result.append(((totals[0] - totals[1]).T / (2 * step)).reshape(argument.shape))
            continue
        gradient = np.zeros_like(argument)
        for index in np.ndindex(argument.shape):
            sides = []
            for sign in (1, -1):
                moved = [a.copy() for a in arguments]
                moved[position][index] += sign * step
                sides.append(np.sum(cotangent * np.asarray(function(*moved))))
            gradient[index] = (sides[0] - sides[1]) / (2 * step)
        result.append(gradient)
    return result


def relative(a: Any, b: Any) -> float:
    """max|a − b| relative to max|b|."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.abs(a - b).max() / (np.abs(b).max() + 1e-300))


def assert_agree(actual: Any, expected: Any) -> None:
    """The same computation, done twice.

    The last digits may differ: TensorFlow adds up in an order that depends on where a tensor lies in memory and on which thread
    is free. A weight that was lost, or another seed, moves far more. Copies of numbers are to be compared exactly instead.
    """
    actual, expected = tf.convert_to_tensor(actual), tf.convert_to_tensor(expected)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    tolerance = {"float64": 1e-11, "float32": 1e-4, "float16": 2.0**-9, "bfloat16": 2.0**-6}[expected.dtype.name]
    half = expected.dtype.size == 2
    actual, expected = (tf.cast(t, "float64").numpy() for t in (actual, expected))
    if half:  # computed in float32 and rounded: a last digit there seldom changes one here
        assert np.mean(actual == expected) >= 0.9
    largest = np.abs(expected[np.isfinite(expected)]).max(initial=1)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * largest)


def residual(x: Any, y: Any, w: Any) -> np.ndarray:
    """‖f(x) − y‖/‖y‖ in float64, with f from this file."""
    x, y, w = (np.asarray(t, np.float64) for t in (x, y, w))
    return np.linalg.norm(reflect(x, w) - y, axis=-1) / np.linalg.norm(y, axis=-1)


def log_abs_det(function: Callable[[Any], Any], x: Any, event_ndims: int) -> np.ndarray:
    """log|det| of the Jacobian that automatic differentiation finds: n copies of an event of size n, one output of each."""
    x = tf.convert_to_tensor(x)
    lead, event = x.shape[: len(x.shape) - event_ndims], x.shape[len(x.shape) - event_ndims :]
    n = math.prod(event)
    copies = tf.repeat(tf.reshape(x, (-1, *event)), n, axis=0)
    with tf.GradientTape() as tape:
        tape.watch(copies)
        diagonal = tf.linalg.diag_part(tf.reshape(function(copies), (-1, n, n)))
    rows = tf.reshape(tape.gradient(diagonal, copies), (-1, n, n))
    return np.linalg.slogdet(rows.numpy().astype("float64"))[1].reshape(lead)


def jacobians(function: Callable[[np.ndarray], Any], z: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """∂function(z)/∂z of every row, by central differences, for a function that takes more axes before those of z."""
    moves = step * np.eye(z.shape[-1]).reshape(z.shape[-1], *(1,) * (z.ndim - 1), z.shape[-1])
    slopes = (np.asarray(function(z + moves)) - np.asarray(function(z - moves))) / (2 * step)
    return np.moveaxis(slopes, 0, -1)
