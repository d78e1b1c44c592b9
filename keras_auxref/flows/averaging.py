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
    first = _of(model) or Averaged()
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
    averaged = _of(model)
    if averaged is None or not averaged.put_back():
        yield
        return
    try:
        yield
    finally:
        averaged.show()


def after_fit(model: keras.Model) -> None:
    """The average that Keras leaves in the model gets memory of its own."""
    averaged = _of(model)
    if averaged is not None:
        averaged.separate()


def train_on(model: keras.Model) -> None:
    """Gives a model that shows the average the weights that were trained, before it is trained further."""
    averaged = _of(model)
    if averaged is not None:
        averaged.put_back()


def forget(model: keras.Model) -> None:
    """Before another optimizer: the weights of the model are what it trains."""
    model.__dict__.pop("averaged", None)


def _of(model: keras.Model) -> "Averaged | None":
    return model.__dict__.get("averaged")


class Averaged(keras.callbacks.Callback):
    """Gives the model the average of its weights at every validation and at the end of every epoch, until training goes on.

    The average itself is kept by an optimizer with `use_ema=True`, which also leaves it in the model when `fit` ends.
    `keras.callbacks.SwapEMAWeights` exchanges weights and average instead, so that a training that stops early would end with
    the weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trained: list[np.ndarray] | None = None
        self._shown: list[np.ndarray] = []

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        object.__setattr__(model, "averaged", self)  # without Keras, which would track it

    def show(self) -> None:
        """The average instead of the weights."""
        if self._trained is None:
            self._trained = self._values()
            self.model.optimizer.finalize_variable_values(self.model.trainable_variables)
            self._shown = self._values()
            self.separate()

    def separate(self) -> None:
        """Gives weights and averages memory of their own. On JAX they share it otherwise, and a step overwrites the weights."""
        for weight in self.model.trainable_variables:
            weight.assign(keras.ops.copy(weight))

    def put_back(self) -> bool:
        """The weights instead of the average, unless others were loaded meanwhile; returns whether there were any."""
        trained, self._trained = self._trained, None
        if trained is None or not _equal(self._values(), self._shown):
            return False
        for weight, value in zip(self.model.trainable_variables, trained, strict=True):
            weight.assign(value)
        self.separate()  # on JAX from `trained`
        return True

    def _values(self) -> list[np.ndarray]:
        # Copies: on torch an array may share its memory with the weight.
        return [np.array(keras.ops.convert_to_numpy(weight)) for weight in self.model.trainable_variables]

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.put_back()

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        self.show()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.show()


def _equal(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return len(first) == len(second) and all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
