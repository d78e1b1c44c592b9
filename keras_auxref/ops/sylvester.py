"""The Sylvester flow z′ = z + Q R tanh(R̃Qᵀz + b), its log-determinant by an M×M identity, and its inverse."""

from typing import NamedTuple

from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.amortised import prepare
from keras_auxref.ops.checks import HALF, as_tensor, whole_number
from keras_auxref.ops.rows import dtype_of, epsilon
from keras_auxref.typing import Tensor

_SHAPES: dict[str, tuple[str, ...]] = {"b": ("M",), "r": ("M", "M"), "r_tilde": ("M", "M"), "q": ("d", "M")}
_MOST_STEPS = {"float32": 48, "float64": 96}
"""Newton steps of the inverse. About five are usual; where 1 + s is tiny, a step takes only a third off a root near 0."""


def sylvester(z: Tensor, r: Tensor, r_tilde: Tensor, b: Tensor, q: Tensor | None = None) -> Tensor:
    """One step of a Sylvester flow on every vector on the last axis of z.

        z′ = z + Q R tanh(R̃ Qᵀz + b)

    Q has M ≤ d orthonormal columns, R and R̃ are upper triangular. For R_ii R̃_ii > −1 it is a bijection. None of this is
    checked. A Q of zeros is allowed, and gives z′ = z. If Q is a d×d product of reflections, it is cheaper to apply Qᵀ before
    and Q after a step without `q`: see `householder_flow`.

    Args:
        z: Tensor of shape `(..., d)`.
        r: R of shape `(..., M, M)`. Entries below the diagonal are ignored.
        r_tilde: R̃ of shape `(..., M, M)`, likewise.
        b: Tensor of shape `(..., M)`.
        q: Q of shape `(..., d, M)`; None for the identity, M = d. All leading axes broadcast against those of `z`.

    Returns:
        A tensor of shape `(..., d)` and of the dtype of `z`.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import sylvester
    >>> r = np.array([[0.5, 1.0], [0.0, 0.0]])
    >>> print(sylvester(np.zeros(2), r, np.eye(2), np.array([0.0, 9.0])).numpy().round(3))
    [1. 0.]

    Reference: van den Berg, Hasenclever, Tomczak & Welling, "Sylvester Normalizing Flows for Variational Inference", UAI 2018.
    """
    return sylvester_and_log_det(z, r, r_tilde, b, q)[0]


def sylvester_and_log_det(z: Tensor, r: Tensor, r_tilde: Tensor, b: Tensor, q: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`sylvester` and log|det ∂z′/∂z|.

        det(I_d + Q R D R̃ Qᵀ) = det(I_M + D R̃ QᵀQ R) = Π (1 + D_ii R̃_ii R_ii ‖q_i‖²),      D = diag(tanh′(R̃ Qᵀz + b))

    The first equality is Sylvester's identity; the second needs orthogonal columns of Q, which make R̃ QᵀQ R triangular.

    Args:
        z: Tensor of shape `(..., d)`.
        r: R of shape `(..., M, M)`.
        r_tilde: R̃ of shape `(..., M, M)`.
        b: Tensor of shape `(..., M)`.
        q: Q of shape `(..., d, M)`, or None for the identity.

    Returns:
        Two tensors of the dtype of `z`, of shapes `(..., d)` and `(...,)`.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import sylvester_and_log_det
    >>> z, log_det = sylvester_and_log_det(np.zeros(2), np.eye(2), np.eye(2), np.zeros(2))
    >>> np.allclose(log_det, 2 * np.log(2))
    True
    """
    z, p, dtype = _prepare(z, r, r_tilde, b, q)
    h = backend.tanh(_times(p.r_tilde, _coordinates(p.q, z)) + p.b)
    log_det = ops.sum(ops.log1p((1 - ops.square(h)) * _products(p)), axis=-1)
    return ops.cast(_moved(p.q, z, _times(p.r, h)), dtype), ops.cast(log_det, dtype)


def sylvester_inverse(z: Tensor, r: Tensor, r_tilde: Tensor, b: Tensor, q: Tensor | None = None) -> Tensor:
    """The vector that `sylvester` takes to z.

    The argument u = R̃ Qᵀz + b of tanh before the step and u′, the same after it, are related by M equations

        u′ = u + T tanh(u),      T = R̃ QᵀQ R upper triangular,

    which are solved from the last to the first. Each is F(uᵢ) = uᵢ + s tanh(uᵢ) − k = 0 for one number, with s = Tᵢᵢ > −1, and
    increasing. For k ≥ 0 the root is ≥ 0, where F is convex for s < 0 and concave for s > 0: Newton's method is monotone from
    k − s, beyond the root, for s < 0, and from max(0, k − s), before the root, for s > 0. Then z = z′ − Q R tanh(u).

    For the gradient the root is held constant, and two more Newton steps from it are differentiated: this is the implicit
    function theorem, also for second derivatives.

    Args:
        z: Tensor of shape `(..., d)`.
        r: R of shape `(..., M, M)`.
        r_tilde: R̃ of shape `(..., M, M)`.
        b: Tensor of shape `(..., M)`.
        q: Q of shape `(..., d, M)`, or None for the identity.

    Returns:
        A tensor of shape `(..., d)` and of the dtype of `z`.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import sylvester, sylvester_inverse
    >>> z, r, b = np.array([3.0, 4.0]), np.array([[0.5, 1.0], [0.0, 0.5]]), np.array([0.0, 1.0])
    >>> np.allclose(sylvester_inverse(sylvester(z, r, np.eye(2), b), r, np.eye(2), b), z)
    True
    """
    z, p, dtype = _prepare(z, r, r_tilde, b, q)
    target = _times(p.r_tilde, _coordinates(p.q, z)) + p.b
    lengths = _lengths(p)
    triangle = p.r_tilde @ (p.r if lengths is None else lengths[..., None] * p.r)
    solved: list[Tensor] = []
    for i in reversed(range(p.b.shape[-1])):
        known = target[..., i]
        for offset, h in enumerate(reversed(solved)):
            known = known - triangle[..., i, i + 1 + offset] * h
        solved.append(backend.tanh(_root(triangle[..., i, i], known)))
    h = ops.stack(solved[::-1], axis=-1) if solved else target
    return ops.cast(_moved(p.q, z, -_times(p.r, h)), dtype)


def orthonormal_columns(a: Tensor, steps: int = 30) -> Tensor:
    """The matrix with orthonormal columns closest to A, by the iteration of Björck & Bowie.

        Q₀ = A / ‖A‖_F,      Q ← Q + ½ Q (I − QᵀQ)

    A singular value σ of Q₀ grows by 3/2 in a step while it is small, and then converges quadratically to 1: after `steps` all
    above about (2/3)^(steps − 5) have converged. If one has not, because the columns of A are (nearly) linearly dependent, the
    result is a matrix of zeros, never one whose columns are not orthonormal.

    Args:
        a: Tensor of shape `(..., d, M)`, M ≤ d.
        steps: The number of steps.

    Returns:
        A tensor of the shape and dtype of `a`.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import orthonormal_columns
    >>> print(orthonormal_columns(np.array([[3.0, 0.0], [0.0, 0.1]])).numpy().round(6))
    [[1. 0.]
     [0. 1.]]

    Reference: Björck & Bowie, "An Iterative Algorithm for Computing the Best Estimate of an Orthogonal Matrix", 1971.
    """
    a = as_tensor(a, "a")
    shape = tuple(a.shape)
    if len(shape) < 2 or None in shape[-2:] or shape[-1] > shape[-2]:
        raise ValueError(f"`a` must have no more columns than rows. Expected shape (..., d, M), M ≤ d. Received: {shape}")
    steps = whole_number("steps", steps)
    dtype = dtype_of(a)
    q = _scaled(ops.cast(a, "float32") if dtype in HALF else a)
    identity = ops.eye(shape[-1], dtype=q.dtype)
    for _ in range(steps):
        q = q + 0.5 * q @ (identity - _transpose(q) @ q)
    defect = _largest(_transpose(q) @ q - identity)
    return ops.cast(ops.where(defect > 256 * epsilon(dtype_of(q)), ops.zeros_like(q), q), dtype)


class _Parameters(NamedTuple):
    r: Tensor
    r_tilde: Tensor
    b: Tensor
    q: Tensor | None


def _prepare(z: Tensor, r: Tensor, r_tilde: Tensor, b: Tensor, q: Tensor | None) -> tuple[Tensor, _Parameters, str]:
    """Checked tensors, in float32 at least, with R and R̃ zero below the diagonal."""
    shapes = _SHAPES if q is not None else {name: ("d",) * len(shape) for name, shape in _SHAPES.items()}
    z, given, dtype = prepare(z, shapes, b=b, r=r, r_tilde=r_tilde, q=q)
    r, r_tilde = (ops.triu(given[name]) for name in ("r", "r_tilde"))
    return z, _Parameters(r, r_tilde, given["b"], given.get("q")), dtype


def _times(matrix: Tensor, x: Tensor) -> Tensor:
    """M x. (`@`, because `ops.matmul` on torch passes float64 through float32.)"""
    return (matrix @ x[..., None])[..., 0]


def _transpose(matrix: Tensor) -> Tensor:
    return ops.swapaxes(matrix, -1, -2)


def _coordinates(q: Tensor | None, z: Tensor) -> Tensor:
    """Qᵀz; None stands for the identity."""
    return z if q is None else _times(_transpose(q), z)


def _moved(q: Tensor | None, z: Tensor, step: Tensor) -> Tensor:
    """z + Q step."""
    return z + (step if q is None else _times(q, step))


def _lengths(p: _Parameters) -> Tensor | None:
    """‖q_i‖² of every column, 1 or 0; None for the identity."""
    return None if p.q is None else ops.sum(ops.square(p.q), axis=-2)


def _products(p: _Parameters) -> Tensor:
    """R_ii R̃_ii ‖q_i‖²."""
    products = ops.diagonal(p.r, axis1=-2, axis2=-1) * ops.diagonal(p.r_tilde, axis1=-2, axis2=-1)
    lengths = _lengths(p)
    return products if lengths is None else products * lengths


def _root(s: Tensor, k: Tensor) -> Tensor:
    """u with u + s tanh(u) = k, for s > −1."""

    def newton(u: Tensor, s: Tensor, k: Tensor) -> Tensor:
        h = backend.tanh(u)
        return u - (u + s * h - k) / (1 + s * (1 - ops.square(h)))

    sign = ops.where(k < 0, -ops.ones_like(k), ops.ones_like(k))
    k = sign * k
    fixed = ops.stop_gradient(s), ops.stop_gradient(k)
    far = fixed[1] - fixed[0]
    u = ops.where(ops.logical_and(fixed[0] > 0, far < 0), ops.zeros_like(far), far)
    u, _ = ops.while_loop(
        lambda u, before: ops.any(ops.abs(u - before) > 2 * epsilon(dtype_of(u)) * ops.abs(u)),
        lambda u, before: (newton(u, *fixed), u),
        (newton(u, *fixed), u),
        maximum_iterations=_MOST_STEPS[dtype_of(u)],
    )
    u = ops.stop_gradient(u)
    for _ in range(2):
        u = newton(u, s, k)
    return sign * u


def _scaled(a: Tensor) -> Tensor:
    """A / ‖A‖_F, and zero for zero. A is first divided by its largest entry, so that no square over- or underflows."""
    size = ops.stop_gradient(_largest(a))
    a = a / ops.where(size > 0, size, ops.ones_like(size))
    squares = ops.sum(ops.square(a), axis=(-2, -1), keepdims=True)
    return a / ops.sqrt(ops.where(squares > 0, squares, ops.ones_like(squares)))


def _largest(a: Tensor) -> Tensor:
    """max|a| of every matrix, of shape (..., 1, 1)."""
    return ops.max(ops.max(ops.abs(a), axis=-1, keepdims=True), axis=-2, keepdims=True)
