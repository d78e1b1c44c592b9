"""One factorisation of W that serves a whole batch: W = B M B⁻¹, M of real 2×2 blocks."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.checks import HALF, as_tensor, check_finite, check_square, is_concrete
from keras_auxref.ops.proof import Bracket, bracket_of, inverse_by_qr
from keras_auxref.ops.rows import dtype_of, epsilon, matmul, power_of_two
from keras_auxref.typing import Tensor


class Route(NamedTuple):
    """One way to compute with I − cW for a batch of rows.

    Attributes:
        basis: `"symmetric"`, orthonormal eigenvectors; `"paired"`, a real basis of a general W; `"rows"`, none: one factorisation
            per row.
        wide: Whether the batch has to be in float64, whatever its dtype.
    """

    basis: str
    wide: bool


SYMMETRIC, PAIRED, PAIRED_WIDE, ROWS = range(4)
ROUTES = (Route("symmetric", wide=False), Route("paired", wide=False), Route("paired", wide=True), Route("rows", wide=True))


class Factors(NamedTuple):
    """W/scale = B M B⁻¹ in float64, M block diagonal with h = ⌈d/2⌉ real blocks [[a₁, b], [−b, a₂]].

    A pair of conjugate eigenvalues a ± ib with eigenvectors r ± is is one block with a₁ = a₂ = a and the columns r, s of B; two
    real eigenvalues form a block with b = 0. So everything after this point is real arithmetic with static shapes. For a
    symmetric W all b are zero and B is orthogonal. If d is odd, one column is zero and has the eigenvalue 0.

    Attributes:
        w: W/scale, or the identity if W is zero or not finite.
        scale: The power of two for which max|W|/scale is about 1; NaN when W is not finite.
        route: Which of `ROUTES` is accurate enough for the dtype asked for, a scalar.
        a: (2, h), the diagonals of the blocks.
        b: (h,).
        right: (2h, d): its rows are the columns of B, first those that belong to a₁.
        left: (2h, d): the rows of B⁻¹.
        bracket: Where the inverse looks for c; None if it was not requested.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import factorize
    >>> factors = factorize(np.diag([1.0, 1.5]))
    >>> bool(factors.bracket.certified)
    True
    """

    w: Tensor
    scale: Tensor
    route: Tensor
    a: Tensor
    b: Tensor
    right: Tensor
    left: Tensor
    bracket: Bracket | None = None

    def eigen(self, dtype: str) -> tuple[Tensor, Tensor]:
        """The eigenvalues of a symmetric W/scale, (d,), and its eigenvectors, the rows of a (d, d)."""
        d = self.w.shape[0]
        return ops.cast(ops.reshape(self.a, (-1,))[:d], dtype), ops.cast(self.right[:d], dtype)


def factorize(w: Tensor, symmetric: bool | None = None) -> Factors:
    """Factors W once, in float64, for any number of later calls of `log_det_jacobian` and `inverse`.

    Pass the result as `factors=` where one W serves many batches, as in evaluation or serving. The factors are constants to
    automatic differentiation; gradients with respect to W do not need gradients of the factors.

    Args:
        w: Tensor of shape `(d, d)`.
        symmetric: True promises W = Wᵀ, which is faster and compiles under TensorFlow's XLA; None looks at W.

    Returns:
        A `Factors` tuple.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import factorize, inverse, reflect
    >>> w, x = np.diag([1.0, 1.5]), np.array([[3.0, 4.0]])
    >>> factors = factorize(w)
    >>> np.allclose(inverse(reflect(x, w), w, factors=factors), x)
    True
    """
    w = as_tensor(w, "w")
    check_square(w, "w")
    check_finite(w, "w")
    return factors_of(w, symmetric, bracket=True)


def is_certified(w: Tensor, symmetric: bool | None = None) -> Tensor:
    """Whether f(x) = H(Wx) x is proven to be a bijection: a scalar boolean tensor, also inside graphs.

    The proof is that of `kernels.certify`, which gives reasons: W⁻¹ = S + K, S symmetric and definite with κ(S) < 2, rounding
    included.

    Args:
        w: Tensor of shape `(d, d)`.
        symmetric: True promises W = Wᵀ; None looks at W.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import is_certified
    >>> bool(is_certified(np.diag([1.0, 1.5]))), bool(is_certified(np.diag([1.0, 3.0])))
    (True, False)
    """
    w = as_tensor(w, "w")
    check_square(w, "w")
    w = ops.cast(w, "float32") if dtype_of(w) in HALF else w
    return factors_of(w, symmetric, bracket=True).bracket.certified  # type: ignore[union-attr]


def factors_of(w: Tensor, symmetric: bool | None, *, bracket: bool = False) -> Factors:
    """`factorize` for a checked tensor, with or without what the inverse needs."""
    return backend.shared(_factorize, ops.stop_gradient(w), symmetric=symmetric, bracket=bracket)


def routes_of(factors: Factors, w: Tensor, symmetric: bool | None) -> tuple[int, ...]:
    """The routes that W may take: only one if it is already known, so that the others do not enter the graph."""
    if is_concrete(factors.route):
        return (int(factors.route),)  # type: ignore[call-overload]
    if _needs_rows(w, symmetric):
        return (ROWS,)
    if symmetric or w.shape[-1] == 1:
        return (SYMMETRIC,)
    return (SYMMETRIC, PAIRED, ROWS) if dtype_of(w) == backend.wide_dtype() else (SYMMETRIC, PAIRED, PAIRED_WIDE, ROWS)


def dispatch(route: Tensor, possible: tuple[int, ...], function: Callable[[Route], Any]) -> Any:
    """function(ROUTES[route]); as branches of a graph where the route depends on the values of W.

    Args:
        route: The route of W.
        possible: The routes to expect, in order, from `routes_of`.
        function: Called with a `Route`; all its results have the same structure.
    """
    if len(possible) == 1:
        return function(ROUTES[possible[0]])
    position = sum(ops.cast(route > index, "int32") for index in possible[:-1])
    return ops.switch(position, [lambda index=index: function(ROUTES[index]) for index in possible])


def _needs_rows(w: Tensor, symmetric: bool | None) -> bool:
    """XLA in TensorFlow has no eigendecomposition of a general matrix, and gives that of a symmetric one to six digits."""
    return backend.inside_xla() and not (symmetric and dtype_of(w) == "float32") and w.shape[-1] > 1


def _factorize(w: Tensor, symmetric: bool | None, bracket: bool) -> Factors:
    dtype, wide = dtype_of(w), ops.cast(w, backend.wide_dtype())
    d = w.shape[0]
    largest = ops.max(ops.abs(wide))
    finite = ops.all(ops.isfinite(wide))
    usable = ops.logical_and(finite, largest > 0)
    power = power_of_two(ops.where(usable, largest, ops.ones_like(largest)))
    scale = ops.where(finite, power, float("nan"))
    normal = ops.where(usable, wide / power, ops.eye(d, dtype=wide.dtype))
    if _needs_rows(w, symmetric):
        zeros = ops.zeros_like(normal[:1])
        bounds = bracket_of(normal, inverse_by_qr(normal)) if bracket else None
        factors = Factors(normal, scale, ops.cast(ROWS, "int32"), zeros, zeros[0], zeros, zeros, bounds)
    elif symmetric or d == 1:
        factors = _symmetric(normal, scale, bracket)
    else:
        asymmetry = ops.max(ops.abs(normal - ops.transpose(normal)))
        factors = ops.cond(
            asymmetry <= 4 * epsilon(dtype),
            lambda: _symmetric(normal, scale, bracket),
            lambda: _general(normal, scale, dtype, bracket),
        )
    if factors.bracket is None:
        return factors
    # Nothing is proven if the identity replaces W.
    certified, mild = (ops.logical_and(proven, usable) for proven in (factors.bracket.certified, factors.bracket.mild))
    return factors._replace(bracket=factors.bracket._replace(certified=certified, mild=mild))


def _symmetric(w: Tensor, scale: Tensor, bracket: bool) -> Factors:
    w = (w + ops.transpose(w)) / 2
    eigenvalue, vectors = ops.eigh(w)
    a, basis = _blocks(eigenvalue), _padded(ops.transpose(vectors))
    bounds = bracket_of(w, matmul(vectors / eigenvalue, ops.transpose(vectors)), 1 / eigenvalue) if bracket else None
    return Factors(w, scale, ops.cast(SYMMETRIC, "int32"), a, ops.zeros_like(a[0]), basis, basis, bounds)


def _padded(rows: Tensor) -> Tensor:
    """(d, …), with a row of zeros appended if d is odd."""
    return rows if rows.shape[0] % 2 == 0 else ops.concatenate([rows, ops.zeros_like(rows[:1])])


def _blocks(values: Tensor) -> Tensor:
    """d values as (2, h)."""
    return ops.reshape(_padded(values), (2, -1))


def _general(w: Tensor, scale: Tensor, dtype: str, bracket: bool) -> Factors:
    """Blocks from complex eigenvectors in any order: first the eigenvalues with Im λ > 0, then the real ones two by two."""
    d = w.shape[0]
    h = (d + 1) // 2
    unit = epsilon(dtype_of(w))
    values, vectors = ops.eig(w)
    rows = ops.transpose(vectors)
    real, imaginary = ops.cast(ops.real(values), w.dtype), ops.cast(ops.imag(values), w.dtype)
    rows_real, rows_imaginary = ops.cast(ops.real(rows), w.dtype), ops.cast(ops.imag(rows), w.dtype)
    # An eigenvector of a real eigenvalue is real up to a phase, that of its largest entry.
    squares = ops.square(rows_real) + ops.square(rows_imaginary)
    top = ops.one_hot(ops.argmax(squares, axis=-1), d, dtype=w.dtype)
    cosine, sine = (ops.sum(top * part, axis=-1, keepdims=True) for part in (rows_real, rows_imaginary))
    turned = (cosine * rows_real + sine * rows_imaginary) / ops.sqrt(ops.square(cosine) + ops.square(sine))

    noise = 64 * d * unit
    index = ops.arange(d, dtype="int32")
    order = ops.argsort(index + d * ops.cast(imaginary <= noise, "int32") + d * ops.cast(imaginary < -noise, "int32"))
    pairs = ops.sum(ops.cast(imaginary > noise, "int32"))
    singles = ops.sum(ops.cast(ops.abs(imaginary) <= noise, "int32"))
    block = ops.arange(h, dtype="int32")
    is_pair = block < pairs
    positions = [ops.where(is_pair, block, 2 * block - pairs + i) for i in (0, 1)]
    one, two = (ops.take(order, ops.clip(position, 0, d - 1)) for position in positions)
    has_two = ops.cast(ops.logical_and(~is_pair, positions[1] < pairs + singles), w.dtype)[:, None]
    pair = ops.cast(is_pair, w.dtype)[:, None]
    # For a normal W the two parts of a complex eigenvector of length 1 have length 1/√2.
    root = math.sqrt(2)
    first = pair * root * ops.take(rows_real, one, axis=0) + (1 - pair) * ops.take(turned, one, axis=0)
    second = pair * root * ops.take(rows_imaginary, one, axis=0) + has_two * ops.take(turned, two, axis=0)
    right = ops.concatenate([first, second])
    a = ops.stack([ops.take(real, one), pair[:, 0] * ops.take(real, one) + has_two[:, 0] * ops.take(real, two)])
    b = pair[:, 0] * ops.take(imaginary, one)
    left = _padded(inverse_by_qr(ops.transpose(right[:d])))
    # The pairing and the eigenvectors are used only if they reproduce W.
    blocks = ops.concatenate([a[0][:, None] * left[:h] + b[:, None] * left[h:], a[1][:, None] * left[h:] - b[:, None] * left[:h]])
    error = ops.max(ops.abs(matmul(ops.transpose(right), blocks) - w))
    condition = ops.sqrt(ops.sum(ops.square(right)) * ops.sum(ops.square(left)) / d)
    # The error of the basis is about condition · unit: for float32 in a float64 basis much is left, for float64 less.
    narrow = 30.0 if dtype != "float64" else 1e5
    usable = 1e9 if dtype != dtype_of(w) else narrow
    # Comparisons with NaN are false, so any failure ends in the route that needs no basis.
    fits = [ops.logical_and(condition <= limit, error / unit <= limit) for limit in (narrow, usable)]
    route = ops.where(fits[0], PAIRED, ops.where(fits[1], PAIRED_WIDE, ROWS))
    bounds = bracket_of(w, inverse_by_qr(w)) if bracket else None
    return Factors(w, scale, ops.cast(route, "int32"), a, b, right, left, bounds)
