"""The inverse of the auxiliary reflection: one scalar equation per vector.

The theorem is "The inverse is a scalar equation" in docs/mathematics.md; the paper solves for all d unknowns (`newton.py`).

From the outside in:

* `inverse.py`: the functions to call.
* `implicit.py`: the gradient, by the implicit function theorem.
* `search.py`: x for a batch, by up to three searches, each for the rows that the previous one did not solve.
* `search_basis.py`, `search_rows.py`: a search in a basis of W, which factors W once, and one without a basis.
* `equation.py`: what is searched for, and how good an answer is.
* `secular.py`: Newton's method on the scalar equation itself. `resolvent.py` evaluates it.
"""

from typing import Any, NamedTuple

from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.checks import prepare
from keras_auxref.ops.equation import residual_in_wide
from keras_auxref.ops.factors import Factors, factors_of, routes_of
from keras_auxref.ops.implicit import differentiable_inverse
from keras_auxref.ops.rows import map_rows
from keras_auxref.ops.search import search
from keras_auxref.typing import Tensor


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
    return ops.cast(map_rows(lambda rows: differentiable_inverse(rows, w, constants, possible, max_steps), y), dtype)


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
    y, w, dtype = prepare(y, w, "y")
    y, w = ops.stop_gradient(y), ops.stop_gradient(w)
    constants, possible = _prepared(w, symmetric, factors, near)

    def run(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, steps = backend.shared(search, rows, w, constants, rows=1, possible=possible, max_steps=max_steps)
        return x, steps, backend.shared(residual_in_wide, x, rows, w, constants[0].scale, rows=2)

    x, steps, residual = map_rows(run, y)
    return Inverse(ops.cast(x, dtype), steps, residual, constants[0].bracket.certified)


def _prepared(w: Tensor, symmetric: bool | None, factors: Factors | None, near: Any) -> tuple[Any, tuple[int, ...]]:
    """(factors, near), and which routes W may take."""
    if factors is None or factors.bracket is None:
        factors = factors_of(w, symmetric, bracket=True)
    near = None if near is None else ops.stop_gradient(ops.cast(near, backend.wide_dtype()))
    return (factors, near), routes_of(factors, w, symmetric)
