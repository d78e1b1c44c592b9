"""The search behind the inverse: x with f(x) = y for a batch of rows, from one factorisation of W."""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_auxref.ops._xla import inside_xla
from keras_auxref.ops.factors import EIGEN, EIGEN_WIDE, PER_SAMPLE, SYMMETRIC, Bracket, Factors, bracket_of
from keras_auxref.ops.reflect import annihilated, central_coefficient
from keras_auxref.ops.resolvent import EigenResolvent, PerSampleResolvent, Resolvent, SymmetricResolvent, resolvent_of, row_dot
from keras_auxref.ops.secular import solve_secular

_LEAVE = 1 / 16  # the share of a batch that is small enough to be left behind


class Inverse(NamedTuple):
    """x with f(x) = y, and how it was found: per vector the steps on the secular equation and ‖f(x) − y‖/‖y‖."""

    x: tf.Tensor
    steps: tf.Tensor
    residual: tf.Tensor
    certified: tf.Tensor


class Point(NamedTuple):
    """The quantities of Theorem 3 at x, with p = A⁻¹u and κ = 1 + 2vᵀp/n2.

    On dead rows u and v are rounding noise, and n2 = 1, c = 0 make them count for nothing: A = I, J = I.
    """

    u: tf.Tensor
    v: tf.Tensor
    n2: tf.Tensor
    c: tf.Tensor
    p: tf.Tensor
    kappa: tf.Tensor


def at(x: tf.Tensor, w: tf.Tensor, dead: tf.Tensor, resolvent: Resolvent) -> Point:
    u = tf.matmul(x, w, transpose_b=True)
    v = u if resolvent.symmetric else tf.matmul(x, w)
    n2, c = coefficient_of(x, u, dead)
    p = resolvent.solve(c, u)
    return Point(u, v, n2, c, p, 1 + 2 * row_dot(v, p) / n2)


def coefficient_of(x: tf.Tensor, u: tf.Tensor, dead: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    n2 = tf.where(~dead, row_dot(u, u), 1)
    return n2, tf.where(~dead, 2 * row_dot(u, x) / n2, 0)


def jacobian_solve(point: Point, resolvent: Resolvent, r: tf.Tensor) -> tf.Tensor:
    """J⁻¹r = [A⁻¹ − (2/n2) A⁻¹u vᵀA⁻¹/κ] H(u) r (Sherman–Morrison)."""
    z = resolvent.solve(point.c, r - point.u * (2 * row_dot(point.u, r) / point.n2))
    return z - point.p * (2 * row_dot(point.v, z) / (point.n2 * point.kappa))


def jacobian_solve_transposed(point: Point, resolvent: Resolvent, g: tf.Tensor) -> tf.Tensor:
    """J⁻ᵀg."""
    z = resolvent.solve_transposed(point.c, g - point.v * (2 * row_dot(point.p, g) / (point.n2 * point.kappa)))
    return z - point.u * (2 * row_dot(point.u, z) / point.n2)


def switch(factors: Factors, certified: tf.Tensor | bool, dtype: tf.DType, function: Callable[[Resolvent, tf.DType], Any]) -> Any:
    """Calls `function` with the resolvent for W: in the dtype of the input if W is certified, in float64 if not."""
    wide = tf.float64
    if certified is True:
        if isinstance(factors.route, int):
            return function(*resolvent_of(factors, factors.route, dtype))
        return tf.switch_case(factors.route, [lambda i=i: function(*resolvent_of(factors, i, dtype)) for i in range(4)])
    routes = [(SYMMETRIC, dtype), (SYMMETRIC, wide), (EIGEN, dtype), (EIGEN_WIDE, wide), (PER_SAMPLE, wide)]
    branches = [lambda route=route, kind=kind: function(*resolvent_of(factors, route, kind)) for route, kind in routes]
    if isinstance(factors.route, int):  # known while tracing
        if factors.route in (EIGEN_WIDE, PER_SAMPLE):
            return branches[factors.route + 1]()
        trusted, careful = (0, 1) if factors.route == SYMMETRIC else (2, 3)
        return branches[trusted]() if dtype == wide else tf.cond(certified, branches[trusted], branches[careful])
    trusted = tf.cast(certified, tf.int32)
    index = tf.where(factors.route == SYMMETRIC, 1 - trusted, tf.where(factors.route == EIGEN, 3 - trusted, factors.route + 1))
    return tf.switch_case(index, branches)


def _error(x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, dead: tf.Tensor) -> tf.Tensor:
    """‖f(x) − y‖²."""
    u = tf.matmul(x, w, transpose_b=True)
    error = x - coefficient_of(x, u, dead)[1] * u - y
    return row_dot(error, error)


class _Attempt(NamedTuple):
    """Where a search ended: x and ‖f(x) − y‖/‖y‖, the root c, the steps, and whether the iteration converged."""

    x: tf.Tensor
    residual: tf.Tensor
    c: tf.Tensor
    steps: tf.Tensor
    done: tf.Tensor


def _refine(found: _Attempt, y: tf.Tensor, w: tf.Tensor, dead: tf.Tensor, resolvent: Resolvent) -> _Attempt:
    """One Newton step on f(x) = y, which takes the rounding of the eigenbasis out; where it does not help, it is not taken."""
    x = tf.cast(found.x, y.dtype)
    point = at(x, w, dead, resolvent)
    error = x - point.c * point.u - y
    step = jacobian_solve(point, resolvent, error)
    refined_error, error = _error(x - step, y, w, dead), row_dot(error, error)
    better = refined_error < error
    residual = tf.where(~dead, tf.sqrt(tf.where(better, refined_error, error) / row_dot(y, y)), 0)
    return found._replace(x=x - tf.math.multiply_no_nan(step, tf.cast(better, x.dtype)), residual=residual)


class _Search(NamedTuple):
    """What every search for the same batch has in common; rows are given to its methods, as some come back alone."""

    factors: Factors
    bracket: Bracket
    nearest: bool
    max_steps: int

    def run(
        self, y: tf.Tensor, w: tf.Tensor, dead: tf.Tensor, start: tf.Tensor, resolvent: Resolvent, leave: float = 0.0
    ) -> _Attempt:
        """Solves the secular equation."""
        wy = tf.matmul(y, w, transpose_b=True)
        # Rows without a root to look for: y itself where W y = 0, NaN where y is NaN.
        at_zero = tf.where(dead, tf.constant(float("nan"), y.dtype), 2 * row_dot(y, wy))
        norm = tf.sqrt(row_dot(y, y))
        root = solve_secular(y, norm, resolvent, self.bracket, start, at_zero, self.max_steps, self.nearest, leave)
        c = tf.where(~dead, root.c, 0)
        return _Attempt(y + c * resolvent.solve(c, wy), tf.zeros_like(c), c, root.steps, root.done)

    def again(self, found: _Attempt, rows: tf.Tensor, y: tf.Tensor, w: tf.Tensor, dead: tf.Tensor, start: tf.Tensor) -> _Attempt:
        """The same with these rows searched for alone, in float64, from where they are."""
        dtype, wide = y.dtype, tf.float64
        index = tf.where(rows[:, 0])
        y, c, dead = (tf.gather_nd(t, index) for t in (y, found.c, dead))
        start = tf.where(tf.math.is_finite(c), tf.cast(c, wide), start)
        y, w, resolvent = tf.cast(y, wide), tf.cast(w, wide), _eigen(self.factors, wide)
        alone = _refine(self.run(y, w, dead, start, resolvent), y, w, dead, resolvent)
        alone = _cast(alone._replace(steps=alone.steps + tf.gather_nd(found.steps, index)), dtype)
        return _Attempt(*(tf.tensor_scatter_nd_update(a, index, b) for a, b in zip(found, alone, strict=True)))


def _eigen(factors: Factors, dtype: tf.DType) -> Resolvent:
    """The resolvent by eigenvectors in any dtype: that of a general W, which serves symmetric ones too, where it is not known."""
    symmetric = isinstance(factors.route, int) and factors.route == SYMMETRIC
    return SymmetricResolvent(factors, dtype) if symmetric else EigenResolvent(factors, dtype)


def _cast(found: _Attempt, dtype: tf.DType) -> _Attempt:
    return found._replace(**{key: tf.cast(getattr(found, key), dtype) for key in ("x", "residual", "c")})


def solve(y: tf.Tensor, w: tf.Tensor, factors: Factors, near: tf.Tensor | None, max_steps: int) -> Inverse:
    """The inverse for rows with max|y| = 1 and for max|W| about 1, without gradients.

    All rows are searched for together, in the dtype of the input, until few are left. These, and rows that did not become
    accurate, go on alone in float64: a batch does not wait for its slowest row. Without a certificate every row is refined
    in float64, since nothing bounds the condition of its Jacobian.
    """
    dtype, wide = y.dtype, tf.float64
    bracket = bracket_of(factors)
    dead = annihilated(y, w)
    # c belongs to W, and factors.w is W / scale.
    start = central_coefficient(factors.w) if near is None else near * factors.scale
    search = _Search(factors, bracket, near is not None, max_steps)
    together = inside_xla() or (isinstance(factors.route, int) and factors.route == PER_SAMPLE)

    def find(resolvent: Resolvent, kind: tf.DType) -> _Attempt:
        rows, matrix = tf.cast(y, kind), tf.cast(w, kind)
        if not together and not isinstance(resolvent, PerSampleResolvent):
            return _cast(search.run(rows, matrix, dead, start, resolvent, _LEAVE), dtype)
        return _cast(_refine(search.run(rows, matrix, dead, start, resolvent), rows, matrix, dead, resolvent), dtype)

    def refine(resolvent: Resolvent, kind: tf.DType) -> _Attempt:
        return _cast(_refine(found, tf.cast(y, kind), tf.cast(w, kind), dead, resolvent), dtype)

    if together:  # XLA cannot pick rows
        found = switch(factors, bracket.certified, dtype, find)
    else:
        found = switch(factors, True, dtype, find)
        eigen = factors.route != PER_SAMPLE
        trusted = bracket.certified & (factors.route != EIGEN_WIDE)
        precision = tf.where(trusted, tf.where(tf.equal(factors.route, SYMMETRIC), 1, 2), 3)
        refinements = [
            lambda: found,
            lambda: refine(SymmetricResolvent(factors, dtype), dtype),
            lambda: refine(EigenResolvent(factors, dtype), dtype),
            lambda: refine(_eigen(factors, wide), wide),
        ]
        found = tf.switch_case(tf.where(eigen, precision, 0), refinements)
        rows = (~found.done | ~(found.residual <= _tolerance(dtype, bracket) / 10)) & tf.math.is_finite(y[:, :1]) & ~dead & eigen
        found = tf.cond(tf.reduce_any(rows), lambda: search.again(found, rows, y, w, dead, start), lambda: found)
    x = found.x + tf.where(found.residual <= _tolerance(dtype, bracket), tf.zeros([], dtype), tf.constant(float("nan"), dtype))
    return Inverse(x, found.steps[..., 0], found.residual[..., 0], bracket.certified)


def _tolerance(dtype: tf.DType, bracket: Bracket) -> tf.Tensor:
    """The largest residual of an x that is returned."""
    if dtype == tf.float64:
        return tf.constant(1e-9, dtype)
    return tf.where(bracket.certified, tf.constant(1e-4, dtype), tf.constant(1e-9, dtype))
