"""log|det J| of the auxiliary reflection (paper, Lemma 4), from one factorisation of W per batch."""

from typing import Any, NamedTuple

import tensorflow as tf

from keras_auxref.ops._checks import prepare
from keras_auxref.ops._gradients import with_reference_gradient
from keras_auxref.ops._rows import map_rows
from keras_auxref.ops._shared import shared
from keras_auxref.ops.factors import Factors, factors_of
from keras_auxref.ops.householder import largest
from keras_auxref.ops.reflect import annihilated
from keras_auxref.ops.resolvent import PerSampleResolvent, Resolvent, resolvent_of, row_dot


def log_det_jacobian(x: Any, w: Any, *, symmetric: bool | None = None, factors: Factors | None = None) -> tf.Tensor:
    """log|det J(x)| of f(x) = H(Wx) x for every vector on the last axis of x.

        log|det J| = log|det A| + log|κ|,      A = I − c W,      κ = 1 + 2 vᵀA⁻¹u / ‖u‖²,

    with u = W x, v = Wᵀx, c = 2 uᵀx/‖u‖² (Lemma 4). A depends on x through the scalar c alone, so W is factored once, in
    float64, and n vectors cost O(n d² + d³) and not O(n d³). The gradients for x and W are in closed form: nothing is
    differentiated through an eigendecomposition, and repeated eigenvalues are ordinary inputs. A W whose eigenvectors are too
    ill-conditioned for the dtype is served by one QR factorisation per vector. Second derivatives are right, and cost one QR
    factorisation per vector. Needs TensorFlow.

    Under XLA, which has no eigendecomposition of a general matrix, pass `symmetric=True` if W is symmetric; any other W is
    served by one QR factorisation per vector.

    Args:
        x: Tensor of shape `(..., d)`.
        w: Tensor of shape `(d, d)`.
        symmetric: True promises W = Wᵀ; None looks at W.
        factors: The result of `factorize(w)`, where the same W serves many batches.

    Returns:
        A tensor of shape `(...,)`: −∞ where J is singular, 0 where W x = 0 (there f(x) = x).
    """
    x, w, dtype = prepare(x, w, "x", "log_det_jacobian")
    if factors is None:
        factors = factors_of(w, symmetric)
    return tf.cast(map_rows(lambda rows: _log_det(rows, w, factors), x), dtype)


class _Batch(NamedTuple):
    """x and W scaled to 1 and what both passes compute from them; `live` is False where W x = 0."""

    x: tf.Tensor
    u: tf.Tensor
    live: tf.Tensor
    n2: tf.Tensor
    c: tf.Tensor


def _batch(x: tf.Tensor, w: tf.Tensor, live: tf.Tensor) -> _Batch:
    u = tf.matmul(x, w, transpose_b=True)
    n2 = tf.where(live, row_dot(u, u), 1)
    c = tf.where(live, 2 * row_dot(u, x) / n2, 0)
    return _Batch(x, u, live, n2, c)


def _value(batch: _Batch, w: tf.Tensor, resolvent: Resolvent) -> tf.Tensor:
    p = resolvent.solve(batch.c, batch.u)
    q = row_dot(tf.matmul(batch.x, w), p)
    value = resolvent.log_abs_det(batch.c) + tf.math.log(tf.abs(1 + 2 * q / batch.n2))
    return tf.where(batch.live, value, 0)[..., 0]


def _vjp(g: tf.Tensor, batch: _Batch, w: tf.Tensor, resolvent: Resolvent) -> tuple[tf.Tensor, tf.Tensor]:
    """Gradients for x and W. With p = A⁻¹u, t = A⁻ᵀv, q = vᵀp, κ = 1 + 2q/n2 and a cotangent g of log|det J|:

    gq = 2g/(κ n2)          gc = −g tr(A⁻¹W) + gq tᵀWp
    gs = 2gc/n2             gn = −(q gq + c gc)/n2
    gx = W(gq p + gs x) + Wᵀ(gq t + gs x + 2gn u)
    gW = Σ [ (x + c t)(gq p)ᵀ + (gq t + gs x + 2gn u)xᵀ − g c A⁻ᵀ ]
    """
    x, u, live, n2, c = batch
    g = tf.where(live, g[..., None], 0)
    v = tf.matmul(x, w)
    p, t = resolvent.solve(c, u), resolvent.solve_transposed(c, v)
    wp = tf.matmul(p, w, transpose_b=True)
    q = row_dot(v, p)
    kappa = tf.where(live, 1 + 2 * q / n2, 1)
    gq = 2 * g / (kappa * n2)
    gc = -g * resolvent.trace(c) + gq * row_dot(t, wp)
    gs, gn = 2 * gc / n2, -(q * gq + c * gc) / n2
    down = gq * t + gs * x + 2 * gn * u
    gx = gq * wp + gs * u + tf.matmul(down, w)
    gw = tf.matmul(x + c * t, gq * p, transpose_a=True) + tf.matmul(down, x, transpose_a=True) + resolvent.pull_back(c, g)
    return gx, gw


def _route(function: Any, factors: Factors, live: tf.Tensor, *tensors: tf.Tensor) -> Any:
    """function(batch, W, resolvent, …) with the resolvent for this W, in the dtype that its accuracy asks for."""
    dtype = tensors[0].dtype

    def branch(index: int) -> Any:
        resolvent, wide = resolvent_of(factors, index, dtype)
        x, w, *rest = (tf.cast(t, wide) for t in tensors)
        outputs = function(_batch(x, w, live), w, resolvent, *rest)
        return tf.nest.map_structure(lambda t: tf.cast(t, dtype), outputs)

    if isinstance(factors.route, int):
        return branch(factors.route)
    return tf.switch_case(factors.route, [lambda i=i: branch(i) for i in range(4)])


def _routed_value(factors: Factors, live: tf.Tensor, x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    return _route(_value, factors, live, x, w)


def _routed_vjp(factors: Factors, live: tf.Tensor, x: tf.Tensor, w: tf.Tensor, g: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return _route(lambda batch, w, resolvent, g: _vjp(g, batch, w, resolvent), factors, live, x, w, g)


def _log_det(x: tf.Tensor, w: tf.Tensor, factors: Factors) -> tf.Tensor:
    """The custom gradient around everything: one flat `switch_case` forward and one backward, nothing nested."""
    dtype = x.dtype
    size = tf.stop_gradient(largest(x))
    size = tf.where(size > 0, size, 1)
    scale = tf.cast(factors.scale, dtype)
    live = ~annihilated(x / size, w / scale)  # to the precision of the input, also where the batch is in float64

    def fast(g: tf.Tensor, x: tf.Tensor, w: tf.Tensor) -> Any:
        return shared(_routed_vjp, factors, live, x, w, g)

    def reference(g: tf.Tensor, x: tf.Tensor, w: tf.Tensor) -> Any:
        return _vjp(g, _batch(x, w, live), w, PerSampleResolvent(w))

    @tf.custom_gradient
    def value(x: tf.Tensor, w: tf.Tensor) -> Any:
        return shared(_routed_value, factors, live, x, w), lambda g: with_reference_gradient(fast, reference)(g, x, w)

    # J ignores the lengths of x and W, so that treating both as constants is exact.
    return value(x / size, w / scale)
