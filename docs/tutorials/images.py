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
# # A drop-in norm-preserving layer for images
#
# `AuxReflection` goes where a `Dense` layer or a 1×1 convolution of equal size would go, and keeps the length of
# every vector. In this tutorial we put it into a classifier of handwritten digits. Then we stack thirty layers, with
# neither normalisation nor shortcuts, and see which network still learns.

# %%
import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from keras_auxref import AuxReflection, FactoredReflection

keras.utils.set_random_seed(1)
digits = load_digits()
x_train, x_test, y_train, y_test = train_test_split(
    (digits.data / 16).astype("float32"), digits.target, test_size=0.25, random_state=0
)
print(x_train.shape, x_test.shape)

figure, axes = plt.subplots(1, 10, figsize=(9, 1))
for axis, image in zip(axes, x_train, strict=False):
    axis.imshow(image.reshape(8, 8), cmap="Greys")
    axis.axis("off")
plt.show()

# %% [markdown]
# ## Instead of Dense
#
# `AuxReflection` takes no size: the output has the shape of the input. Everything else is Keras as you know it.


# %%
def network(layer, depth):
    model = keras.Sequential([keras.Input((64,))])
    for _ in range(depth):
        model.add(layer())
        model.add(keras.layers.ReLU())
    model.add(keras.layers.Dense(10))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return model


def train(model, epochs):
    data = {"validation_data": (x_test, y_test), "batch_size": 64, "epochs": epochs, "verbose": 0}
    return model.fit(x_train, y_train, **data).history["val_accuracy"]


layers = {
    "Dense": lambda: keras.layers.Dense(64),
    "Dense, He start": lambda: keras.layers.Dense(64, kernel_initializer="he_normal"),
    "AuxReflection": lambda: AuxReflection(),
}
shallow = {name: train(network(layer, depth=2), epochs=15)[-1] for name, layer in layers.items()}
for name, accuracy in shallow.items():
    print(f"{name:16} test accuracy {accuracy:.3f}")

# %% [markdown]
# With two layers all of them do well. The reflection costs nothing in accuracy.
#
# ## Thirty layers
#
# In a deep network each layer scales what the layers before it pass on. We look at the length of the
# activations, layer by layer, before training.


# %%
def lengths(model, x):
    values = [np.mean(np.linalg.norm(x, axis=-1))]
    for layer in model.layers[:-1]:
        x = layer(x)
        if isinstance(layer, keras.layers.ReLU):
            values.append(np.mean(np.linalg.norm(x, axis=-1)))
    return np.array(values)


deep = {name: network(layer, depth=30) for name, layer in layers.items()}
start = {name: lengths(model, x_test) for name, model in deep.items()}
accuracy = {name: train(model, epochs=6) for name, model in deep.items()}

figure, axes = plt.subplots(1, 2, figsize=(10, 3.6))
for name in layers:
    axes[0].semilogy(start[name], label=name)
    axes[1].plot(range(1, 7), accuracy[name], "o-", label=name)
axes[0].set(xlabel="layer", title="length of the activations, before training")
axes[1].set(xlabel="epoch", title="test accuracy", ylim=(0, 1))
axes[1].legend()
plt.show()
for name, values in accuracy.items():
    print(f"{name:16} length after 30 layers {start[name][-1]:.1e}, test accuracy {values[-1]:.3f}")

# %% tags=["remove-cell"]
assert min(shallow.values()) > 0.93
assert accuracy["AuxReflection"][-1] > 0.9 > accuracy["Dense, He start"][-1] > accuracy["Dense"][-1]

# %% [markdown]
# Keras' default start loses nearly all of the signal. He's start keeps its size on average, and still learns slowly.
# Thirty auxiliary reflections learn about as well as two do.
#
# Why? f reflects in one direction, u = Wx. With the default start that direction is random, and a vector of 64 numbers
# has only a small component along it: f(x) differs from x by about 2/√64 of its length. So the layer starts near the
# identity, as a residual network does, without a shortcut. A network of Dense layers with shortcuts or normalisation
# would learn too.
#
# ## What holds exactly
#
# The length of a vector is kept by every layer, before training and after, to rounding:

# %%
x = np.random.default_rng(0).normal(size=(1000, 64)).astype("float32")
for layer in (deep["AuxReflection"].layers[0], AuxReflection(kernel_initializer="orthogonal")):
    ratio = np.linalg.norm(layer(x), axis=-1) / np.linalg.norm(x, axis=-1)
    print(f"output length / input length: from {ratio.min():.7f} to {ratio.max():.7f}")

# %% tags=["remove-cell"]
assert np.abs(ratio - 1).max() < 1e-5

# %% [markdown]
# The first layer is trained, the second starts as a random orthogonal matrix. What does *not* hold: f is not linear, and
# after training its Jacobian is not orthogonal, so distances between two vectors do change.
#
# ## On the channels of an image
#
# Layers act on the last axis. On a tensor of shape (batch, height, width, channels) that is a 1×1 convolution. Where you
# need the inverse, take `FactoredReflection`, which has one whatever its weights are.

# %%
images = np.random.default_rng(0).normal(size=(8, 16, 16, 12)).astype("float32")
mixing = FactoredReflection()
mixed = mixing(images)
print(mixed.shape, "largest error of the inverse:", np.abs(mixing.inverse(mixed) - images).max())
print(mixing.certificate().reason)

# %% [markdown]
# [Choosing a layer](../guides/layers.md) compares all of them.
