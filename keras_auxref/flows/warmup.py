"""Learning rates that start small, and may end at zero."""

import warnings
from typing import Any

import keras

from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class HeldCosineDecay(keras.optimizers.schedules.CosineDecay):
    """A cosine decay that begins `hold_steps` later: so long the rate stays where the warm-up ends.

    rate(t) = CosineDecay(min(t, warmup_steps) + max(t − warmup_steps − hold_steps, 0))
    """

    def __init__(self, *args: Any, hold_steps: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hold_steps = hold_steps

    def __call__(self, step: Tensor) -> Tensor:
        done = keras.ops.cast(step, "float32")
        warm, held = float(self.warmup_steps), float(self.hold_steps)
        return super().__call__(keras.ops.minimum(done, warm) + keras.ops.maximum(done - warm - held, 0.0))

    def get_config(self) -> Config:
        return {**super().get_config(), "hold_steps": self.hold_steps}


def warm_up(
    learning_rate: float, steps: int, decay_steps: int | None = None, hold_steps: int = 0
) -> keras.optimizers.schedules.CosineDecay:
    """A rate that rises linearly over `steps` steps, and then stays or falls to zero along a cosine over `decay_steps` more.

    With `hold_steps` it stays for so many steps before it falls. Without a warm-up, a flow whose first gradients are far from
    typical diverges.
    """
    if not learning_rate > 0:
        raise ValueError(f"`learning_rate` must be positive. Received: {learning_rate}")
    if steps < 0:
        raise ValueError(f"`warmup_steps` must not be negative. Expected 0, 1, 2, … Received: {steps}")
    if decay_steps is not None and decay_steps < 1:
        raise ValueError(f"`decay_steps` must be None or positive. Expected None, 1, 2, 3, … Received: {decay_steps}")
    if hold_steps < 0 or (hold_steps and not decay_steps):
        raise ValueError(
            "`hold_steps` are the steps between warm-up and decay. Expected 0, 1, 2, … and, unless 0, `decay_steps`. "
            f"Received: hold_steps={hold_steps}, decay_steps={decay_steps}"
        )
    rising = {"warmup_target": learning_rate, "warmup_steps": steps} if steps else {}
    # From the rate of the first step on, because a rate of zero would waste it. With alpha = 1 the cosine is flat.
    start, alpha = learning_rate / max(steps, 1), 0.0 if decay_steps else 1.0
    if hold_steps:
        return HeldCosineDecay(start, decay_steps, alpha=alpha, **({"warmup_steps": 0} | rising), hold_steps=hold_steps)
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
