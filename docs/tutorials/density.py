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
# # A TFP chain: a density in the plane, and a posterior
#
# Every invertible layer of this package lends its weights to a bijector of TensorFlow Probability.
# In this tutorial we chain such bijectors, fit the chain to points in the plane and draw its density.
# Then the same kind of chain becomes the posterior of a Bayesian model, which we check against the exact one.

# %%
import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from sklearn.datasets import load_iris, make_moons

from keras_auxref import FactoredReflection, bijectors

tfb, tfd = tfp.bijectors, tfp.distributions
keras.utils.set_random_seed(1)

# %% [markdown]
# ## The chain
#
# A block has two parts. A coupling shifts and scales one coordinate, with a network that sees the other. A factored
# reflection then mixes the two, where one usually puts a fixed permutation. It is learned, and invertible
# whatever its weights become. A shift and a scale end the chain.


# %%
def chain(blocks, hidden=32):
    parts = [bijectors.ActNorm(tf.Variable(tf.zeros(2)), tf.Variable(tf.zeros(2)))]
    for _ in range(blocks):
        layer = FactoredReflection()
        layer.build((None, 2))
        network = keras.Sequential(
            [
                keras.Input((1,)),
                keras.layers.Dense(hidden, "silu"),
                keras.layers.Dense(hidden, "silu"),
                keras.layers.Dense(2, kernel_initializer="zeros"),
            ]
        )
        parts += [layer.bijector(), bijectors.AffineCoupling(network)]
    return tfb.Chain(parts)


def distribution(bijector):
    base = tfd.MultivariateNormalDiag(tf.zeros(2), tf.ones(2))
    return tfd.TransformedDistribution(base, bijector)


flow = distribution(chain(blocks=8))
print(f"{len(flow.trainable_variables)} variables, one point: {flow.sample(seed=1).numpy()}")

# %% [markdown]
# ## A density
#
# The points are two half circles. Training is a loop of a few lines: the loss is the mean of −log p.

# %%
points = make_moons(4096, noise=0.06, random_state=0)[0].astype("float32")
points = (points - points.mean(0)) / points.std(0)


def train(loss, variables, steps, learning_rate=3e-3):
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(learning_rate, steps))
    optimizer.build(variables)

    @tf.function
    def step(seed):
        with tf.GradientTape() as tape:
            value = loss(seed)
        gradients = tape.gradient(value, variables)
        optimizer.apply(gradients, variables)
        return value

    return np.array([step(tf.constant([0, i])) for i in range(steps)])


def negative_log_likelihood(seed):
    rows = tf.random.stateless_uniform([512], seed, 0, len(points), tf.int32)
    return -tf.reduce_mean(flow.log_prob(tf.gather(points, rows)))


losses = train(negative_log_likelihood, flow.trainable_variables, steps=1500, learning_rate=5e-3)
gaussian = tfd.MultivariateNormalTriL(points.mean(0), np.linalg.cholesky(np.cov(points.T)).astype("float32"))
print(
    f"−log p of a point: {losses[-50:].mean():.2f} with the flow, {-gaussian.log_prob(points).numpy().mean():.2f} with a Gaussian"
)

# %% [markdown]
# A density is more than a picture of points: it has a value everywhere, and its integral is one. We draw it on
# a grid, and add the grid up.

# %%
side = np.linspace(-3, 3, 301, dtype="float32")
grid = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
density = np.exp(flow.log_prob(grid).numpy()).reshape(301, 301)
samples = flow.sample(2000, seed=2).numpy()

figure, axes = plt.subplots(1, 3, figsize=(11, 3.8), sharex=True, sharey=True)
axes[0].plot(*points[:2000].T, ".", markersize=2)
axes[0].set_title("data")
axes[1].imshow(density, extent=(-3, 3, -3, 3), origin="lower", cmap="magma", vmax=np.quantile(density, 0.995))
axes[1].set_title("density of the flow")
axes[2].plot(*samples.T, ".", markersize=2)
axes[2].set_title("samples of the flow")
for axis in axes:
    axis.set(xlim=(-2.6, 2.6), ylim=(-2.6, 2.6), aspect="equal")
plt.show()
integral = density.sum() * (side[1] - side[0]) ** 2
print(f"integral over the square: {integral:.3f}")

# %% tags=["remove-cell"]
assert 0.97 < integral < 1.02
assert losses[-50:].mean() < -gaussian.log_prob(points).numpy().mean() - 0.5

# %% [markdown]
# ## A posterior
#
# Now the same kind of chain as a posterior. How well does the width of a petal tell two kinds of iris apart? In a
# logistic regression with an intercept a and a slope b the answer is a distribution over (a, b). With twelve
# flowers it is wide and skewed.

# %%
iris = load_iris()
two_kinds = iris.target > 0
chosen = np.random.default_rng(3).choice(np.flatnonzero(two_kinds), 12, replace=False)
width, kind = iris.data[chosen, 3].astype("float32") - 1.7, (iris.target[chosen] == 2).astype("float32")


def log_joint(parameters):
    prior = tfd.MultivariateNormalDiag(tf.zeros(2), tf.constant([3.0, 10.0])).log_prob(parameters)
    logits = parameters[..., :1] + parameters[..., 1:] * width
    return prior + tf.reduce_sum(tfd.Bernoulli(logits=logits).log_prob(kind), axis=-1)


# %% [markdown]
# Variational inference maximises a bound on log p(data), the ELBO: the mean of log p(data, a, b) − log q(a, b)
# over samples of q. We do it twice: with independent Gaussians, the usual first choice, and with the chain.


# %%
def fit(q, steps):
    def negative_elbo(seed):
        parameters, log_q = q.experimental_sample_and_log_prob(256, seed=seed)
        return tf.reduce_mean(log_q - log_joint(parameters))

    train(negative_elbo, q.trainable_variables, steps, learning_rate=1e-2)
    parameters, log_q = q.experimental_sample_and_log_prob(20000, seed=[1, 1])
    return float(tf.reduce_mean(log_joint(parameters) - log_q))


independent = distribution(bijectors.ActNorm(tf.Variable(tf.zeros(2)), tf.Variable(tf.zeros(2))))
posterior = distribution(chain(blocks=4))
elbo = {"independent Gaussians": fit(independent, 600), "flow": fit(posterior, 600)}

# %% [markdown]
# In two dimensions the exact answer can be computed by brute force: log p(data) is the integral of the joint density.

# %%
a, b = np.linspace(-10, 10, 401, dtype="float32"), np.linspace(-15, 45, 401, dtype="float32")
grid = np.stack(np.meshgrid(a, b), -1)
joint = log_joint(grid.reshape(-1, 2)).numpy().astype("float64").reshape(401, 401)
evidence = np.log(np.exp(joint).sum() * (a[1] - a[0]) * (b[1] - b[0]))
for name, value in elbo.items():
    print(f"{name:22} ELBO {value:.3f}, below log p(data) = {evidence:.3f} by {evidence - value:.3f}")

exact = np.exp(joint - evidence)
figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharex=True, sharey=True)
for axis, (name, q) in zip(axes, {"independent Gaussians": independent, "flow": posterior}.items(), strict=True):
    density = np.exp(q.log_prob(grid.reshape(-1, 2)).numpy()).reshape(401, 401)
    levels = exact.max() * np.array([0.02, 0.1, 0.3, 0.7])
    axis.contourf(a, b, exact, levels=[*levels, exact.max()], cmap="Greys", alpha=0.6)
    axis.contour(a, b, density, levels=levels, colors="C3")
    axis.set(title=f"{name} (red), exact (grey)", xlabel="intercept a", xlim=(-5, 5), ylim=(-8, 32))
axes[0].set_ylabel("slope b")
plt.show()

# %% tags=["remove-cell"]
gap = {name: evidence - value for name, value in elbo.items()}
assert -0.01 < gap["flow"] < 0.25 * gap["independent Gaussians"]

# %% [markdown]
# The gap of the ELBO is the Kullback–Leibler divergence of q from the posterior. A Gaussian is symmetric and this
# posterior is not, so it puts mass where there should be none. The flow follows the skew and the tail.
#
# More on bijectors, batches of parameters and TFP's cache is in the [guide](../guides/tfp.md).
