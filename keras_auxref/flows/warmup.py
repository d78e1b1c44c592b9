"""A learning rate that starts small."""

from typing import Any

import keras

from keras_auxref._keras import PACKAGE


@keras.saving.register_keras_serializable(PACKAGE)
class Warmup(keras.optimizers.schedules.LearningRateSchedule):
    """learning_rate · min(1, (step + 1)/steps): a flow whose first gradients are far from typical diverges at the full rate.

    Args:
        learning_rate: The rate after `steps` steps.
        steps: The number of steps over which it rises linearly; 0 for none.
    """

    def __init__(self, learning_rate: float = 1e-3, steps: int = 100) -> None:
        if not learning_rate > 0:
            raise ValueError(f"`learning_rate` must be positive. Received: {learning_rate}")
        if steps < 0:
            raise ValueError(f"`steps` must not be negative. Expected steps >= 0. Received: {steps}")
        self.learning_rate, self.steps = float(learning_rate), int(steps)

    def __call__(self, step: Any) -> Any:
        step = keras.ops.cast(step, "float32")
        return self.learning_rate * keras.ops.minimum(1.0, (step + 1) / max(self.steps, 1))

    def get_config(self) -> dict[str, Any]:
        return {"learning_rate": self.learning_rate, "steps": self.steps}
