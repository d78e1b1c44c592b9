"""A process of a distributed training: a recurrent network, then a flow, in float64, with a checkpoint after every epoch.

    python in_a_process.py folder epochs [epoch in which process 1 dies]

Keras' environment variables say which process it is. Goes on from the checkpoints in the folder; writes `rnn.npz`, `glow.npz`.
"""

import os
import sys
from pathlib import Path

import numpy as np

from experiments.harness import checkpoints, distribution

HEARTBEAT = 300  # a busy machine is not a dead one
STALLED = 240.0


def models(keras):
    from keras_auxref import Glow, OrthogonalRNN

    rng = np.random.default_rng(0)
    rnn = keras.Sequential([keras.Input((5, 2)), OrthogonalRNN(6, dtype="float64"), keras.layers.Dense(3, dtype="float64")])
    rnn.compile(keras.optimizers.Adam(1e-2), keras.losses.MeanSquaredError(dtype="float64"))
    yield "rnn", rnn, (rng.normal(size=(16, 5, 2)), rng.normal(size=(16, 3)))
    keras.utils.set_random_seed(0)  # how much training drew before differs in a run that goes on
    flow = Glow((4, 4, 3), levels=1, steps=1, hidden=4, seed=1, dtype="float64")
    flow.compile(Glow.optimizer(1e-2, 1))
    images = rng.integers(0, 256, (16, 4, 4, 3), dtype="uint8")
    flow.initialize(images)
    yield "glow", flow, (images,)


def main(output: Path, epochs: int, dies: int | None) -> None:
    distribution.choose_backend("jax", True)
    distribution.start(0, HEARTBEAT)
    import keras

    class Die(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == dies and distribution.processes()[0] == 1:
                os._exit(3)

    checkpoints.SECONDS = 0.0
    here = distribution.folder(output)
    here.mkdir(parents=True, exist_ok=True)
    with distribution.noticing_losses():
        for name, model, data in models(keras):
            model.optimizer.build(model.trainable_variables)
            first = checkpoints.restore(model, here / name, distribution.gather)
            print(name, "from epoch", first, flush=True)
            feed = distribution.batches(data, 8, seed=1)
            feed.epoch = first
            callbacks = [Die(), checkpoints.Checkpoint(here / name, distribution.gather), distribution.watchdog(STALLED)]
            model.fit(feed, epochs=epochs, initial_epoch=first, verbose=0, callbacks=callbacks)
            np.savez(here / f"{name}.npz", *(keras.ops.convert_to_numpy(v) for v in model.trainable_variables))
    print("done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
