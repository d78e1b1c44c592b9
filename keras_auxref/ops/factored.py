"""The factored reflection y = U g(Vᵀx): an auxiliary reflection in its own eigenbasis, followed by an orthogonal map.

Everything here is two matrix products and a few sums per vector: no factorisation, no complex number, and no branch or loop that
depends on data. So it runs, differentiates and compiles on every Keras backend.
"""

from typing import NamedTuple

from keras import ops

from keras_auxref.ops.checks import as_tensor, check_finite, check_vector
from keras_auxref.ops.diagonal import LARGEST_CONDITION, diagonal_inverse, diagonal_reflect, diagonal_reflect_and_log_det
from keras_auxref.ops.rows import dtype_of, map_rows, working_dtype
from keras_auxref.typing import Tensor


def factored_reflect(x: Tensor, u: Tensor | None, v: Tensor | None, eigenvalues: Tensor) -> Tensor:
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
        A tensor of the shape and dtype of `x`. Half precision is computed in float32; the matrices may then be in float32.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import factored_reflect
    >>> swap = np.array([[0.0, 1.0], [1.0, 0.0]])
    >>> print(factored_reflect(np.array([3.0, 4.0]), swap, np.eye(2), np.ones(2)).numpy())
    [4. 3.]
    """
    x, dtype, u, v, scales = _prepare(x, u, v, eigenvalues)
    return map_rows(lambda rows: _times(diagonal_reflect(_transposed(rows, v), scales), u), x, dtype)


def factored_reflect_and_log_det(x: Tensor, u: Tensor | None, v: Tensor | None, eigenvalues: Tensor) -> tuple[Tensor, Tensor]:
    """`factored_reflect` and log|det ∂y/∂x|: the primitive of flows.

        log|det ∂y/∂x| = Σ log(cλᵢ − 1) + log(2r − 1),      r = Σ λᵢ²aᵢ²/(cλᵢ − 1) / Σ λᵢ²aᵢ²,      a = Vᵀx

    For κ < 2 all logarithms are of positive numbers: c ≥ 2/λmax, and r ≥ 1 by Jensen's inequality, so that nothing cancels. For
    κ ≥ 2 the result may be NaN. At x = 0 it is 0, as for the Jacobian UVᵀ.

    Args:
        x: Tensor of shape `(..., d)`.
        u: Orthogonal matrix U of shape `(d, d)`, or None for the identity.
        v: Orthogonal matrix V of shape `(d, d)`, or None for the identity.
        eigenvalues: λ > 0, of shape `(d,)`.

    Returns:
        Two tensors of the dtype of `x`, of shapes `(..., d)` and `(...,)`.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import factored_reflect_and_log_det
    >>> y, log_det = factored_reflect_and_log_det(np.ones((5, 2)), None, None, np.array([1.0, 1.5]))
    >>> y.shape, log_det.shape
    (TensorShape([5, 2]), TensorShape([5]))
    """
    x, dtype, u, v, scales = _prepare(x, u, v, eigenvalues)

    def compute(rows: Tensor) -> tuple[Tensor, Tensor]:
        h, log_det = diagonal_reflect_and_log_det(_transposed(rows, v), scales)
        return _times(h, u), log_det

    return map_rows(compute, x, dtype)


def factored_inverse(
    y: Tensor, u: Tensor | None, v: Tensor | None, eigenvalues: Tensor, condition: float = LARGEST_CONDITION
) -> Tensor:
    """x with `factored_reflect(x, u, v, eigenvalues)` = y, for every vector on the last axis of y.

        b = Uᵀy,      x = V (b / (cλ − 1)),      c the root of Σ bᵢ²/(cλᵢ − 1)² = ‖b‖²

    With N(c) for the left side, N^(−½) is increasing and concave in c, so Newton's method on N^(−½) = ‖b‖⁻¹ converges
    monotonically from the left of the root, and the first step gets there from any start. It starts at the c of b itself. A fixed
    number of steps, which follows from the bound on κ and the dtype, is accurate to the last digit (`newton_steps`).

    Gradients follow the implicit function theorem instead of the iteration: the root is held constant, and two more Newton
    steps from it are differentiated. The first has the derivative of the root, the second makes the next two derivatives exact
    as well, on every backend. TensorFlow takes these two steps only where a gradient is needed.

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
    >>> from keras_auxref.ops import factored_inverse, factored_reflect
    >>> swap, x, scales = np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([3.0, 4.0]), np.array([1.0, 1.5])
    >>> y = factored_reflect(x, swap, np.eye(2), scales)
    >>> np.allclose(factored_inverse(y, swap, np.eye(2), scales), x)
    True
    """
    y, dtype, u, v, scales = _prepare(y, u, v, eigenvalues, "y")
    return map_rows(lambda rows: _times(diagonal_inverse(_transposed(rows, u), scales, condition), v), y, dtype)


class _Prepared(NamedTuple):
    x: Tensor
    dtype: str
    u: Tensor | None
    v: Tensor | None
    scales: Tensor


def _prepare(x: Tensor, u: Tensor | None, v: Tensor | None, eigenvalues: Tensor, name: str = "x") -> _Prepared:
    """Checked tensors, in float32 at least, except x itself; None stays None."""
    x, eigenvalues = as_tensor(x, name), as_tensor(eigenvalues, "eigenvalues")
    matrices = {key: as_tensor(matrix, key) for key, matrix in (("u", u), ("v", v)) if matrix is not None}
    dtype = _check(x, matrices, eigenvalues, name, dtype_of(x))
    u, v = (ops.cast(matrices[key], dtype) if key in matrices else None for key in ("u", "v"))
    return _Prepared(x, dtype, u, v, ops.cast(eigenvalues, dtype))


def _transposed(rows: Tensor, matrix: Tensor | None) -> Tensor:
    """Mᵀx for rows x; None stands for the identity. (`@`, because `ops.matmul` on torch passes float64 through float32.)"""
    return rows if matrix is None else rows @ matrix


def _times(rows: Tensor, matrix: Tensor | None) -> Tensor:
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
    working = working_dtype(dtype)
    for key, matrix in {**matrices, "eigenvalues": eigenvalues}.items():
        if key != "eigenvalues" and tuple(matrix.shape) != (d, d):
            raise ValueError(
                f"`{key}` must be a square matrix that fits `{name}`. Expected shape {(d, d)}. Received: {tuple(matrix.shape)}"
            )
        found = dtype_of(matrix)
        if found not in (dtype, working):
            raise ValueError(f"`{key}` must have the dtype of `{name}`. Expected {dtype}. Received: {found}")
        check_finite(matrix, key)
    return working
