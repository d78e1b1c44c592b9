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
# # Inference from a simulator
#
# A simulator turns parameters θ into data x. Even if its likelihood is impossible to write down, we can draw
# pairs (θ, x) from it. A conditional flow fitted to such pairs *is* the posterior p(θ | x), for every x at
# once. Here we do that for a simulator whose posterior is two thin moons, compare it with the exact one, and check
# whether its uncertainty can be trusted.

# %%
import keras
import matplotlib.pyplot as plt
import numpy as np

from keras_auxref import Flow

keras.utils.set_random_seed(1)
rng = np.random.default_rng(1)

# %% [markdown]
# ## The simulator
#
# θ is uniform on a square. x is a point on a thin arc, shifted by a function of θ that contains |θ₁ + θ₂|: two θ
# explain every x, and the posterior has two modes.


# %%
def prior(n):
    return rng.uniform(-1, 1, (n, 2)).astype("float32")


def simulate(theta):
    angle, radius = rng.uniform(-np.pi / 2, np.pi / 2, len(theta)), 0.1 + 0.01 * rng.normal(size=len(theta))
    arc = np.stack([radius * np.cos(angle) + 0.25, radius * np.sin(angle)], axis=1)
    shift = np.stack([-np.abs(theta.sum(axis=1)), theta[:, 1] - theta[:, 0]], axis=1) / np.sqrt(2)
    return (arc + shift).astype("float32")


theta = prior(20_000)
x = simulate(theta)

# %% [markdown]
# ## The posterior is a conditional flow
#
# The flow is a density of θ, with x as its context. The context is used without scaling; x is already of order one.

# %%
posterior = Flow(2, steps=6, hidden=64, context=2, seed=1)
rate = keras.optimizers.schedules.CosineDecay(2e-3, 40 * 79)
posterior.compile(keras.optimizers.Adam(rate, global_clipnorm=50.0))
history = posterior.fit(theta, x, batch_size=256, epochs=40, verbose=0).history
print(f"−log p(θ | x): {history['nats'][0]:.2f} nats after one epoch, {history['nats'][-1]:.2f} after the last")

# %% [markdown]
# ## Against the exact posterior
#
# This simulator is simple enough to write down its likelihood: the arc has a known density in polar coordinates.
# For one observation we plot samples of the flow over the exact posterior.


# %%
def exact(theta, observed):
    """p(θ | observed), up to a factor, for rows of θ."""
    shift = np.stack([-np.abs(theta.sum(axis=1)), theta[:, 1] - theta[:, 0]], axis=1) / np.sqrt(2)
    u, v = (observed - shift - [0.25, 0.0]).T
    radius = np.hypot(u, v)
    # The area element of polar coordinates divides by the radius; only the right half of the circle is possible.
    return np.where(u > 0, np.exp(-0.5 * ((radius - 0.1) / 0.01) ** 2) / radius, 0)


observed = np.zeros(2, "float32")
samples = np.asarray(posterior.sample(4000, seed=1, context=observed))
line = np.linspace(-1, 1, 801)
grid = np.stack(np.meshgrid(line, line), axis=-1)
truth = exact(grid.reshape(-1, 2), observed).reshape(801, 801)
figure, axes = plt.subplots(1, 2, figsize=(9, 4.2))
for axis, (low, high) in zip(axes, [(-1, 1), (0, 0.4)], strict=True):
    axis.contourf(line, line, truth, levels=truth.max() * np.array([0.02, 0.2, 0.5, 1]), cmap="Greys")
    axis.scatter(*samples.T, s=2, color="C3", alpha=0.3)
    axis.set(xlim=(low, high), ylim=(low, high), xlabel="θ₁", ylabel="θ₂", aspect="equal")
axes[0].set_title("samples (red), exact (grey)")
axes[1].set_title("one of the moons")
plt.tight_layout()
plt.show()

# %% [markdown]
# Both moons are there, with equal weight, as symmetry demands: θ and its mirror image explain x equally well.

# %%
share = float(np.mean(samples.sum(axis=1) > 0))
print(f"share of samples in the upper moon: {share:.2f}")

# %% tags=["remove-cell"]
assert 0.35 < share < 0.65
near = exact(samples, observed) > 0.02 * truth.max()
assert near.mean() > 0.5, near.mean()

# %% [markdown]
# ## Is it calibrated?
#
# For a new pair (θ, x), count how many of 99 samples of the posterior at x lie below the true θ₁. If the posterior is right, this
# rank is uniform on 0 … 99, on average over the prior: *simulation-based calibration*. A posterior that is too narrow has
# too many ranks at both ends, one that is too wide has too many in the middle.

# %%
tests, draws = 400, 99
true = prior(tests)
context = np.repeat(simulate(true), draws, axis=0)
drawn = np.asarray(posterior.sample(tests * draws, seed=2, context=context)).reshape(tests, draws, 2)
ranks = (drawn < true[:, None]).sum(axis=1)

figure, axes = plt.subplots(1, 2, figsize=(9, 3), sharey=True)
for i, axis in enumerate(axes):
    axis.hist(ranks[:, i], bins=10, range=(0, 100), color="C0")
    axis.axhspan(tests / 10 - 2 * 6, tests / 10 + 2 * 6, color="grey", alpha=0.3)
    axis.set(xlabel=f"rank of the true θ{'₁₂'[i]}")
axes[0].set_ylabel("pairs")
plt.tight_layout()
plt.show()

# %% [markdown]
# For a uniform distribution, nineteen of twenty bars end in the grey band.

# %% tags=["remove-cell"]
counts = np.stack([np.histogram(ranks[:, i], bins=10, range=(0, 100))[0] for i in range(2)])
chi_square = ((counts - tests / 10) ** 2 / (tests / 10)).sum(axis=1)
assert (chi_square < 40).all(), chi_square

# %% [markdown]
# More on conditions is in the [guide](../guides/conditions.md). `posterior.distribution(context=observed)` is the same
# posterior as a TensorFlow Probability distribution, and `export_saved_model` exports it for serving.
