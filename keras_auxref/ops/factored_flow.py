"""T auxiliary reflections of a vector, in factored form, with directions and eigenvalues that an encoder provides."""

from keras import ops

from keras_auxref.ops.amortised import prepare
from keras_auxref.ops.diagonal import LARGEST_CONDITION, diagonal_inverse, diagonal_reflect, diagonal_reflect_and_log_det
from keras_auxref.ops.householder import householder
from keras_auxref.typing import Tensor

_SHAPES: dict[str, tuple[str, ...]] = {"v": ("T", "d"), "eigenvalues": ("T", "d")}


def factored_flow(z: Tensor, v: Tensor, eigenvalues: Tensor) -> Tensor:
    """T factored reflections one after another, with a direction and eigenvalues for every vector of z.

        z_t = g(H(v_t) z_{t−1}),      g(a) = (cλ_t − 1) ∘ a,      c = 2 Σ λᵢaᵢ² / Σ λᵢ²aᵢ²

    With W = H(v) diag(λ) H(v) a step is −H(v) H(Wz) z: a reflection in a direction Wz that depends on z itself, unlike in a
    Householder flow. With λ = 1 it is the Householder flow. For λ > 0 with κ = max λ / min λ < 2 every step is a
    bijection that preserves norms; its log-determinant is not 0.

    Args:
        z: Tensor of shape `(..., d)`.
        v: Tensor of shape `(..., T, d)`, T ≥ 0, whose axes before the last two broadcast against those of `z` before its last.
        eigenvalues: λ > 0, of shape `(..., T, d)`. Neither λ > 0 nor κ < 2 is checked.

    Returns:
        A tensor of shape `(..., d)` and of the dtype of `z`. ‖z_T‖ = ‖z‖.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import factored_flow
    >>> print(factored_flow(np.array([3.0, 4.0]), np.array([[1.0, -1.0]]), np.ones((1, 2))).numpy())
    [4. 3.]
    """
    z, parameters, dtype = prepare(z, _SHAPES, v=v, eigenvalues=eigenvalues)
    for direction, scales in _steps(parameters):
        z = diagonal_reflect(householder(direction, z), scales)
    return ops.cast(z, dtype)


def factored_flow_and_log_det(z: Tensor, v: Tensor, eigenvalues: Tensor) -> tuple[Tensor, Tensor]:
    """`factored_flow` and log|det ∂z_T/∂z|, the sum of those of its steps: see `factored_reflect_and_log_det`.

    Args:
        z: Tensor of shape `(..., d)`.
        v: Tensor of shape `(..., T, d)`.
        eigenvalues: λ > 0, of shape `(..., T, d)`, with κ < 2.

    Returns:
        Two tensors of the dtype of `z`, of shapes `(..., d)` and `(...,)`.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import factored_flow_and_log_det
    >>> z, log_det = factored_flow_and_log_det(np.array([3.0, 4.0]), np.array([[1.0, -1.0]]), np.ones((1, 2)))
    >>> float(log_det)
    0.0
    """
    z, parameters, dtype = prepare(z, _SHAPES, v=v, eigenvalues=eigenvalues)
    log_det = ops.zeros_like(z[..., 0])
    for direction, scales in _steps(parameters):
        z, change = diagonal_reflect_and_log_det(householder(direction, z), scales)
        log_det = log_det + change
    return ops.cast(z, dtype), ops.cast(log_det, dtype)


def factored_flow_inverse(z: Tensor, v: Tensor, eigenvalues: Tensor, condition: float = LARGEST_CONDITION) -> Tensor:
    """The vector that `factored_flow` takes to z: z_{t−1} = H(v_t) g⁻¹(z_t), with a fixed number of Newton steps on a scalar.

    Args:
        z: Tensor of shape `(..., d)`.
        v: Tensor of shape `(..., T, d)`.
        eigenvalues: λ > 0, of shape `(..., T, d)`, with κ < 2.
        condition: A bound on κ, if one is known: the smaller, the fewer steps.

    Returns:
        A tensor of shape `(..., d)` and of the dtype of `z`; NaN where κ is beyond `condition`.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import factored_flow, factored_flow_inverse
    >>> z, v, eigenvalues = np.array([3.0, 4.0]), np.array([[1.0, -1.0]]), np.array([[1.0, 1.5]])
    >>> np.allclose(factored_flow_inverse(factored_flow(z, v, eigenvalues), v, eigenvalues), z)
    True
    """
    z, parameters, dtype = prepare(z, _SHAPES, v=v, eigenvalues=eigenvalues)
    for direction, scales in reversed(_steps(parameters)):
        z = householder(direction, diagonal_inverse(z, scales, condition))
    return ops.cast(z, dtype)


def _steps(parameters: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    v, eigenvalues = parameters["v"], parameters["eigenvalues"]
    return [(v[..., t, :], eigenvalues[..., t, :]) for t in range(v.shape[-2])]
