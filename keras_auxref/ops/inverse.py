"""The inverse of the auxiliary reflection: one scalar equation per vector."""

import functools
from typing import Any, NamedTuple

from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops._checks import prepare
from keras_auxref.ops._rows import dtype_of, largest, map_rows, matmul, nonzero, power_of_two, row_dot, size_of
from keras_auxref.ops.factors import Factors, Route, dispatch, factors_of, routes_of
from keras_auxref.ops.jacobian import Point, at_points, jacobian, jacobian_solve, jacobian_solve_transposed
from keras_auxref.ops.proof import Bracket
from keras_auxref.ops.reflect import Reflection, central_coefficient, is_null, null_bound, reflection, reflection_vjp
from keras_auxref.ops.resolvent import dtype_for, resolvent_of
from keras_auxref.ops.secular import solve_secular
from keras_auxref.typing import Tensor

_LEAVE = 1 / 16  # the share of a batch that is small enough to be left behind
_ACCEPTED = {"float32": 1e-4, "float64": 1e-9}  # the largest ‖f(x) − y‖/‖y‖ of an x that is returned


class Inverse(NamedTuple):
    """x with f(x) = y, and how it was found.

    Attributes:
        x: The preimages, NaN where none was found.
        steps: How many steps on the secular equation each vector took.
        residual: ‖f(x) − y‖/‖y‖ of the x that is returned, in its own dtype.
        certified: Whether W is proven to have one preimage for every vector.
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
    near: Tensor | None = None,
    max_steps: int = 100,
) -> Tensor:
    """Solves f(x) = H(Wx) x = y for every vector on the last axis of y.

    y = (I − cW) x is linear in x once the scalar c is known, and f preserves norms, so c is a root of the secular equation

        ‖(I − cW)⁻¹ y‖ = ‖y‖,      x = (I − cW)⁻¹ y,

    one unknown and not d. W is factored once; the root is found by safeguarded Newton steps, typically 3 to 5. When W⁻¹ = S + K,
    S symmetric positive (or negative) definite with condition below 2 and K skew, the preimage is unique and is found from
    anywhere. For any other invertible W a preimage always exists and is refined in float64, but **it may not be the only
    one**: see `preimages`. The x that is returned, rounded to its dtype, is checked against the real f(x) − y: where that is
    more than 1e-4 ‖y‖ in float32 or 1e-9 ‖y‖ in float64, x is NaN, never a wrong number.

    Gradients for y and W come from the implicit function theorem. Second derivatives are right, and cost one d×d solve per
    vector; PyTorch refuses them. Runs on TensorFlow, JAX and PyTorch; in JAX float64 is there only with `jax_enable_x64`. Under
    TensorFlow's XLA pass `symmetric=True` if W is, any other W costs a QR factorisation per vector and step.

    Args:
        y: Tensor of shape `(..., d)`.
        w: Tensor of shape `(d, d)`.
        symmetric: True promises W = Wᵀ; None looks at W.
        factors: The result of `factorize(w)`, where the same W serves many batches.
        near: A number, the c(x) = 2 uᵀx/‖u‖², u = Wx, about which to look for x where there may be several: for data whose c
            cluster, as they do around 1 for a W that started at I − U, their mean. Makes no difference for a W with certificate.
        max_steps: Bound on the number of steps.

    Returns:
        A tensor of the shape and dtype of `y`; y itself where W y = 0.
    """
    y, w, dtype = prepare(y, w, "y")
    search = _Search.of(w, symmetric, factors, near, max_steps)
    return ops.cast(map_rows(lambda rows: _differentiable(rows, w, search), y), dtype)


def inverse_with_info(
    y: Tensor,
    w: Tensor,
    *,
    symmetric: bool | None = None,
    factors: Factors | None = None,
    near: Tensor | None = None,
    max_steps: int = 100,
) -> Inverse:
    """`inverse` with the number of steps, the relative residual and whether uniqueness is proven. Not differentiable."""
    y, w, dtype = prepare(ops.stop_gradient(y), ops.stop_gradient(w), "y")
    search = _Search.of(w, symmetric, factors, near, max_steps)
    found = map_rows(lambda rows: search.run(rows, w), y)
    return Inverse(ops.cast(found.x, dtype), found.steps, found.residual, search.bracket.certified)


class _Found(NamedTuple):
    """x, steps and residual of every row."""

    x: Tensor
    steps: Tensor
    residual: Tensor


class _Search(NamedTuple):
    """What every search with the same W has in common. `constants` are tensors, the rest is known while tracing."""

    constants: tuple[Factors, Tensor | None]
    symmetric: bool | None
    route: int | None
    max_steps: int

    @classmethod
    def of(cls, w: Tensor, symmetric: bool | None, factors: Factors | None, near: Any, max_steps: int) -> "_Search":
        if factors is None or factors.bracket is None:
            factors = factors_of(w, symmetric, bracket=True)
        near = None if near is None else ops.stop_gradient(ops.cast(near, backend.wide_dtype()))
        return cls((factors.tensors, near), symmetric, factors.known_route, max_steps)

    @property
    def bracket(self) -> Bracket:
        return self.constants[0].bracket  # type: ignore[return-value]

    @property
    def static(self) -> dict[str, Any]:
        return {"symmetric": self.symmetric, "route": self.route}

    def run(self, y: Tensor, w: Tensor) -> _Found:
        return backend.shared(_search, y, w, self.constants, rows=1, max_steps=self.max_steps, **self.static)


def _search(y: Tensor, w: Tensor, constants: Any, *, symmetric: bool | None, route: int | None, max_steps: int) -> _Found:
    """The inverse for rows, without gradients.

    All rows are searched for together, in the dtype of the input, until few are left. These, and rows that did not become
    accurate, go on alone in float64: a batch does not wait for its slowest row. Without a certificate every row is refined in
    float64, since nothing bounds the condition of its Jacobian.
    """
    factors, near = constants
    factors = factors.on(route)
    size = power_of_two(size_of(y))
    unit, matrix = y / size, w / ops.cast(factors.scale, w.dtype)
    null = is_null(largest(matmul(unit, ops.transpose(matrix))), null_bound(matrix))
    # c belongs to W, and factors.w is W/scale.
    start = central_coefficient(factors.w) if near is None else near * factors.scale
    problem = _Problem(matrix, factors, ops.cast(start, backend.wide_dtype()), near is not None, max_steps)

    def find(way: Route) -> _Found:
        leave = _LEAVE if backend.picks_rows() and not way.wide else 0.0
        found, c, good = problem.attempt(unit, null, None, way, wide=False, leave=leave)
        if way.wide:  # there is nothing better to try
            return found
        again = ops.logical_and(~good, ops.logical_and(~null, ops.all(ops.isfinite(unit), axis=-1, keepdims=True)))

        def alone(c: Tensor, unit: Tensor, null: Tensor, steps: Tensor) -> tuple[_Found, tuple[()]]:
            found = problem.attempt(unit, null, c, way, wide=True, leave=0.0)[0]
            return found._replace(steps=found.steps + steps), ()

        return backend.only_rows(again, alone, found, c, unit, null, found.steps)[0]

    found = dispatch(factors, routes_of(w, symmetric), find)
    rejected = ops.where(found.residual <= _ACCEPTED[dtype_of(y)], 0.0, float("nan"))
    return _Found(found.x * size + ops.cast(rejected, y.dtype), found.steps[..., 0], found.residual[..., 0])


class _Problem(NamedTuple):
    w: Tensor
    factors: Factors
    start: Tensor
    nearest: bool
    max_steps: int

    def attempt(self, y: Tensor, null: Tensor, c: Tensor | None, way: Route, *, wide: bool, leave: float) -> Any:
        """One search and one refinement: what was found, where it ended, and which rows are good."""
        dtype = dtype_of(y)
        kind = dtype_for(way, dtype, wide=wide)
        rows, w = ops.cast(y, kind), ops.cast(self.w, kind)
        wy = matmul(rows, ops.transpose(w))
        start = self.start if c is None else ops.where(ops.isfinite(c), ops.cast(c, self.start.dtype), self.start)
        resolvent = resolvent_of(self.factors, way, dtype, wide=wide)
        root = solve_secular(
            rows, wy, null, resolvent, self._bracket, start, max_steps=self.max_steps, nearest=self.nearest, leave=leave
        )
        x = rows + root.c * resolvent.solve(root.c, wy)
        if kind == backend.wide_dtype():
            x, residual = self._refine(x, y, null, way, wide=True)
        else:
            x, residual = ops.cond(
                self._bracket.certified,
                lambda: self._refine(x, y, null, way, wide=False),
                lambda: self._refine(x, y, null, way, wide=True),
            )
        good = ops.logical_and(root.done, residual <= _ACCEPTED[dtype] / 10)
        return _Found(x, root.steps, residual), ops.cast(root.c, dtype), good

    @property
    def _bracket(self) -> Bracket:
        return self.factors.bracket  # type: ignore[return-value]

    def _refine(self, x: Tensor, y: Tensor, null: Tensor, way: Route, *, wide: bool) -> tuple[Tensor, Tensor]:
        """One Newton step on f(x) = y, which takes the rounding of the basis out, and the residual of what is returned.

        That is the residual of x after rounding to the dtype of y. A step that makes it larger is not taken.
        """
        dtype = dtype_of(y)
        kind = dtype_for(way, dtype, wide=wide)
        x, y, w = ops.cast(x, kind), ops.cast(y, kind), ops.cast(self.w, kind)
        live = 1 - ops.cast(null, kind)
        norm = nonzero(ops.sqrt(row_dot(y, y)))

        def error(x: Tensor) -> tuple[Reflection, Tensor, Tensor]:
            forward = reflection(x, w)
            difference = live * (forward.y - y)
            return forward, difference, ops.sqrt(row_dot(difference, difference)) / norm

        forward, difference, before = error(x)
        forward = forward._replace(scale=live * forward.scale, relative=live * forward.relative)
        # Where x will be rounded, or can be searched for again in float64, rows at a pole of A may do without this step.
        careful = dtype == backend.wide_dtype()
        step = at_points(_newton, difference, forward, w, self.factors, way, wide=wide, careful=careful)[0]
        refined = ops.cast(x - step, dtype)
        after = error(ops.cast(refined, kind))[2]
        if kind != dtype:  # what rounding does to x is more than what the step does
            return refined, ops.cast(after, dtype)
        better = after < before
        return ops.where(better, refined, x), ops.where(better, after, before)


def _differentiable(y: Tensor, w: Tensor, search: _Search) -> Tensor:
    """x with the gradient of the implicit function theorem: for a cotangent g, gy = J⁻ᵀg and gW = −(∂f/∂W)ᵀ J⁻ᵀg."""

    def forward(y: Tensor, w: Tensor, constants: Any) -> tuple[Tensor, Tensor]:
        x = search._replace(constants=constants).run(y, w).x
        return x, x

    def backward(g: Tensor, x: Tensor, y: Tensor, w: Tensor, constants: Any) -> Any:
        return backend.shared(_gradients, g, x, w, constants[0], **search.static)

    def reference(g: Tensor, y: Tensor, w: Tensor, constants: Any) -> Any:
        # The function itself, whose first derivative is known.
        x = _differentiable(y, w, search._replace(constants=constants))
        transposed = ops.swapaxes(jacobian(x, w), -1, -2)
        t = ops.solve(transposed, g[..., None])[..., 0]
        return t, -backend.vjp(lambda w: reflection(x, w).y)(t, w)[0]

    return backend.closed_form(forward, backward, reference, (y, w), search.constants)


def _gradients(g: Tensor, x: Tensor, w: Tensor, factors: Factors, *, symmetric: Any, route: int | None) -> tuple[Tensor, Tensor]:
    """J⁻ᵀg and −(∂f/∂W)ᵀJ⁻ᵀg at x = f⁻¹(y)."""
    factors = factors.on(route)
    scale = ops.cast(factors.scale, w.dtype)
    w = w / scale
    forward = reflection(x, w)

    def through(way: Route) -> tuple[Tensor, Tensor]:
        def solved(wide: bool) -> tuple[Tensor, Tensor]:
            rows = at_points(_implicit, g, forward, w, factors, way, wide=wide)[0]
            t, gu, unit = rows
            gw = -matmul(ops.transpose(gu), unit * ops.cast(forward.size, gu.dtype))
            return ops.cast(t, x.dtype), ops.cast(gw, x.dtype)

        if way.wide or dtype_of(x) == backend.wide_dtype():
            return solved(True)
        certified = factors.bracket.certified  # type: ignore[union-attr]
        return ops.cond(certified, functools.partial(solved, False), functools.partial(solved, True))

    t, gw = dispatch(factors, routes_of(w, symmetric), through)
    return t, gw / scale


def _newton(point: Point, error: Tensor) -> tuple[Tensor, tuple[()]]:
    return jacobian_solve(point, error), ()


def _implicit(point: Point, g: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[()]]:
    """t = J⁻ᵀg, the gu of f for the cotangent t, and x̂."""
    t = jacobian_solve_transposed(point, g)
    return (t, reflection_vjp(t, point.forward, point.w)[1], point.forward.unit), ()
