"""Small flows that are not at their start, where many of their parts are the identity."""

import numpy as np


def disturb(model, seed=0, size=0.05):
    """Moves every trainable weight."""
    generator = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        variable.assign_add(size * generator.normal(size=variable.shape).astype(variable.dtype))
    return model


def images(count, shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype="uint8")
