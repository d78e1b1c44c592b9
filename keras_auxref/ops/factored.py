"""The factored reflection y = U g(Vᵀx): an auxiliary reflection in its own eigenbasis, followed by an orthogonal map.

Everything here is two matrix products and a few sums per vector, in plain `keras.ops`: no factorisation, no complex number, no
branch and no loop that depends on data, so that it runs, differentiates and compiles on every Keras backend. (`@` and `where`
stand where `ops.matmul` and `ops.maximum` might: on torch these pass float64 through float32.)
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_auxref.ops._checks import HALF, as_tensor, check_finite, check_vector, is_symbolic
from keras_auxref.ops._rows import epsilon

LARGEST_CONDITION = 1.99999
"""The largest κ for which the inverse is computed: at κ = 2 it stops to exist."""

_STEPS = {
    1.3: 2,
    1.65: 3,
    1.88: 4,
    1.96: 5,
    1.99: 6,
    1.997: 7,
    1.999: 8,
    1.9997: 9,
    1.9999: 10,
    1.99998: 11,
    LARGEST_CONDITION: 12,
}
"""Newton steps in float32 for κ up to a bound; float64 takes one more. What is then left to do is below ε/4, see the tests."""


def factored_reflect(x: Any, u: Any, v: Any, eigenvalues: Any) -> Any:
    """The factored reflection of every vector on the last axis of x.

        y = U g(Vᵀx),      g(a) = (cλ − 1) ∘ a,      c = 2 Σ λᵢaᵢ² / Σ λᵢ²aᵢ²

    With W = V diag(λ) Vᵀ this is y = −UVᵀ H(Wx) x. For orthogonal U and V it preserves norms, y(αx) = α y(x), and the scale of
    λ does not matter. For λ > 0 with κ = max λ / min λ < 2 it is a bijection; λ = 1 makes it the orthogonal map UVᵀ. None of
    this is checked here. At x = 0 the value is 0 and the Jacobian is taken to be UVᵀ. Runs on every Keras backend.

    Args:
        x: Tensor of shape `(..., d)`.
        u: Orthogonal matrix U of shape `(d, d)`.
        v: Orthogonal matrix V of shape `(d, d)`.
        eigenvalues: λ > 0, of shape `(d,)`.

    Returns:
        A tensor of the shape and dtype of `x`. Half precision is computed in float32; the matrices may be in float32 then.

    Example:
    >>> import numpy as np
    >>> swap = np.array([[0.0, 1.0], [1.0, 0.0]])
    >>> print(factored_reflect(np.array([3.0, 4.0]), swap, np.eye(2), np.ones(2)).numpy())
    [4. 3.]
    """
    return _on_rows(lambda rows, u, v, lam: (_to_rows(spread(_turn(rows, v), lam)[0], u),), x, u, v, eigenvalues)[0]


def factored_reflect_and_log_det(x: Any, u: Any, v: Any, eigenvalues: Any) -> tuple[Any, Any]:
    """`factored_reflect` and log|det ∂y/∂x|: the primitive of flows.

        log|det ∂y/∂x| = Σ log(cλᵢ − 1) + log(2r − 1),      r = Σ λᵢ²aᵢ²/(cλᵢ − 1) / Σ λᵢ²aᵢ²,      a = Vᵀx

    For κ < 2 all logarithms are of positive numbers: c ≥ 2/λmax, and r ≥ 1 by Jensen's inequality, so that nothing cancels. For
    κ ≥ 2 the result may be NaN. At x = 0 it is 0, that of the Jacobian UVᵀ.

    Args:
        x: Tensor of shape `(..., d)`.
        u: Orthogonal matrix U of shape `(d, d)`.
        v: Orthogonal matrix V of shape `(d, d)`.
        eigenvalues: λ > 0, of shape `(d,)`.

    Returns:
        Two tensors of the dtype of `x`, of shapes `(..., d)` and `(...,)`.
    """

    def compute(rows: Any, u: Any, v: Any, eigenvalues: Any) -> tuple[Any, ...]:
        h, log_det = spread(_turn(rows, v), eigenvalues)
        return _to_rows(h, u), log_det

    y, log_det = _on_rows(compute, x, u, v, eigenvalues)
    return y, log_det


def factored_inverse(y: Any, u: Any, v: Any, eigenvalues: Any, condition: float = LARGEST_CONDITION) -> Any:
    """x with `factored_reflect(x, u, v, eigenvalues)` = y, for every vector on the last axis of y.

        b = Uᵀy,      x = V (b / (cλ − 1)),      c the root of Σ bᵢ²/(cλᵢ − 1)² = ‖b‖²

    With N(c) for the left side, N^(−½) is increasing and concave in c, so that Newton's method on N^(−½) = ‖b‖⁻¹ converges
    monotonically from the left of the root, and comes there in one step from anywhere. It starts at the c of b itself. A fixed
    number of steps, which follows from the bound on κ and the dtype, reaches the last digit (`newton_steps`).

    Gradients are those of the implicit function theorem, and not through the iteration: the root is a constant to the gradient,
    and two more Newton steps from it are differentiated. The first has the derivative of the root, the second makes the next two
    derivatives exact as well, on every backend. TensorFlow takes these two steps only where a gradient is asked for.

    Args:
        y: Tensor of shape `(..., d)`.
        u: Orthogonal matrix U of shape `(d, d)`.
        v: Orthogonal matrix V of shape `(d, d)`.
        eigenvalues: λ > 0, of shape `(d,)`, with κ = max λ / min λ < 2.
        condition: A bound on κ, if one is known: the smaller, the fewer steps.

    Returns:
        A tensor of the shape and dtype of `y`; NaN where κ is beyond `condition`, rather than a wrong answer.

    Example:
    >>> import numpy as np
    >>> swap, x, scales = np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([3.0, 4.0]), np.array([1.0, 1.5])
    >>> y = factored_reflect(x, swap, np.eye(2), scales)
    >>> np.allclose(factored_inverse(y, swap, np.eye(2), scales), x)
    True
    """

    def compute(rows: Any, u: Any, v: Any, eigenvalues: Any) -> tuple[Any, ...]:
        return (_to_rows(gather(_turn(rows, u), eigenvalues, condition), v),)

    return _on_rows(compute, y, u, v, eigenvalues, "y")[0]


def newton_steps(condition: float, dtype: str) -> int:
    """The number of Newton steps that bring the inverse to the last digit for every λ with κ ≤ `condition` and every vector."""
    if not 1 <= condition <= LARGEST_CONDITION:
        raise ValueError(f"`condition` must be a bound on κ. Expected 1 ≤ condition ≤ {LARGEST_CONDITION}. Received: {condition}")
    return next(steps for bound, steps in _STEPS.items() if condition <= bound) + (dtype == "float64")


def spread(a: Any, eigenvalues: Any) -> tuple[Any, Any]:
    """g(a) = (cλ − 1) ∘ a and log|det ∂g/∂a| on the last axis of a. In a graph, what is not used is not computed."""
    # Neither the scale of λ nor that of a matters to c: both are constants to the gradient, and keep squares in range.
    lam = eigenvalues / ops.stop_gradient(ops.max(eigenvalues))
    scaled, zero = _normalised(a)
    weighted = lam * scaled
    squares = ops.square(weighted)
    s2 = ops.sum(squares, axis=-1, keepdims=True) + zero
    c = 2 * ops.sum(weighted * scaled, axis=-1, keepdims=True) / s2
    gain = c * lam + (2 * zero - 1)  # cλ − 1, and 1 at a = 0
    r = ops.sum(squares / gain, axis=-1, keepdims=True) / s2
    log_det = ops.sum(ops.log(gain), axis=-1) + ops.log(2 * r + (2 * zero - 1))[..., 0]
    return gain * a, log_det


def gather(b: Any, eigenvalues: Any, condition: float = LARGEST_CONDITION) -> Any:
    """g⁻¹(b) on the last axis of b."""
    steps = newton_steps(condition, keras.backend.standardize_dtype(b.dtype))
    if keras.backend.backend() != "tensorflow" or is_symbolic(b, eigenvalues):
        return _gather(b, eigenvalues, condition, steps, differentiable=True)
    from keras_auxref.ops._gradients import with_reference_gradient

    return with_reference_gradient(
        lambda b, eigenvalues: _gather(b, eigenvalues, condition, steps, differentiable=False),
        lambda b, eigenvalues: _gather(b, eigenvalues, condition, steps, differentiable=True),
    )(b, eigenvalues)


def _gather(b: Any, eigenvalues: Any, condition: float, steps: int, differentiable: bool) -> Any:
    low, high = ops.min(eigenvalues), ops.max(eigenvalues)
    lam = eigenvalues / ops.stop_gradient(high)
    scaled, zero = _normalised(b)
    squares = ops.square(scaled)
    sign = 2 * zero - 1  # makes cλ − 1 equal to 1 at b = 0, where c = 0

    def newton(c: Any, lam: Any, squares: Any, total: Any) -> Any:
        # With N = Σ b²p², M = Σ λb²p³ and p = 1/(cλ − 1): c − h/h′ = c + (√(N/‖b‖²) − 1) N/M.
        p = 1 / (c * lam + sign)
        terms = squares * ops.square(p)
        n = ops.sum(terms, axis=-1, keepdims=True) + zero
        m = ops.sum(terms * (lam * p), axis=-1, keepdims=True) + zero
        return c + (ops.sqrt(n / total) - 1) * n / m

    total = ops.sum(squares, axis=-1, keepdims=True) + zero
    constants = [ops.stop_gradient(t) for t in (lam, squares, total)]
    weighted = constants[0] * constants[1]
    c = 2 * ops.sum(weighted, axis=-1, keepdims=True) / (ops.sum(constants[0] * weighted, axis=-1, keepdims=True) + zero)
    for step in range(steps):
        c = newton(c, *constants)
        if step == 0:  # the only step that may pass the root, and leave the domain: 2/λmax is left of every root
            c = ops.where(c < 2 - 2 * zero, 2 - 2 * zero, c)
    if differentiable:
        c = ops.stop_gradient(c)
        for _ in range(2):
            c = newton(c, lam, squares, total)
    allowed = condition * (1 + 16 * epsilon(keras.backend.standardize_dtype(b.dtype)))
    known = ops.logical_and(low > 0, high <= allowed * low)
    return b / (c * lam + sign) * ops.where(known, ops.ones_like(low), float("nan"))


def _normalised(a: Any) -> tuple[Any, Any]:
    """a / max|a| on the last axis, so that squares neither over- nor underflow, and 1 where a is zero, else 0."""
    fixed = ops.stop_gradient(a)
    # With an initial value an empty batch is legal, and no assertion enters the graph.
    high, low = ops.max(fixed, axis=-1, keepdims=True, initial=0), -ops.min(fixed, axis=-1, keepdims=True, initial=0)
    size = ops.where(high > low, high, low)
    zero = ops.cast(size < np.finfo(keras.backend.standardize_dtype(a.dtype)).tiny, a.dtype)
    return a * ((1 - zero) / (size + zero)), zero


def _turn(rows: Any, matrix: Any) -> Any:
    """Mᵀx for rows x; None stands for the identity."""
    return rows if matrix is None else rows @ matrix


def _to_rows(rows: Any, matrix: Any) -> Any:
    """M x for rows x; None stands for the identity."""
    return rows if matrix is None else rows @ ops.transpose(matrix)


def _on_rows(
    function: Callable[..., tuple[Any, ...]], x: Any, u: Any, v: Any, eigenvalues: Any, name: str = "x"
) -> tuple[Any, ...]:
    """function(rows, U, V, λ) of checked tensors in float32 at least, with the leading axes and the dtype of x again."""
    x, eigenvalues = as_tensor(x, name), as_tensor(eigenvalues, "eigenvalues")
    matrices = {key: as_tensor(matrix, key) for key, matrix in (("u", u), ("v", v)) if matrix is not None}
    dtype = keras.backend.standardize_dtype(x.dtype)
    wide = _check(x, matrices, eigenvalues, name, dtype)
    rows, shape = ops.cast(x, wide), ops.shape(x)
    if len(shape) != 2:
        rows = ops.reshape(rows, (-1, shape[-1]))
    u, v = (ops.cast(matrices[key], wide) if key in matrices else None for key in ("u", "v"))
    results = function(rows, u, v, ops.cast(eigenvalues, wide))
    if len(shape) != 2:
        results = tuple(ops.reshape(t, (*shape[:-1], *ops.shape(t)[1:])) for t in results)
    return tuple(ops.cast(t, dtype) for t in results)


def _check(x: Any, matrices: dict[str, Any], eigenvalues: Any, name: str, dtype: str) -> str:
    """Refuses shapes and dtypes that do not fit together; gives the dtype to compute in."""
    check_vector(x, name)
    d = x.shape[-1]
    if len(eigenvalues.shape) != 1 or eigenvalues.shape[0] != d:
        raise ValueError(
            f"`eigenvalues` must have one entry for each of the last axis of `{name}`. Expected shape ({d},). "
            f"Received: {tuple(eigenvalues.shape)}"
        )
    wide = "float32" if dtype in HALF else dtype
    for key, matrix in {**matrices, "eigenvalues": eigenvalues}.items():
        if key != "eigenvalues" and tuple(matrix.shape) != (d, d):
            raise ValueError(
                f"`{key}` must be a square matrix that fits `{name}`. Expected shape {(d, d)}. Received: {tuple(matrix.shape)}"
            )
        found = keras.backend.standardize_dtype(matrix.dtype)
        if found not in (dtype, wide):
            raise ValueError(f"`{key}` must have the dtype of `{name}`. Expected {dtype}. Received: {found}")
        check_finite(matrix, key)
    return wide
