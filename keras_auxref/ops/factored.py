"""The factored reflection y = U g(Vᵀx): an auxiliary reflection in its own eigenbasis, followed by an orthogonal map.

Everything here is two matrix products and a few sums per vector: no factorisation, no complex number, no branch and no loop that
depends on data, so that it runs, differentiates and compiles on every Keras backend.
"""

from typing import NamedTuple

from keras import ops

from keras_auxref.ops._checks import HALF, as_tensor, check_finite, check_vector
from keras_auxref.ops._rows import dtype_of
from keras_auxref.ops._spread import LARGEST_CONDITION, gather, on_rows, spread, spread_and_log_det
from keras_auxref.typing import Tensor


def factored_reflect(x: Tensor, u: Tensor, v: Tensor, eigenvalues: Tensor) -> Tensor:
    """The factored reflection of every vector on the last axis of x.

        y = U g(Vᵀx),      g(a) = (cλ − 1) ∘ a,      c = 2 Σ λᵢaᵢ² / Σ λᵢ²aᵢ²

    With W = V diag(λ) Vᵀ this is y = −UVᵀ H(Wx) x. For orthogonal U and V it preserves norms, y(αx) = α y(x), and the scale of
    λ does not matter. For λ > 0 with κ = max λ / min λ < 2 it is a bijection; λ = 1 makes it the orthogonal map UVᵀ. None of
    this is checked here. At x = 0 the value is 0 and the Jacobian is taken to be UVᵀ. Runs on every Keras backend.

    Args:
        x: Tensor of shape `(..., d)`.
        u: Orthogonal matrix U of shape `(d, d)`, or None for the identity.
        v: Orthogonal matrix V of shape `(d, d)`, or None for the identity.
        eigenvalues: λ > 0, of shape `(d,)`.

    Returns:
        A tensor of the shape and dtype of `x`. Half precision is computed in float32; the matrices may be in float32 then.

    Example:
    >>> import numpy as np
    >>> swap = np.array([[0.0, 1.0], [1.0, 0.0]])
    >>> print(factored_reflect(np.array([3.0, 4.0]), swap, np.eye(2), np.ones(2)).numpy())
    [4. 3.]
    """
    prepared = _prepare(x, u, v, eigenvalues)
    return on_rows(lambda rows: (_times(spread(_transposed(rows, prepared.v), prepared.scales), prepared.u),), *prepared[:2])[0]


def factored_reflect_and_log_det(x: Tensor, u: Tensor, v: Tensor, eigenvalues: Tensor) -> tuple[Tensor, Tensor]:
    """`factored_reflect` and log|det ∂y/∂x|: the primitive of flows.

        log|det ∂y/∂x| = Σ log(cλᵢ − 1) + log(2r − 1),      r = Σ λᵢ²aᵢ²/(cλᵢ − 1) / Σ λᵢ²aᵢ²,      a = Vᵀx

    For κ < 2 all logarithms are of positive numbers: c ≥ 2/λmax, and r ≥ 1 by Jensen's inequality, so that nothing cancels. For
    κ ≥ 2 the result may be NaN. At x = 0 it is 0, that of the Jacobian UVᵀ.

    Args:
        x: Tensor of shape `(..., d)`.
        u: Orthogonal matrix U of shape `(d, d)`, or None for the identity.
        v: Orthogonal matrix V of shape `(d, d)`, or None for the identity.
        eigenvalues: λ > 0, of shape `(d,)`.

    Returns:
        Two tensors of the dtype of `x`, of shapes `(..., d)` and `(...,)`.
    """
    prepared = _prepare(x, u, v, eigenvalues)

    def compute(rows: Tensor) -> tuple[Tensor, ...]:
        h, log_det = spread_and_log_det(_transposed(rows, prepared.v), prepared.scales)
        return _times(h, prepared.u), log_det

    y, log_det = on_rows(compute, *prepared[:2])
    return y, log_det


def factored_inverse(y: Tensor, u: Tensor, v: Tensor, eigenvalues: Tensor, condition: float = LARGEST_CONDITION) -> Tensor:
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
        u: Orthogonal matrix U of shape `(d, d)`, or None for the identity.
        v: Orthogonal matrix V of shape `(d, d)`, or None for the identity.
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
    prepared = _prepare(y, u, v, eigenvalues, "y")

    def compute(rows: Tensor) -> tuple[Tensor, ...]:
        return (_times(gather(_transposed(rows, prepared.u), prepared.scales, condition), prepared.v),)

    return on_rows(compute, *prepared[:2])[0]


class _Prepared(NamedTuple):
    x: Tensor
    wide: str
    u: Tensor
    v: Tensor
    scales: Tensor


def _prepare(x: Tensor, u: Tensor, v: Tensor, eigenvalues: Tensor, name: str = "x") -> _Prepared:
    """Checked tensors, in float32 at least but for x itself; None stays None."""
    x, eigenvalues = as_tensor(x, name), as_tensor(eigenvalues, "eigenvalues")
    matrices = {key: as_tensor(matrix, key) for key, matrix in (("u", u), ("v", v)) if matrix is not None}
    wide = _check(x, matrices, eigenvalues, name, dtype_of(x))
    u, v = (ops.cast(matrices[key], wide) if key in matrices else None for key in ("u", "v"))
    return _Prepared(x, wide, u, v, ops.cast(eigenvalues, wide))


def _transposed(rows: Tensor, matrix: Tensor) -> Tensor:
    """Mᵀx for rows x; None stands for the identity. (`@`, because `ops.matmul` on torch passes float64 through float32.)"""
    return rows if matrix is None else rows @ matrix


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    """M x for rows x; None stands for the identity."""
    return rows if matrix is None else rows @ ops.transpose(matrix)


def _check(x: Tensor, matrices: dict[str, Tensor], eigenvalues: Tensor, name: str, dtype: str) -> str:
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
        found = dtype_of(matrix)
        if found not in (dtype, wide):
            raise ValueError(f"`{key}` must have the dtype of `{name}`. Expected {dtype}. Received: {found}")
        check_finite(matrix, key)
    return wide
