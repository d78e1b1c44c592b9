"""The inverse of the auxiliary reflection: one scalar equation per vector."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.checks import is_concrete, prepare
from keras_auxref.ops.diagonal import LARGEST_CONDITION, diagonal_inverse, newton_steps
from keras_auxref.ops.factors import PAIRED, PAIRED_WIDE, ROWS, SYMMETRIC, Factors, factors_of, routes_of
from keras_auxref.ops.jacobian import (
    MOST,
    PairedPoint,
    Point,
    RowPoint,
    accurate_reflection,
    at_points,
    jacobian,
    jacobian_solve,
    jacobian_solve_transposed,
)
from keras_auxref.ops.proof import Bracket
from keras_auxref.ops.reflect import Reflection, central_coefficient, is_null, null_bound, reflection, reflection_vjp
from keras_auxref.ops.resolvent import Paired, Rows
from keras_auxref.ops.rows import dtype_of, epsilon, largest, map_rows, matmul, nonzero, power_of_two, row_dot, size_of
from keras_auxref.ops.secular import solve_secular
from keras_auxref.typing import Tensor

_LEAVE = 1 / 16  # the search stops when at most this share of a batch is left
_ACCEPTED = {"float32": 1e-4, "float64": 1e-9}  # the largest ‖f(x) − y‖/‖y‖ of an x that is returned
_ORDINARY = 1.96  # the κ of a symmetric W up to which five or six steps are enough
_POLISH = 3  # Newton steps on f(x) = y for rows that are searched one by one


class Inverse(NamedTuple):
    """x with f(x) = y, and how it was found.

    Attributes:
        x: The preimages, NaN where none was found.
        steps: How many steps on the secular equation each vector took.
        residual: ‖f(x) − y‖/‖y‖ of the x that is returned, after rounding to its dtype, in float64. Here f(x) = x only where W x
            is exactly zero: if W y is only rounding noise, y is returned unchanged, and the residual shows how good that is.
        certified: Whether W is proven to have one preimage for every vector.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import inverse_with_info
    >>> found = inverse_with_info(np.array([[3.0, 4.0]]), np.diag([1.0, 1.5]))
    >>> found.x.shape, bool(found.certified)
    (TensorShape([1, 2]), True)
    """

    x: Tensor
    steps: Tensor
    residual: Tensor
    certified: Tensor


def inverse(
    y: Tensor,
    w: Tensor,
    *,
    symmetric: bool | None = None,
    factors: Factors | None = None,
    near: Tensor | float | None = None,
    max_steps: int = 100,
) -> Tensor:
    """Solves f(x) = H(Wx) x = y for every vector on the last axis of y.

    y = (I − cW) x is linear in x once the scalar c is known, and f preserves norms, so c is a root of the secular equation

        ‖(I − cW)⁻¹ y‖ = ‖y‖,      x = (I − cW)⁻¹ y,

    with one unknown instead of d. W is factored once; the root is found by safeguarded Newton steps, typically 3 to 5. When W⁻¹ =
    S + K, S symmetric positive (or negative) definite with condition below 2 and K skew, the preimage is unique and is found from
    any start. For any other invertible W a preimage always exists and is refined in float64, but **it may not be the only
    one**: see `preimages`. The x that is returned, rounded to its dtype, is checked against the real f(x) − y: where that is
    more than 1e-4 ‖y‖ in float32 or 1e-9 ‖y‖ in float64, x is NaN, never a wrong number.

    Gradients for y and W come from the implicit function theorem. Second derivatives are right, and cost one d×d solve per
    vector; PyTorch refuses them. Runs on TensorFlow, JAX and PyTorch; JAX has float64 only with `jax_enable_x64`. Under
    TensorFlow's XLA pass `symmetric=True` if W is symmetric; any other W costs a QR factorisation per vector and step.

    Args:
        y: Tensor of shape `(..., d)`.
        w: Tensor of shape `(d, d)`.
        symmetric: True promises W = Wᵀ; None looks at W.
        factors: The result of `factorize(w)`, where the same W serves many batches.
        near: The number c(x) = 2 uᵀx/‖u‖², u = Wx, near which to look where there may be several x. For data whose c
            cluster, as they do around 1 for a W that started at I − U, use their mean. With a certified W it has no effect.
        max_steps: Bound on the number of steps.

    Returns:
        A tensor of the shape and dtype of `y`; y itself where W y = 0.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import inverse, reflect
    >>> x, w = np.array([[3.0, 4.0]]), np.array([[1.0, 0.3], [-0.3, 1.2]])
    >>> np.allclose(inverse(reflect(x, w), w), x)
    True
    """
    y, w, dtype = prepare(y, w, "y")
    constants, possible = _prepared(w, symmetric, factors, near)
    return ops.cast(map_rows(lambda rows: _differentiable(rows, w, constants, possible, max_steps), y), dtype)


def inverse_with_info(
    y: Tensor,
    w: Tensor,
    *,
    symmetric: bool | None = None,
    factors: Factors | None = None,
    near: Tensor | float | None = None,
    max_steps: int = 100,
) -> Inverse:
    """`inverse` with the number of steps, the relative residual and whether uniqueness is proven. Not differentiable.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import inverse_with_info
    >>> found = inverse_with_info(np.array([[3.0, 4.0]]), np.array([[1.0, 0.3], [-0.3, 1.2]]))
    >>> bool(found.residual[0] < 1e-12), bool(found.certified)
    (True, True)
    """
    y, w, dtype = prepare(ops.stop_gradient(y), ops.stop_gradient(w), "y")
    constants, possible = _prepared(w, symmetric, factors, near)

    def run(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, steps = backend.shared(_search, rows, w, constants, rows=1, possible=possible, max_steps=max_steps)
        return x, steps, backend.shared(_residual, x, rows, w, constants[0].scale, rows=2)

    x, steps, residual = map_rows(run, y)
    return Inverse(ops.cast(x, dtype), steps, residual, constants[0].bracket.certified)


def _prepared(w: Tensor, symmetric: bool | None, factors: Factors | None, near: Any) -> tuple[Any, tuple[int, ...]]:
    """(factors, near), and which routes W may take."""
    if factors is None or factors.bracket is None:
        factors = factors_of(w, symmetric, bracket=True)
    near = None if near is None else ops.stop_gradient(ops.cast(near, backend.wide_dtype()))
    return (factors, near), routes_of(factors, w, symmetric)


class _Found(NamedTuple):
    """For every row: x, the number of steps, c, and whether x is certainly accurate."""

    x: Tensor
    steps: Tensor
    c: Tensor
    good: Tensor


def _search(y: Tensor, w: Tensor, constants: Any, *, possible: tuple[int, ...], max_steps: int) -> Any:
    """(x, steps) for rows, without gradients: up to three searches, each for the rows that the previous one did not solve.

    1. All rows together, in the basis of W and in their own dtype, until few are left. A certified symmetric W takes a
       fixed number of steps instead, those of the factored reflection.
    2. In the basis of W and in float64, from where the first search ended.
    3. In float64 without a basis of W.
    """
    factors, near = constants
    dtype, exact = dtype_of(y), backend.wide_dtype()
    size = power_of_two(size_of(y))
    unit, matrix = y / size, w / ops.cast(factors.scale, w.dtype)
    null = is_null(largest(matmul(unit, ops.transpose(matrix))), null_bound(matrix) * largest(unit))
    # c belongs to W, and factors.w is W/scale.
    start = ops.cast(central_coefficient(factors.w) if near is None else near * factors.scale, exact)
    search = _Search(matrix, factors, start, near is not None, max_steps)
    zero = ops.zeros_like(unit[:, :1])
    found = _Found(unit, ops.cast(zero, "int32"), zero + ops.cast(start, dtype), zero > 0)

    in_basis, in_wide_basis = (functools.partial(search.in_basis, kind=kind) for kind in (dtype, exact))

    def together() -> _Found:
        if SYMMETRIC not in possible:
            return in_basis(unit, null, found)
        known = ops.logical_and(factors.route == SYMMETRIC, _condition(factors) <= LARGEST_CONDITION)
        return ops.cond(known, lambda: search.in_eigenbasis(unit, null), lambda: in_basis(unit, null, found))

    def remaining(found: _Found, method: Callable[..., _Found], also: Any = True) -> _Found:
        finite = ops.all(ops.isfinite(unit), axis=-1, keepdims=True)
        left = ops.logical_and(~ops.logical_or(found.good, null), ops.logical_and(finite, also))

        def run(c: Tensor, y: Tensor, null: Tensor, x: Tensor, steps: Tensor) -> tuple[_Found, tuple[()]]:
            return method(y, null, _Found(x, steps, c, ~null)), ()

        return backend.only_rows(left, run, found, found.c, unit, null, found.x, found.steps)[0]

    if min(possible) <= PAIRED:
        found = together() if max(possible) <= PAIRED else ops.cond(factors.route <= PAIRED, together, lambda: found)
    if possible != (ROWS,) and dtype != exact:
        found = remaining(found, in_wide_basis, factors.route < ROWS)
    found = remaining(found, search.in_rows)
    rejected = ops.where(ops.logical_or(found.good, null), 0.0, float("nan"))
    return ops.where(null, unit, found.x + ops.cast(rejected, y.dtype)) * size, found.steps[..., 0]


def _condition(factors: Factors) -> Tensor:
    """κ(W) of a certified symmetric W, otherwise infinity."""
    magnitude = ops.abs(ops.reshape(factors.a, (-1,))[: factors.w.shape[0]])
    condition = ops.max(magnitude) / ops.min(magnitude)
    return ops.where(_bracket(factors).certified, condition, float("inf"))


def _bracket(factors: Factors) -> Bracket:
    return factors.bracket  # type: ignore[return-value]


class _Search(NamedTuple):
    """The search for x with f(x) = y, for W and rows y with entries of order 1; every method takes rows."""

    w: Tensor
    factors: Factors
    start: Tensor
    nearest: bool
    max_steps: int

    def in_eigenbasis(self, y: Tensor, null: Tensor) -> _Found:
        """x = −V g⁻¹(Vᵀy) for W = V diag(λ) Vᵀ, κ < 2: the method of the factored reflection."""
        d, dtype = self.w.shape[0], dtype_of(y)
        basis = ops.cast(self.factors.right[:d], dtype)
        scales = ops.cast(ops.abs(ops.reshape(self.factors.a, (-1,))[:d]), dtype)
        own = matmul(y, ops.transpose(basis))

        def steps(condition: float) -> tuple[Tensor, Tensor]:
            count = newton_steps(condition, dtype)
            return diagonal_inverse(own, scales, condition), count * ops.ones_like(null, dtype="int32")

        own, taken = ops.cond(_condition(self.factors) <= _ORDINARY, lambda: steps(_ORDINARY), lambda: steps(LARGEST_CONDITION))
        x = -matmul(own, basis)
        if backend.inside_xla():  # where the eigenbasis has six digits
            x = self._refined(x, y, null)[0]
        return _Found(x, taken, ops.zeros_like(x[:, :1]), ops.ones_like(null))

    def in_basis(self, y: Tensor, null: Tensor, before: _Found, *, kind: str) -> _Found:
        """A search in the basis of W from c, in a given dtype, and a refinement if that dtype is accurate enough for W x.

        Below float64 it ends when few rows are left. x counts as good if it is far better than required.
        """
        dtype, narrow = dtype_of(y), kind != backend.wide_dtype()
        rows, w = ops.cast(y, kind), ops.cast(self.w, kind)
        wy = matmul(rows, ops.transpose(w))
        resolvent = Paired(self.factors, kind)
        root = self._solve(rows, wy, null, resolvent, before.c, leave=_LEAVE if narrow and backend.picks_rows() else 0.0)
        x = rows + root.c * resolvent.solve(root.c, wy)

        def refined() -> tuple[Tensor, Tensor]:
            return self._refined(x, y, null)

        def not_yet() -> tuple[Tensor, Tensor]:
            return ops.cast(x, dtype), ops.full_like(y[:, :1], float("inf"))

        bracket = _bracket(self.factors)
        x, error = ops.cond(bracket.mild, refined, not_yet) if narrow else refined()
        enough = _ACCEPTED[dtype] / ops.where(bracket.certified, 100.0, 10.0)
        good = ops.logical_and(root.done, error <= ops.cast(enough, error.dtype))
        return _Found(x, before.steps + root.steps, ops.cast(root.c, dtype), good)

    def _solve(self, y: Tensor, wy: Tensor, null: Tensor, resolvent: Any, c: Tensor, **options: Any) -> Any:
        start = ops.where(ops.isfinite(c), ops.cast(c, self.start.dtype), self.start)
        options |= {"max_steps": self.max_steps, "nearest": self.nearest}
        return solve_secular(y, wy, null, resolvent, _bracket(self.factors), start, **options)

    def _refined(self, x: Tensor, y: Tensor, null: Tensor) -> tuple[Tensor, Tensor]:
        """One Newton step on f(x) = y, which removes the rounding error of the basis, and a bound on the residual.

        The bound is for x after rounding to the dtype of y, and includes the rounding of f(x) itself. A step that makes it larger
        is not taken. Rows that the basis cannot refine to the last digits count as ten times worse.
        """
        dtype, kind = dtype_of(y), dtype_of(x)
        y, w = ops.cast(y, kind), ops.cast(self.w, kind)
        live = 1 - ops.cast(null, kind)
        norm = nonzero(ops.sqrt(row_dot(y, y)))

        def error(x: Tensor) -> tuple[Reflection, Tensor, Tensor]:
            forward = reflection(x, w, size=power_of_two(size_of(x)))
            difference = live * (forward.y - y)
            noise = epsilon(kind) * forward.scale if kind == backend.wide_dtype() else 0.0
            return forward, difference, ops.sqrt(row_dot(difference, difference)) / norm + live * noise

        forward, difference, before = error(x)
        forward = forward._replace(scale=live * forward.scale, relative=live * forward.relative)
        point = PairedPoint(forward, w, self.factors, MOST[dtype])
        refined = ops.cast(ops.where(point.hard, x, x - jacobian_solve(point, difference)), dtype)
        after = error(ops.cast(refined, kind))[2]
        if kind == dtype:  # otherwise rounding changes x by more than the step does
            better = after < before
            refined, after = ops.where(better, refined, x), ops.where(better, after, before)
        return refined, ops.cast(ops.where(point.hard, 10 * after, after), dtype)

    def in_rows(self, y: Tensor, null: Tensor, before: _Found) -> _Found:
        """The search without a basis of W, in float64: one QR factorisation per row and step, for rows that nothing else solves.

        Where y has almost no component along an eigenvector of W, a root may be so close to a pole that no floating-point number
        lies between them: x changes along that eigenvector from one end of the bracket to the other. (I − cW)x = y holds on the
        line between both ends, and ‖x‖ = ‖y‖ picks the point. If there is no number on the other side, inverse iteration gives
        the eigenvector.

        Without a certificate the search moves outwards from its start: far out, ‖W x‖ ≤ 2 ‖x‖/|c| is small, and f magnifies the
        rounding of x. If that leaves too large a residual, a second search goes from c = 0 in the opposite direction.
        """
        dtype, exact = dtype_of(y), backend.wide_dtype()
        rows, w = ops.cast(y, exact), ops.cast(self.w, exact)
        wy = matmul(rows, ops.transpose(w))
        resolvent = Rows(self.factors, exact)
        certified = _bracket(self.factors).certified
        start = ops.where(certified, ops.cast(before.c, exact), self.start)
        outwards = self._replace(nearest=True)

        def polish(x: Tensor) -> tuple[Tensor]:
            point = RowPoint(x, ~null, w)
            return (self._closer(x, x - jacobian_solve(point, point.forward.y - rows), rows),)

        def attempt(count: Tensor, x: Tensor, c: Tensor, steps: Tensor, good: Tensor) -> tuple[Tensor, ...]:
            again = count > 0
            settled = ops.logical_or(null, good)
            root = outwards._solve(rows, wy, settled, resolvent, ops.where(again, 0.0, start), rising=again)
            at, low, high = (rows + c * resolvent.solve(c, wy) for c in (root.c, root.low, root.high))
            v = self._near_null(root.c, resolvent, rows)
            away = at - row_dot(at, v) * v
            far = ops.sqrt(row_dot(rows, rows)) * v
            candidates = (_between(low, high, rows), _between(away, away + far, rows), _between(away, away - far, rows))
            found = functools.reduce(lambda a, b: self._closer(a, b, rows), (*candidates, ops.cast(x, exact)), at)
            if w.shape[0] > 1:
                (found,) = ops.while_loop(lambda x: True, polish, (found,), maximum_iterations=_POLISH)
            x = ops.where(good, x, ops.cast(found, dtype))
            fine = ops.logical_or(good, residual_of(ops.cast(x, exact), rows, w) <= _ACCEPTED[dtype])
            return count + 1, x, ops.where(settled, c, ops.cast(root.c, dtype)), steps + root.steps, fine

        def lost(count: Tensor, x: Tensor, c: Tensor, steps: Tensor, good: Tensor) -> Tensor:
            tried_all = ops.logical_and(count > 0, ops.logical_or(certified, self.nearest))
            return ops.logical_and(~tried_all, ops.any(~ops.logical_or(null, good)))

        state = (ops.zeros((), "int32"), before.x, before.c, before.steps, ops.zeros_like(null))
        _, x, c, steps, good = ops.while_loop(lost, attempt, state, maximum_iterations=2)
        return _Found(x, steps, c, good)

    def _near_null(self, c: Tensor, resolvent: Rows, y: Tensor) -> Tensor:
        """The direction in which (I − cW)⁻¹ is largest, of length 1, as accurate as two steps of inverse iteration make it."""
        v = ops.cos(ops.cumsum(ops.ones_like(y), axis=-1))  # a vector without any structure that W might share
        for _ in range(2):
            v = resolvent.solve(c, v)
            v = ops.where(ops.isfinite(v), v, 0.0) / size_of(v)
        return v / nonzero(ops.sqrt(row_dot(v, v)))

    def _closer(self, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        """The better of two candidates; if one is NaN, the other."""
        w = ops.cast(self.w, a.dtype)
        first, second = residual_of(a, y, w), residual_of(b, y, w)
        return ops.where(ops.logical_or(second < first, ops.isnan(first)), b, a)


def residual_of(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """‖f(x) − y‖/‖y‖ for rows and W with entries of order 1, (n, 1), with f(x) = x only where W x is exactly zero."""
    difference = accurate_reflection(x, ops.ones_like(x[:, :1], dtype="bool"), w).y - y
    return ops.sqrt(row_dot(difference, difference)) / nonzero(ops.sqrt(row_dot(y, y)))


def _residual(x: Tensor, y: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """`residual_of` for rows and a W of any size, (n,), computed in float64."""
    dtype, exact = y.dtype, backend.wide_dtype()
    size = power_of_two(size_of(y))
    x, y = (ops.cast(t / size, exact) for t in (x, y))
    return ops.cast(residual_of(x, y, ops.cast(w, exact) / ops.cast(scale, exact))[..., 0], dtype)


def _between(low: Tensor, high: Tensor, y: Tensor) -> Tensor:
    """The point of length ‖y‖ between `low` and `high`, one of which is longer than y and one shorter."""
    way = high - low
    a, b, q = row_dot(way, way), row_dot(low, way), row_dot(low, low) - row_dot(y, y)
    root = ops.sqrt(ops.relu(b * b - a * q))
    share = ops.where(q > 0, q / nonzero(root - b), -q / nonzero(root + b))
    return low + ops.clip(share, 0.0, 1.0) * way


def _differentiable(y: Tensor, w: Tensor, constants: Any, possible: tuple[int, ...], max_steps: int) -> Tensor:
    """x with the gradient of the implicit function theorem: for a cotangent g, gy = J⁻ᵀg and gW = −(∂f/∂W)ᵀ J⁻ᵀg."""

    def forward(y: Tensor, w: Tensor, constants: Any) -> tuple[Tensor, Tensor]:
        x = backend.shared(_search, y, w, constants, rows=1, possible=possible, max_steps=max_steps)[0]
        return x, x

    def backward(g: Tensor, x: Tensor, y: Tensor, w: Tensor, constants: Any) -> Any:
        factors, ways = _with_enough_digits(constants[0], possible, dtype_of(w))
        return backend.shared(_gradients, g, x, w, factors, possible=ways)

    def reference(g: Tensor, y: Tensor, w: Tensor, constants: Any) -> Any:
        # The function itself, whose first derivative is known.
        x = _differentiable(y, w, constants, possible, max_steps)
        transposed = ops.swapaxes(jacobian(x, w), -1, -2)
        t = ops.solve(transposed, g[..., None])[..., 0]
        return t, -backend.vjp(lambda w: reflection(x, w).y)(t, w)[0]

    return backend.closed_form(forward, backward, reference, (y, w), constants)


def _with_enough_digits(factors: Factors, possible: tuple[int, ...], dtype: str) -> tuple[Factors, tuple[int, ...]]:
    """Factors with a float64 route for an ill-conditioned W, and the routes that remain possible."""
    if dtype == backend.wide_dtype() or min(possible) >= PAIRED_WIDE:
        return factors, possible
    route = ops.where(_bracket(factors).mild, factors.route, ops.maximum(factors.route, PAIRED_WIDE))
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
