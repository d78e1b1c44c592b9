"""Two replicas, on two logical CPU devices: they have to be made before TensorFlow starts, hence in a process of their own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

PROGRAM = """
    import keras, numpy as np, tensorflow as tf
    from common.distribution import Mirrored
    from keras_auxref import AuxReflection, OrthogonalRNN, SVDDense

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    keras.config.set_floatx("float64")  # in float32 the stack of layers makes a difference of rounding visible within nine steps
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(96, 6, 4)), generator.integers(0, 3, 96)

    def train(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            layers = [OrthogonalRNN(8), AuxReflection(), SVDDense(activation="relu"), keras.layers.Dense(3)]
            model = keras.Sequential([keras.Input((6, 4)), *layers])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"], jit_compile=False)
        history = model.fit(x, y, batch_size=32, epochs=3, shuffle=False, verbose=0, validation_data=(x, y)).history
        return history, model.get_weights()

    expected, weights = train(tf.distribute.get_strategy())
    mirrored = Mirrored(["CPU:0", "CPU:1"])
    assert mirrored.num_replicas_in_sync == 2
    history, trained = train(mirrored)
    assert history.keys() == expected.keys()
    for name in ("loss", "val_loss", "val_accuracy"):
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-8, err_msg=name)
    for a, b in zip(trained, weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)
    print("same")
"""


@pytest.mark.slow
def test_two_replicas_train_as_one(tmp_path):
    program = textwrap.dedent(PROGRAM)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(EXAMPLES)}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["same"]
