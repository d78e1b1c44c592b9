# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     name: python3
#   language_info:
#     name: python
#     pygments_lexer: ipython3
# ---

# %% [markdown]
# # A flow on your own photographs
#
# A normalizing flow learns the density of images. It can draw new images, blend two of them, and tell how likely
# an image is. In this tutorial we train a small flow on patches of a photograph and then look at all three,
# including where likelihood misleads.

# %%
import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_sample_images
from sklearn.metrics import roc_auc_score

from keras_auxref import Glow

keras.utils.set_random_seed(1)
SIZE, EPOCHS = 16, 10

# %% [markdown]
# ## The data
#
# Any list of `uint8` arrays of shape (height, width, 3) will do. For a folder of your own:
#
# ```python
# from pathlib import Path
# from PIL import Image
#
# photographs = [np.asarray(Image.open(p).convert("RGB")) for p in sorted(Path("my_photos").glob("*.jpg"))]
# ```
#
# Here we take the two that come with scikit-learn: a temple and a flower. The flow sees the temple only.
# Its right quarter is kept for testing, so that no test patch overlaps a training patch.

# %%
temple, flower = load_sample_images().images
generator = np.random.default_rng(0)


def patches(photograph, count):
    small = photograph[: len(photograph) // 2 * 2, : photograph.shape[1] // 2 * 2]
    small = small.reshape(small.shape[0] // 2, 2, small.shape[1] // 2, 2, 3).mean((1, 3))  # half the size: more to see
    rows = generator.integers(0, small.shape[0] - SIZE, count)
    columns = generator.integers(0, small.shape[1] - SIZE, count)
    return np.stack([small[r : r + SIZE, c : c + SIZE] for r, c in zip(rows, columns, strict=True)]).round().astype("uint8")


border = temple.shape[1] * 3 // 4
train, test = patches(temple[:, :border], 4096), patches(temple[:, border:], 256)
print(train.shape, train.dtype)


# %%
def show(*rows):
    rows = [np.pad(np.clip(row, 0, 1), [(0, 0), (1, 1), (1, 1), (0, 0)], constant_values=1) for row in rows]
    picture = np.concatenate([np.concatenate(list(row), axis=1) for row in rows])
    plt.figure(figsize=(9, 9 * picture.shape[0] / picture.shape[1]))
    plt.imshow(picture, interpolation="nearest")
    plt.axis("off")
    plt.show()


show(train[:14] / 255, train[14:28] / 255)

# %% [markdown]
# ## Training
#
# `Glow` is a `keras.Model`. `fit` minimises bits per dimension: what an ideal code would spend on each
# number of an image. Uniform noise costs 8 bits. This flow is small and sees each patch ten times; a good one
# takes hours.

# %%
model = Glow((SIZE, SIZE, 3), levels=2, steps=4, hidden=32, seed=1)
history = model.fit(train, batch_size=64, epochs=EPOCHS, validation_data=test, verbose=0).history
for epoch in range(0, EPOCHS, 3):
    print(f"epoch {epoch + 1:2}: {history['bits_per_dim'][epoch]:.2f} bits per dimension")
print(f"test: {history['val_bits_per_dim'][-1]:.2f}")

# %% [markdown]
# The mixing of channels is a factored reflection, the default. It is invertible by construction, and the model can
# prove it. An image that is encoded and decoded comes back:

# %%
z, log_det = model.encode(test)
back = np.asarray(model.decode(z))
print("proven invertible:", all(proof.invertible for proof in model.certificates().values()))
print("largest error in any pixel:", np.abs(back - test / 255).max())

# %% [markdown]
# ## Samples
#
# A sample is a decoded random vector. A temperature below one takes shorter vectors, which gives calmer images.

# %%
show(*(model.sample(14, seed=3, temperature=t) for t in (0.5, 0.7, 1.0)))

# %% [markdown]
# The colours and the grain are those of the photograph. Windows and roofs are beyond a flow of this size.
#
# ## Interpolation
#
# Between two images there is a line in the space of z. Above, the flow walks along it; below, the pixels are mixed.

# %%
weights = np.linspace(0, 1, 14, dtype="float32")[:, None]
first, last = np.asarray(z)[:2]
pixels = weights[..., None, None]
show(model.decode((1 - weights) * first + weights * last), ((1 - pixels) * test[0] + pixels * test[1]) / 255)

# %% [markdown]
# ## Out of distribution
#
# Which images are not like the photograph? We compute bits per dimension, and call an image strange if it takes
# many. The area under the ROC curve (AUC) is the chance that a strange image takes more bits than a test patch:
# 1 is perfect, ½ is guessing.

# %%
one_colour = np.broadcast_to(test.mean((1, 2), keepdims=True).round(), test.shape).astype("uint8")
strange = {
    "noise": generator.integers(0, 256, test.shape, dtype="uint8"),
    "the flower": patches(flower, len(test)),
    "pixels shuffled": generator.permuted(test.reshape(len(test), -1, 3), axis=1).reshape(test.shape),
    "negative": 255 - test,
    "upside down": test[:, ::-1],
    "one colour": one_colour,
}
bits = {name: np.asarray(model.bits_per_dim(images)) for name, images in {"test patches": test, **strange}.items()}
auc = {name: roc_auc_score([0] * len(test) + [1] * len(test), [*bits["test patches"], *bits[name]]) for name in strange}
print(f"{'test patches':16} {np.median(bits['test patches']):6.2f} bits per dimension (median)")
for name in strange:
    print(f"{name:16} {np.median(bits[name]):6.2f}, AUC {auc[name]:.2f}")

plt.figure(figsize=(9, 3))
for name in ("test patches", "the flower", "pixels shuffled", "one colour"):
    plt.hist(np.minimum(bits[name], 14), bins=np.linspace(1, 14, 53), alpha=0.55, label=name)
plt.xlabel("bits per dimension (14 and more in the last bar)")
plt.ylabel("patches")
plt.legend()
plt.show()

# %% tags=["remove-cell"]
assert np.abs(back - test / 255).max() < 1e-4
assert history["val_bits_per_dim"][-1] < 5
assert auc["noise"] > 0.99
assert auc["the flower"] > 0.75
assert auc["pixels shuffled"] > 0.7
assert auc["one colour"] < 0.5
assert abs(auc["upside down"] - 0.5) < 0.1

# %% [markdown]
# What likelihood catches, and what it does not:
#
# * Noise is always caught, the other photograph mostly, and shuffled pixels unless the patch is plain sky.
# * Upside-down patches are not caught. A patch of this size hardly has an up and a down.
# * Patches of one colour are not caught either: they take *fewer* bits than the data. Simple images are likely under any
#   flow. Few bits mean that an image is easy to predict, not that it belongs to the data. To find such images too, call
#   every image strange that takes far more or far fewer bits than training images do.
#
# The [guide to flows](../guides/flows.md) has more on sizes, mixings and saving.
