"""Repeated squaring of a matrix for the exponential, where the number of times is a tensor: TensorFlow, with or without XLA."""

import tensorflow as tf


def squared(e: tf.Tensor, times: tf.Tensor, most: int) -> tf.Tensor:
    """E^(2^times) for 0 ≤ times ≤ most."""
    return tf.while_loop(lambda i, _: i < times, lambda i, e: (i + 1, tf.matmul(e, e)), (0, e), maximum_iterations=most)[1]


def squared_vjp(g: tf.Tensor, e: tf.Tensor, times: tf.Tensor, most: int) -> tf.Tensor:
    """The cotangent of E: for a cotangent g of E² it is g Eᵀ + Eᵀ g."""
    # Recomputed: a SavedModel cannot hold a function whose gradient needs an array from a loop of the function.
    roots = tf.TensorArray(e.dtype, size=most, element_shape=e.shape, clear_after_read=False)
    _, _, roots = tf.while_loop(
        lambda i, *_: i < times,
        lambda i, e, roots: (i + 1, tf.matmul(e, e), roots.write(i, e)),
        (0, e, roots),
        maximum_iterations=most,
    )

    def back(i: tf.Tensor, g: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        e = roots.read(i)
        return i - 1, tf.matmul(g, e, transpose_b=True) + tf.matmul(e, g, transpose_a=True)

    return tf.while_loop(lambda i, _: i >= 0, back, (times - 1, g), maximum_iterations=most)[1]


def expm(k: tf.Tensor) -> tf.Tensor:
    """exp(K) in operations that TensorFlow differentiates any number of times."""
    return tf.linalg.expm(k)
