"""Data that an affine map cannot make normal, for couplings that can."""

import keras
import numpy as np
import tensorflow as tf


def trained_on_two_bumps(layer, rng):
    """Trains a coupling on x with x_b near ±2, whatever x_a: (x, its loss, the smallest possible one, that of an affine map)."""
    x = np.stack([rng.normal(size=512), rng.choice([-2, 2], 512) + 0.2 * rng.normal(size=512)], axis=1).astype("float32")
    layer.build((None, 2))
    optimizer = keras.optimizers.Adam(0.03)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            y, log_det = layer.forward_and_log_det(x)
            loss = tf.reduce_mean(0.5 * tf.square(y[:, 1]) + 0.5 * np.log(2 * np.pi) - log_det)
        optimizer.apply(tape.gradient(loss, [w.value for w in layer.trainable_weights]), layer.trainable_weights)
        return loss

    loss = [float(step()) for _ in range(200)][-1]
    entropy = np.log(2) + 0.5 * np.log(2 * np.pi * np.e * 0.04)  # of the mixture of two normals that the data are
    return x, loss, entropy, 0.5 * np.log(2 * np.pi * np.e * 4.04)
