"""Draws docs/figures/digits.png, samples of every class of a conditional `Flow`: `python docs/figures/digits.py`.

The data are scikit-learn's digits, 8 × 8 pixels of 17 values, as 64 numbers with uniform noise. Fastest on JAX.
"""

from pathlib import Path

import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

from keras_auxref import Flow

STEPS, BATCH, SAMPLES = 800, 128, 8
keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
digits, labels = load_digits(return_X_y=True)
rows = np.concatenate([rng.permutation(len(digits))[:1792] for _ in range(-(-STEPS * BATCH // 1792))])[: STEPS * BATCH]
x = ((digits[rows] + rng.random((len(rows), 64))) / 17).astype("float32")

model = Flow(64, steps=4, classes=10, seed=0)
model.compile(keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(3e-3, STEPS), global_clipnorm=50.0))
print(model.fit(x, labels[rows], batch_size=BATCH, verbose=0).history)

drawn = np.asarray(model.sample(10 * SAMPLES, seed=1, temperature=0.7, context=np.repeat(np.arange(10), SAMPLES)))
image = np.pad(drawn.reshape(10, SAMPLES, 8, 8), ((0, 0), (0, 0), (1, 1), (1, 1)))  # white around every digit
image = image.transpose(1, 2, 0, 3).reshape(10 * SAMPLES, 100)
figure = plt.figure(figsize=(5, 5 * SAMPLES / 10))
axis = figure.add_axes((0, 0, 1, 1))
axis.imshow(np.clip(image, 0, 1), cmap="gray_r", interpolation="nearest")
axis.set_axis_off()
figure.savefig(Path(__file__).with_suffix(".png"), dpi=100)
