"""The Cayley transform: orthogonal matrices from square ones, and back."""

import numpy as np
from keras import ops

from keras_auxref.ops.rows import dtype_of, epsilon
from keras_auxref.ops.skew import as_orthogonal, determinant, one_norm, polish, skew_part, square_matrix
from keras_auxref.typing import Tensor


def cayley(a: Tensor) -> Tensor:
    """The Cayley transform of the skew part of a square matrix: a rotation without eigenvalue −1.

        U = (I + K/2)⁻¹ (I − K/2) = 2 (I + K/2)⁻¹ − I,      K = (A − Aᵀ)/2.

    One inverse forward, two matrix products backward. U is orthogonal to rounding for every A: where ‖K‖₁ > 64 the error of the
    inverse, about ε‖K‖, is removed by Newton–Schulz steps U ← U (3I − UᵀU)/2, and a K with ‖K‖₁ beyond 1/(8ε), 10⁶ in float32,
    is scaled down to that. Runs on every Keras backend.

    Args:
        a: Tensor of shape `(d, d)`.

    Returns:
        A tensor of shape `(d, d)` with UᵀU = I and det U = 1. Half-precision dtypes are inverted in float32.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import cayley
    >>> print(cayley(np.array([[0.0, 4.0], [0.0, 0.0]])).numpy())
    [[ 0. -1.]
     [ 1.  0.]]
    """
    a, dtype = square_matrix(a)
    k = skew_part(a)
    size = one_norm(k)
    k = k * ops.minimum(1, 1 / (8 * epsilon(dtype_of(k)) * size))
    identity = ops.eye(a.shape[0], dtype=k.dtype)
    # `inv` may raise on NaN in the middle of training: give it the identity, and bring the NaN back afterwards.
    finite = ops.isfinite(size)
    inverse = ops.inv(ops.where(finite, identity + 0.5 * k, identity))
    u = ops.where(finite, 2 * inverse - identity, float("nan"))
    return ops.cast(polish(u, size > 64, steps=2), dtype)


def cayley_inverse(u: Tensor) -> np.ndarray:
    """The skew K with cayley(K) = U, K = 2 (I − U)(I + U)⁻¹, in NumPy and float64.

    Args:
        u: Orthogonal matrix of shape `(d, d)` without eigenvalue −1, hence with det U = 1.
    """
    u = as_orthogonal(u)
    identity = np.eye(len(u))
    distance = float(np.linalg.svd(identity + u, compute_uv=False)[-1])
    if not distance > 1e-4:
        raise ValueError(
            "The Cayley transform reaches no orthogonal matrix with eigenvalue −1, and so none with determinant −1. Expected "
            f"eigenvalues at a distance above 1e-4 from −1. Received: distance {distance:.1e}, det U = {determinant(u):+d}"
        )
    k = 2 * np.linalg.solve((identity + u).T, (identity - u).T).T
    return (k - k.T) / 2
