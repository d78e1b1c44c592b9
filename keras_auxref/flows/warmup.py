"""Learning rates that start small."""

import warnings
from typing import Any

import keras

from keras_auxref.package import PACKAGE


def warm_up(learning_rate: float, steps: int, decay_steps: int | None = None) -> keras.optimizers.schedules.CosineDecay:
    """A rate that rises linearly over `steps` steps, and then stays or, over `decay_steps` more, falls to zero along a cosine.

    A flow whose first gradients are far from typical diverges at the full rate.
    """
    if not learning_rate > 0:
        raise ValueError(f"`learning_rate` must be positive. Received: {learning_rate}")
    if steps < 0:
        raise ValueError(f"`warmup_steps` must not be negative. Expected 0, 1, 2, … Received: {steps}")
    if decay_steps is not None and decay_steps < 1:
        raise ValueError(f"`decay_steps` must be None or positive. Expected None, 1, 2, 3, … Received: {decay_steps}")
    rising = {"warmup_target": learning_rate, "warmup_steps": steps} if steps else {}
    # From the rate of the first step on, because a rate of zero would waste it. With alpha = 1 the cosine is flat.
    start, alpha = learning_rate / max(steps, 1), 0.0 if decay_steps else 1.0
    return keras.optimizers.schedules.CosineDecay(start, decay_steps or 1, alpha=alpha, **rising)


@keras.saving.register_keras_serializable(PACKAGE)
class Warmup(keras.optimizers.schedules.LearningRateSchedule):
    """Deprecated: `Glow.optimizer(learning_rate, warmup_steps)`, or Keras' `CosineDecay`, which has a warm-up.

    It makes a `keras.optimizers.schedules.CosineDecay` of them. Files of version 0.2 have this name.

    Example:
    >>> import warnings
    >>> from keras_auxref.flows import Warmup
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     rate = Warmup(0.1, steps=10)
    >>> [round(float(rate(step)), 3) for step in (0, 10, 100)]
    [0.01, 0.1, 0.1]
    """

    def __new__(cls, learning_rate: float = 1e-3, steps: int = 100) -> Any:
        message = "`Warmup` is deprecated: take `Glow.optimizer(learning_rate, warmup_steps)` or Keras' `CosineDecay`."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return warm_up(learning_rate, steps)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return warm_up(**config)
