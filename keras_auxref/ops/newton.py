"""The paper's inverse: Newton's method on all d unknowns (appendix, "Inverse using Newtons Method")."""

from typing import Any

from keras import ops

from keras_auxref.ops.checks import as_tensor, check_vectors_and_matrix, whole_number
from keras_auxref.ops.jacobian import jacobian
from keras_auxref.ops.reflect import reflection
from keras_auxref.ops.rows import size_of


def newton_inverse(y: Any, w: Any, steps: int = 10) -> Any:
    """Solves f(x) = y by `steps` steps x ← x − J(x)⁻¹ (f(x) − y) from x = y, with one d×d solve per vector and step.

    This is the reference that `inverse` is tested and measured against: it costs O(n d³ steps), has no safeguard and
    converges only from a start that is close enough. Prefer `inverse`. Runs on every Keras backend.

    Args:
        y: Tensor of shape `(..., d)`.
        w: Tensor of shape `(d, d)`.
        steps: Number of Newton steps.

    Returns:
        A tensor of the shape and dtype of `y`.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import newton_inverse, reflect
    >>> x, w = np.array([3.0, 4.0]), np.array([[1.0, 0.1], [-0.1, 1.2]])
    >>> np.allclose(newton_inverse(reflect(x, w), w, steps=20), x)
    True
    """
    y, w = as_tensor(y, "y"), as_tensor(w, "w")
    check_vectors_and_matrix(y, w, "y")
    steps = whole_number("steps", steps)
    size = size_of(y)
    target = y / size
    x = target
    for _ in range(steps):
        residual = reflection(x, w).y - target
        x = x - ops.solve(jacobian(x, w), residual[..., None])[..., 0]
    return x * size
