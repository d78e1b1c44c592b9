"""One factorisation of W that serves a whole batch: W = P Λ P⁻¹."""

import math
from typing import Any, NamedTuple

import tensorflow as tf

from keras_auxref.ops._checks import as_tensor, check_finite, require_tensorflow
from keras_auxref.ops._rows import epsilon
from keras_auxref.ops._shared import shared
from keras_auxref.ops._xla import inside_xla

SYMMETRIC, EIGEN, EIGEN_WIDE, PER_SAMPLE = range(4)
_SINGULAR = 1e15  # |c| for which I − cW is numerically −cW, for a W with max|W| = 1


class Bracket(NamedTuple):
    """Every preimage has its c in [low, high] = [2λmin(S), 2λmax(S)], S the symmetric part of W⁻¹ (scaled by max|W|).

    `certified` is True when S or −S is positive definite with condition below 2: then the root is unique.
    """

    low: tf.Tensor
    high: tf.Tensor
    certified: tf.Tensor


class Factors(NamedTuple):
    """W / scale = Σ_k weight_k Re(λ_k p_k q_kᵀ) in float64, over eigenvalues with Im λ ≥ 0.

    Complex eigenvalues of a real matrix come in conjugate pairs with conjugate contributions, so one of each pair is kept and
    counted twice, and everything after this point is real arithmetic. For symmetric W all imaginary parts are zero and
    P is orthogonal.

    Attributes:
        w: W / scale, with the identity in the place of a W that is zero or not finite.
        scale: The power of two for which max|W| / scale is about 1; NaN when W is not finite.
        route: How accurate a batch in the dtype asked for will be: `SYMMETRIC`; `EIGEN`, well-conditioned eigenvectors;
            `EIGEN_WIDE`, only when the batch is in float64; `PER_SAMPLE`, not at all, factor one matrix per vector. A Python
            integer where it is known while tracing: then the other ways do not come into the graph.
        weight: (m,), 1 for a real and 2 for a complex eigenvalue.
        eigenvalue: (2, m), real and imaginary parts of λ.
        right: (2, m, d), real and imaginary parts of the eigenvectors p_k, the columns of P.
        left: (2, m, d), real and imaginary parts of the rows q_k of P⁻¹.
        bracket: Where the inverse looks for c; None where it has not been computed yet.
    """

    w: tf.Tensor
    scale: tf.Tensor
    route: tf.Tensor | int
    weight: tf.Tensor
    eigenvalue: tf.Tensor
    right: tf.Tensor
    left: tf.Tensor
    bracket: Bracket | None = None


def factorize(w: Any, symmetric: bool | None = None) -> Factors:
    """Factors W once, in float64, for any number of later calls of `log_det_jacobian` and `inverse`.

    Pass the result as `factors=` where one W serves many batches, as in evaluation or serving. The factors are constants to
    automatic differentiation; gradients with respect to W do not need theirs. Needs TensorFlow.

    Args:
        w: Tensor of shape `(d, d)`.
        symmetric: True promises W = Wᵀ, which is faster and compiles under XLA; None looks at W.

    Returns:
        A `Factors` tuple.
    """
    require_tensorflow("factorize")
    w = as_tensor(w, "w")
    if len(w.shape) != 2 or w.shape[0] != w.shape[1]:
        raise ValueError(f"`w` must be a square matrix. Expected shape (d, d). Received: {tuple(w.shape)}")
    check_finite(w, "w")
    factors = factors_of(tf.convert_to_tensor(w), symmetric)
    if tf.executing_eagerly():
        factors = factors._replace(route=int(factors.route))
    return factors._replace(bracket=bracket_of(factors))


def factors_of(w: tf.Tensor, symmetric: bool | None) -> Factors:
    """`factorize` for a checked tensor."""
    factors = shared(_factorize, tf.stop_gradient(w), symmetric=symmetric)
    route = _static_route(w, symmetric)
    return factors if route is None else factors._replace(route=route)


def _static_route(w: tf.Tensor, symmetric: bool | None) -> int | None:
    """The route where it does not depend on the values of W."""
    # XLA has no eigendecomposition of a general matrix, and gives that of a symmetric one to six digits whatever the dtype.
    if inside_xla() and not (symmetric and w.dtype == tf.float32):
        return PER_SAMPLE
    return SYMMETRIC if symmetric or w.shape[0] == 1 else None


def _factorize(w: tf.Tensor, symmetric: bool | None) -> Factors:
    dtype, wide = w.dtype.name, tf.cast(w, tf.float64)
    largest = tf.reduce_max(tf.abs(wide))
    finite = tf.reduce_all(tf.math.is_finite(wide))
    usable = finite & (largest > 0)
    # A power of two, so that dividing by it is exact in every dtype.
    power = tf.pow(tf.constant(2.0, tf.float64), tf.floor(tf.math.log(tf.where(usable, largest, 1.0)) / math.log(2)))
    scale = tf.where(finite, power, tf.constant(float("nan"), tf.float64))
    normal = tf.where(usable, wide / power, tf.eye(w.shape[0], dtype=tf.float64))
    route = _static_route(w, symmetric)
    if route is not None:
        return _symmetric(normal, scale, route)
    asymmetry = tf.reduce_max(tf.abs(normal - tf.transpose(normal)))
    return tf.cond(
        asymmetry <= 4 * epsilon(dtype),
        lambda: _symmetric(normal, scale, SYMMETRIC, dynamic=True),
        lambda: _general(normal, scale, dtype),
    )


def _symmetric(w: tf.Tensor, scale: tf.Tensor, route: int, dynamic: bool = False) -> Factors:
    if route == SYMMETRIC:
        w = (w + tf.transpose(w)) / 2
        eigenvalue, vectors = tf.linalg.eigh(w)
    else:  # placeholders: a batch that goes sample by sample uses none of them
        eigenvalue, vectors = tf.ones(w.shape[0], w.dtype), tf.eye(w.shape[0], dtype=w.dtype)
    basis = tf.stack([tf.transpose(vectors), tf.zeros_like(vectors)])
    return Factors(
        w=w,
        scale=scale,
        route=tf.constant(route, tf.int32) if dynamic else route,
        weight=tf.ones_like(eigenvalue),
        eigenvalue=tf.stack([eigenvalue, tf.zeros_like(eigenvalue)]),
        right=basis,
        left=basis,
    )


def _general(w: tf.Tensor, scale: tf.Tensor, dtype: str) -> Factors:
    d = w.shape[0]
    eigenvalue, vectors = tf.linalg.eig(w)
    # P⁻¹ by QR, which does not raise for a defective W: the division by a zero pivot shows as a condition of infinity.
    q, r = tf.linalg.qr(vectors)
    inverse = tf.linalg.triangular_solve(r, tf.linalg.adjoint(q), lower=False)
    condition = tf.norm(tf.abs(vectors)) * tf.norm(tf.abs(inverse)) / d**0.5

    real, imaginary = tf.math.real(eigenvalue), tf.math.imag(eigenvalue)
    noise = 64 * d * epsilon("float64")
    weight = tf.where(tf.abs(imaginary) <= noise, tf.ones_like(real), 2 * tf.ones_like(real))
    kept = imaginary >= -noise

    def keep(rows: tf.Tensor) -> tf.Tensor:
        rows = tf.boolean_mask(rows, kept)
        return tf.stack([tf.math.real(rows), tf.math.imag(rows)])

    weight, eigenvalue = tf.boolean_mask(weight, kept), keep(eigenvalue)
    right, left = keep(tf.transpose(vectors)), keep(inverse)
    # The pairing and the eigenvectors are believed only if they give W back.
    scaled = tf.complex(*tf.unstack(eigenvalue * weight))[:, None] * tf.complex(*tf.unstack(left))
    error = tf.reduce_max(tf.abs(tf.math.real(tf.matmul(tf.complex(*tf.unstack(right)), scaled, transpose_a=True)) - w))
    condition = tf.maximum(condition, error / epsilon("float64"))
    narrow, usable = (30.0, 1e9) if dtype != "float64" else (1e5, 1e5)
    # Comparisons with NaN are false, so that whatever went wrong ends in the route that needs no eigenvectors.
    route = tf.where(condition <= narrow, EIGEN, tf.where(condition <= usable, EIGEN_WIDE, PER_SAMPLE))
    return Factors(w, scale, tf.cast(route, tf.int32), weight, eigenvalue, right, left)


def bracket_of(factors: Factors) -> Bracket:
    """The bracket of the inverse, computed unless the factors hold it."""
    if factors.bracket is not None:
        return factors.bracket
    if isinstance(factors.route, int):
        return _bracket(factors, symmetric=factors.route == SYMMETRIC)
    return tf.cond(factors.route == SYMMETRIC, lambda: _bracket(factors, True), lambda: _bracket(factors, False))


def _bracket(factors: Factors, symmetric: bool) -> Bracket:
    """The bracket from the eigenvalues of a symmetric W, or from W⁻¹."""
    if symmetric:
        s = 1 / factors.eigenvalue[0]
    else:
        q, r = tf.linalg.qr(factors.w)
        inverse = tf.linalg.triangular_solve(r, tf.transpose(q), lower=False)
        inverse = tf.where(
            tf.reduce_all(tf.abs(inverse) < _SINGULAR), inverse, _SINGULAR * tf.eye(factors.w.shape[0], dtype=tf.float64)
        )
        s = tf.linalg.eigvalsh((inverse + tf.transpose(inverse)) / 2)
    low, high = tf.reduce_min(s), tf.reduce_max(s)
    invertible = tf.reduce_all(tf.abs(s) < _SINGULAR)
    certified = invertible & (((low > 0) & (high < 2 * low)) | ((high < 0) & (low > 2 * high)))
    # Rounding in the eigenvalues, which XLA gives to six digits only, must not push a root out of the bracket.
    slack = (1e-5 if inside_xla() else 64 * epsilon("float64")) * tf.maximum(tf.abs(low), tf.abs(high))
    limit = tf.constant(2 * _SINGULAR, tf.float64)
    return Bracket(tf.where(invertible, 2 * low - slack, -limit), tf.where(invertible, 2 * high + slack, limit), certified)
