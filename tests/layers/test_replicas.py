"""Two replicas, on two logical CPU devices: they have to be made before TensorFlow starts, hence in a process of their own."""

import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import keras, numpy as np, tensorflow as tf
    from keras_auxref import AuxReflection, OrthogonalRNN, SVDDense

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    keras.config.set_floatx("float64")  # in float32 the stack of layers makes a difference of rounding visible within few steps
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(32, 6, 4)), generator.integers(0, 3, 32)

    def train(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            layers = [OrthogonalRNN(8), AuxReflection(), SVDDense(activation="relu"), keras.layers.Dense(3)]
            model = keras.Sequential([keras.Input((6, 4)), *layers])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False)
        # Every replica gets the whole batch; the sum of their gradients, each divided by their number, is that of one.
        losses = [float(model.train_on_batch(x, y)) for _ in range(9)]
        return losses, model.get_weights()

    expected, weights = train(tf.distribute.get_strategy())
    mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert mirrored.num_replicas_in_sync == 2
    losses, trained = train(mirrored)
    np.testing.assert_allclose(losses, expected, rtol=1e-8)
    for a, b in zip(trained, weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)
    assert expected[-1] < expected[0]
    print("same")
"""


FLOWS = """
    import tensorflow as tf
    from keras_auxref import Flow, Glow

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    for make in (lambda: Glow((8, 8, 3), steps=1, hidden=4), lambda: Flow(3, steps=1, hidden=4)):
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            try:
                make()
            except ValueError as error:
                assert "Received: one with 2 replicas. For several devices take Keras on JAX" in str(error), error
                print("refused")
        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            make()
"""


def _run(program, folder):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_two_replicas_train_as_one(tmp_path):
    assert _run(PROGRAM, tmp_path) == ["same"]


@pytest.mark.slow
def test_flows_refuse_two_replicas(tmp_path):
    assert _run(FLOWS, tmp_path) == ["refused", "refused"]
