"""Training with a moving average of the weights, which validation and callbacks see during `fit`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from keras_auxref.package import PACKAGE
from keras_auxref.typing import Config, Tensor


class _Growing(keras.optimizers.Optimizer):
    """Averages a ← m a + (1 − m) w with m = min(ema_momentum, (1 + t)/(10 + t)) at step t.

    With a fixed m near 1 the average of a short training would be dominated by its start. This one forgets the first steps: it
    covers about the last tenth of all steps so far, until m has grown to `ema_momentum`.
    """

    @property
    def ema_momentum(self) -> Tensor:
        done = keras.ops.cast(self.iterations, "float32")
        return keras.ops.minimum(self._most, (1 + done) / (10 + done))

    @ema_momentum.setter
    def ema_momentum(self, value: float) -> None:
        self._most = value

    def get_config(self) -> Config:
        return {**super().get_config(), "ema_momentum": self._most}


@keras.saving.register_keras_serializable(PACKAGE)
class AveragedAdam(_Growing, keras.optimizers.Adam):
    """`keras.optimizers.Adam` with an average of weights that starts at once."""


@keras.saving.register_keras_serializable(PACKAGE)
class AveragedAdamax(_Growing, keras.optimizers.Adamax):
    """`keras.optimizers.Adamax` with an average of weights that starts at once."""


def with_averages(callbacks: Any, model: keras.Model) -> Any:
    """The callbacks of `fit`, with one before them that shows them the average."""
    first = Averaged()
    if isinstance(callbacks, keras.callbacks.CallbackList):
        first.set_model(model)
        callbacks.callbacks.insert(0, first)
        return callbacks
    given = callbacks if isinstance(callbacks, list | tuple) else [] if callbacks is None else [callbacks]
    return [first, *given]


@contextmanager
def as_trained(model: keras.Model) -> Iterator[None]:
    """Within it a model that shows the average has the weights that are trained, for a checkpoint from which training goes on.

    The average itself is among the variables of the optimizer.
    """
    averaged = getattr(model, "averaged", None)
    if averaged is None:
        yield
    else:
        with averaged.put_aside():
            yield


class Averaged(keras.callbacks.Callback):
    """Gives the model the average of its weights at every validation and at the end of every epoch, until the next one begins.

    The average itself is kept by an optimizer with `use_ema=True`, which also leaves it in the model when `fit` ends.
    `keras.callbacks.SwapEMAWeights` exchanges weights and average instead, so that a training that stops early would end with
    the weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trained: list[np.ndarray] | None = None

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        object.__setattr__(model, "averaged", self)  # without Keras, which would track it

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        shown = self._trained is not None
        self._put_back()
        try:
            yield
        finally:
            if shown:
                self._show()

    def _show(self) -> None:
        if self._trained is None:
            optimizer = self.model.optimizer
            self._trained = [keras.ops.convert_to_numpy(weight) for weight in self.model.trainable_variables]
            optimizer.finalize_variable_values(self.model.trainable_variables)

    def _put_back(self) -> None:
        for weight, value in zip(self.model.trainable_variables, self._trained or [], strict=False):
            weight.assign(value)
        self._trained = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._put_back()

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        self._show()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._show()
