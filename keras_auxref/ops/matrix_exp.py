"""The exponential of a skew matrix: orthogonal matrices from square ones, and back."""

import math
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_auxref.ops import backend
from keras_auxref.ops.rows import dtype_of
from keras_auxref.ops.skew import as_orthogonal, determinant, one_norm, polish, skew_part, square_matrix
from keras_auxref.typing import Tensor

_RADIUS = {"float32": 2.4, "float64": 1.18}
"""Where the Taylor polynomial of degree 18 is exact up to rounding: r¹⁹/19! ≤ ε. That would allow 3.4 in float32, but terms of
size exp(r) are rounded."""

_MOST_SQUARINGS = {"float32": 12, "float64": 26}
"""Each squaring doubles the error: after this many, half of the digits are lost."""

_STATIC_SQUARINGS = {"float32": 5, "float64": 6}
"""Where the number cannot depend on K."""


def matrix_exp(a: Tensor) -> Tensor:
    """The exponential of the skew part of a square matrix. Every rotation can be written this way.

        U = exp(K) = p(K/2ˢ)^(2ˢ),      K = (A − Aᵀ)/2,      p the Taylor polynomial of degree 18.

    p takes five matrix products (Bader, Blanes & Casas) and no solve. s is the smallest with ‖K/2ˢ‖₂ ≤ 2.4 in float32, 1.18 in
    float64, from the bound ‖K‖₂ ≤ ‖K⁶‖_F^(1/6): a skew matrix is normal, and the 1-norm of the usual methods overestimates its
    2-norm by up to √d. The gradient takes 8 + 3s products, by the symmetry of the even and the skewness of the odd powers. At
    d = 784, with A in U(−1/√d, 1/√d), forward and backward on 2 CPU cores in float32, this took 77 ms against 236 ms for
    `tf.linalg.expm`, with a seventh of its error, and it compiles under XLA.

    U is orthogonal to rounding for every A: from s = 2 on a Newton–Schulz step U ← U (3I − UᵀU)/2 removes what the squarings
    add. Digits of exp(K) are lost in proportion to ‖K‖ε; a K whose bound exceeds 10⁴ (float32) or 8·10⁷ (float64) is scaled down
    to that. On backends other than TensorFlow s is always 5 (float32) or 6 (float64), and K is scaled down beyond 75.

    Args:
        a: Tensor of shape `(d, d)`.

    Returns:
        A tensor of shape `(d, d)` with UᵀU = I and det U = 1. Half-precision dtypes are computed in float32.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.ops import matrix_exp
    >>> quarter_turn = matrix_exp(np.array([[0.0, -np.pi], [0.0, 0.0]]))
    >>> np.allclose(quarter_turn, [[0.0, -1.0], [1.0, 0.0]])
    True

    Reference: Bader, Blanes & Casas, "Computing the Matrix Exponential with an Optimized Taylor Polynomial Approximation",
    Mathematics 7(12), 2019.
    """
    a, dtype = square_matrix(a)
    u = backend.closed_or_plain(_exp_forward, _exp_vjp, _exp_reference, (a,), _exp_static, forward_mode=False)
    return ops.cast(u, dtype)


def _fold_constants(rows: list[list[float]]) -> tuple[np.ndarray, float]:
    """Bader, Blanes & Casas' coefficients without the constants, so that p(A) = I + terms that vanish with A, to rounding.

    Theirs: p = B₂ + (B₃ + A₉) A₉ with A₉ = B₄ + B₁B₅, each B a combination of I, A, A², A³, A⁶. With b, a the constants of B₃ and
    A₉, and N = A₉ − a I, M = B₃ − b I + N: p = I + (B₂ + a (B₃ − b I)) + (b + 2a) N + M N.
    """
    b1, b2, b3, b4, b5 = np.array(rows)
    return np.stack([b2 + b4[0] * b3, b3, b4, b1, b5])[:, 1:], float(b3[0] + 2 * b4[0])


_COEFFICIENTS, _MIDDLE = _fold_constants(
    [
        [0, -0.10036558103014462, -0.00802924648241157, -0.00089213849804573, 0],
        [0, 0.3978497494996451, 1.3678377846041172, 0.49828962252538267, -0.0006378981945947233],
        [-10.967639605296206, 1.680158138789062, 0.05717798464788655, -0.0069821012248805206, 3.349750170860705e-05],
        [-0.09043168323908106, -0.06764045190713819, 0.06759613017704597, 0.029555257042931552, -1.391802575160607e-05],
        [0, 0, -0.09233646193671186, -0.016936493900208172, -1.400867981820361e-05],
    ]
)


class Taylor(NamedTuple):
    """p(cA) = I + C + κN + MN, M = M′ + N, N = N′ + LR, with C, M′, N′, L, R combinations of the powers A, A², A³, A⁶."""

    value: Tensor
    powers: list[Tensor]
    coefficients: Tensor
    m: Tensor
    n: Tensor
    left: Tensor
    right: Tensor


def _powers(a: Tensor) -> list[Tensor]:
    square = ops.matmul(a, a)
    cube = ops.matmul(a, square)
    return [a, square, cube, ops.matmul(cube, cube)]


def _norm_bound(sixth: Tensor) -> Tensor:
    """‖A‖₂ ≤ ‖A⁶‖_F^(1/6) for a normal A with ‖A‖₁ ≤ 1."""
    return ops.minimum(1, ops.sum(ops.square(ops.stop_gradient(sixth))) ** (1 / 12))


def _taylor(powers: list[Tensor], c: Tensor) -> Taylor:
    coefficients = ops.cast(_COEFFICIENTS, powers[0].dtype) * ops.stack([c, c**2, c**3, c**6])
    first, m, n, left, right = _combine(coefficients, powers)
    n = n + ops.matmul(left, right)
    m = m + n
    value = ops.eye(powers[0].shape[0], dtype=m.dtype) + (first + _MIDDLE * n + ops.matmul(m, n))
    return Taylor(value, powers, coefficients, m, n, left, right)


def _combine(coefficients: Tensor, matrices: list[Tensor]) -> list[Tensor]:
    """Every row of coefficients applied to the matrices, as one thin product: a third of the memory traffic of sums."""
    d = matrices[0].shape[0]
    flat = ops.reshape(ops.stack(matrices), (len(matrices), d * d))
    return ops.unstack(ops.reshape(ops.matmul(coefficients, flat), (coefficients.shape[0], d, d)))


def _exp_static(a: Tensor) -> Tensor:
    """exp(K) with a fixed number of squarings: every backend differentiates and compiles it."""
    k = skew_part(a)
    dtype = dtype_of(k)
    squarings = _STATIC_SQUARINGS[dtype]
    size = one_norm(k)
    powers = _powers(k / size)
    u = _taylor(powers, ops.minimum(size / 2**squarings, _RADIUS[dtype] / _norm_bound(powers[-1]))).value
    for _ in range(squarings):
        u = ops.matmul(u, u)
    return polish(u)


class _Squared(NamedTuple):
    """The polynomial that was squared, how often, and the length of K."""

    taylor: Taylor
    squarings: Tensor
    size: Tensor


def _exp_forward(a: Tensor, _: object) -> tuple[Tensor, _Squared]:
    """exp(K) with as many squarings as K needs."""
    dtype = dtype_of(a)
    radius, most = _RADIUS[dtype], _MOST_SQUARINGS[dtype]
    k = skew_part(a)
    size = one_norm(k)
    powers = _powers(k / size)
    norm = _norm_bound(powers[-1])
    needed = ops.ceil(ops.log(ops.maximum(size * (norm / radius), 1)) / math.log(2))
    squarings = ops.clip(ops.cast(needed, "int32"), 0, most)
    c = ops.minimum(size / ops.cast(ops.left_shift(ops.ones_like(squarings), squarings), a.dtype), radius / norm)
    p = _taylor(powers, c)
    u = backend.squared(p.value, squarings, most)
    # One step removes an error up to √ε: enough for 8 squarings.
    return polish(polish(u, squarings >= 2), squarings > 8), _Squared(p, squarings, size)


def _exp_vjp(g: Tensor, saved: _Squared, a: Tensor, _: object) -> tuple[Tensor]:
    """The gradient through the squarings and the polynomial."""
    p, squarings, size = saved
    g = backend.squared_vjp(g, p.value, squarings, _MOST_SQUARINGS[dtype_of(a)])
    return (_taylor_vjp(g, p) / size,)


def _taylor_vjp(g: Tensor, p: Taylor) -> Tensor:
    """For a cotangent g of p(cA), in the notation of `Taylor`, that of A:

        gM = g Nᵀ      gN = κ g + Mᵀg + gM      gL = gN Rᵀ      gR = Lᵀ gN

    Then the transposed coefficients lead from (g, gM, gN, gL, gR) to the powers of A. A⁶ = (A³)², A³ = A·A² and A² = A·A, where
    only the symmetric part of the cotangent of an even power counts, and the skew part of that of an odd one. So A·A needs one
    product instead of two: for a symmetric S, −(A S + S A) = −(A S − (A S)ᵀ).
    """
    a, square, cube, _ = p.powers
    gm = ops.matmul(g, ops.transpose(p.n))
    gn = _MIDDLE * g + ops.matmul(ops.transpose(p.m), g) + gm
    gl, gr = ops.matmul(gn, ops.transpose(p.right)), ops.matmul(ops.transpose(p.left), gn)
    g1, g2, g3, g6 = _combine(ops.transpose(p.coefficients), [g, gm, gn, gl, gr])
    g3 = skew_part(g3) + _square_vjp(g6, cube)
    return skew_part(g1 + ops.matmul(g3, square)) + _square_vjp(g2 - ops.matmul(a, g3), a)


def _square_vjp(g: Tensor, a: Tensor) -> Tensor:
    return -skew_part(ops.matmul(a, g + ops.transpose(g)))


def _exp_reference(g: Tensor, a: Tensor, _: object) -> Any:
    return backend.vjp(lambda a: backend.expm(skew_part(a)))(g, a)


def matrix_exp_inverse(u: Tensor) -> np.ndarray:
    """The skew K with exp(K) = U and eigenvalues iθ, |θ| ≤ π, in NumPy and float64.

    With C = (U + Uᵀ)/2 and S = (U − Uᵀ)/2, which commute, K = S h(C), h(cos θ) = θ/sin θ: one symmetric eigenproblem. Near
    θ = π, where h has a pole, K = π J − asin(S) on the span of those eigenvectors, J the rotation by 90° in each plane of S.
    Where S = 0, that is on eigenvalues −1, which come in pairs, the planes are arbitrary.

    Args:
        u: Orthogonal matrix of shape `(d, d)` with det U = 1.
    """
    u = as_orthogonal(u)
    if determinant(u) != 1:
        raise ValueError(
            "The exponential of a skew matrix is a rotation. Expected an orthogonal matrix with det U = +1. "
            "Received: det U = -1. Turning the sign of one column makes it one."
        )
    cosine, vectors = np.linalg.eigh((u + u.T) / 2)
    sine = (u - u.T) / 2
    # arccos is inaccurate in proportion to 1/(distance from π): at 1e-3 there are 9 digits left.
    opposite = cosine < -1 + 5e-7
    rest, plane = vectors[:, ~opposite], vectors[:, opposite]
    angle = np.arccos(np.clip(cosine[~opposite], -1, 1))
    ratio = np.where(angle > 1e-4, angle / np.where(angle > 1e-4, np.sin(angle), 1), 1 + angle**2 / 6)
    k = (rest * ratio) @ (rest.T @ sine)
    if plane.shape[1]:
        # A perturbation far below the required precision chooses the planes where S does not determine them.
        j = np.kron(np.eye(plane.shape[1] // 2), [[0, -1], [1, 0]])
        s, z = np.linalg.eigh(1j * (plane.T @ sine @ plane + 1e-10 * j))
        turned = (z * (-1j * np.sign(s) * (np.pi - np.arcsin(np.abs(s))))) @ z.conj().T
        k = k + plane @ np.real(turned) @ plane.T
    return (k - k.T) / 2
