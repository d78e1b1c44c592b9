"""Training by maximum likelihood with Keras' own `fit`, after a look at the data."""

import contextlib
import inspect
from typing import Any, Unpack

import keras
import numpy as np

from keras_auxref.flows.averaging import AveragedAdam, AveragedAdamax, after_fit, forget, train_on, with_averages
from keras_auxref.flows.batches import first_batch, inputs_of
from keras_auxref.flows.conditions import Condition
from keras_auxref.flows.warmup import warm_up
from keras_auxref.ops import backend
from keras_auxref.typing import Data, LayerArguments, Tensor

ALGORITHMS = {
    "adam": (keras.optimizers.Adam, AveragedAdam),
    "adamax": (keras.optimizers.Adamax, AveragedAdamax),
}
"""By name, the optimizer without and with an average of weights."""


class LikelihoodModel(keras.Model):
    """A `keras.Model` whose `call` returns the loss of every event, its negative log-likelihood in some unit.

    A subclass has `loss_metric` (a `keras.metrics.Mean`), `initialized`, `initialize(x, context)`, which initialises ActNorm
    from data, and `check_data(x)`, which refuses data that do not fit. If it has a `condition`, y of `fit(x, y)` is the context,
    and `call` gets both as a tuple.
    """

    condition = Condition(None, None, "float32")
    initial_size = 256
    """How many events of an array, the first ones, initialise the model."""

    def __init__(self, **kwargs: Unpack[LayerArguments]) -> None:
        if backend.replicas() > 1:
            raise ValueError(
                f"{type(self).__name__} trains on one device of TensorFlow. Expected no `tf.distribute` strategy, or one with "
                f"one replica. Received: one with {backend.replicas()} replicas. For several devices take Keras on JAX with "
                "`keras.distribution.set_distribution(keras.distribution.DataParallel())`."
            )
        super().__init__(**kwargs)

    @property
    def loss_metric(self) -> keras.metrics.Mean:
        """The metric of the loss. Its name is the key in a history."""
        raise NotImplementedError

    @property
    def initialized(self) -> bool:
        """True once everything that starts from data has done so."""
        raise NotImplementedError

    def initialize(self, x: Tensor, context: Tensor | None = None) -> None:
        """Starts from these data."""
        raise NotImplementedError

    def check_data(self, x: Tensor) -> None:
        """Refuses data that do not fit the model."""
        raise NotImplementedError

    def sure_to_fit(self, data: Data) -> bool:
        """True if the dtype alone shows that data fit, so that no values have to be read."""
        return False

    @staticmethod
    def optimizer(
        learning_rate: float = 1e-3,
        warmup_steps: int = 100,
        max_norm: float = 50.0,
        decay_steps: int | None = None,
        average: float | None = 0.999,
        algorithm: str = "adam",
        hold_steps: int = 0,
    ) -> keras.optimizers.Optimizer:
        """An optimizer for flows: a learning rate that rises over the first steps, and gradients clipped to a global norm.

        Args:
            learning_rate: The rate after `warmup_steps` steps, over which it rises linearly.
            warmup_steps: The number of these steps.
            max_norm: Gradients are scaled to at most this length, all of them together.
            decay_steps: The number of steps after the warm-up over which the rate falls to zero along a cosine: the rest of the
                training. Without it the rate stays constant.
            average: A number in (0, 1), to keep a moving average a ← m a + (1 − m) w of the weights, or None. Validation,
                callbacks and saved files use the average, and `fit` leaves it in the model; another `fit` goes on from the
                weights. m grows with the step t as (1 + t)/(10 + t), up to `average`.
            algorithm: `"adam"` or `"adamax"`.
            hold_steps: The number of steps at the full rate between warm-up and decay. A training of n steps often ends best with
                a decay over its last fifth: `hold_steps=4 * n // 5 - warmup_steps, decay_steps=n // 5`.
        """
        if algorithm not in ALGORITHMS:
            raise ValueError(f"Unknown algorithm. Expected one of {list(ALGORITHMS)}. Received: {algorithm!r}")
        plain, averaged = ALGORITHMS[algorithm]
        rate = warm_up(learning_rate, warmup_steps, decay_steps, hold_steps)
        if average is None:
            return plain(rate, global_clipnorm=max_norm)
        return averaged(rate, global_clipnorm=max_norm, use_ema=True, ema_momentum=average)

    def compile(
        self,
        optimizer: str | keras.optimizers.Optimizer | None = None,
        loss: object = None,
        metrics: object = None,
        **kwargs: object,
    ) -> None:
        """`keras.Model.compile`, by default with `optimizer()` of the class. Loss and metric are the flow's own."""
        given = {"loss": loss, "metrics": metrics, **{key: kwargs.get(key) for key in ("weighted_metrics", "loss_weights")}}
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"A flow is trained by its own likelihood, and reports it as `{self.loss_metric.name}`. "
                    f"Expected no `{name}`. Received: {name}={value!r}"
                )
        forget(self)
        super().compile(optimizer=LikelihoodModel.optimizer() if optimizer is None else optimizer, **kwargs)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a loaded model in the way in which the saved one was compiled."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        self._build_optimizer()

    def _build_optimizer(self) -> None:
        """Makes the variables of the optimizer. TensorFlow would trace a function twice that creates them."""
        optimizer: Any = self.optimizer
        if self.compiled and not optimizer.built:
            strategy = getattr(self, "distribute_strategy", None)  # TensorFlow's
            with strategy.scope() if strategy is not None else contextlib.nullcontext():
                optimizer.build(self.trainable_variables)

    def compute_loss(
        self,
        x: Tensor | None = None,
        y: Tensor | None = None,
        y_pred: Any = None,
        sample_weight: Tensor | None = None,
        training: bool = True,
    ) -> Tensor:
        """The mean over events, weighted by `sample_weight` if given, plus the losses of regularizers."""
        self.loss_metric.update_state(y_pred, sample_weight=sample_weight)
        if sample_weight is not None:
            weight = keras.ops.cast(sample_weight, y_pred.dtype)
            loss = keras.ops.sum(weight * y_pred) / keras.ops.sum(weight)
        else:
            loss = keras.ops.mean(y_pred)
        return keras.ops.sum(keras.ops.stack([loss, *(keras.ops.cast(extra, loss.dtype) for extra in self.losses)]))

    # On JAX a step also gets and returns the state; the data are last on every backend.

    def train_step(self, *state_and_data: Any) -> Any:
        """`keras.Model.train_step`, with y as the context of x."""
        return super().train_step(*state_and_data[:-1], self._with_context(state_and_data[-1]))

    def test_step(self, *state_and_data: Any) -> Any:
        """`keras.Model.test_step`, with y as the context of x."""
        return super().test_step(*state_and_data[:-1], self._with_context(state_and_data[-1]))

    def _with_context(self, data: Tensor | tuple[Tensor, ...]) -> object:
        if not self.condition:
            return data
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        return (x, y), None, sample_weight

    def inputs_and_context(self, inputs: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        """x and the context as networks see it, from the argument of `call`: a tuple of both where there is a context."""
        if not self.condition:
            return inputs_of(inputs), None
        if not isinstance(inputs, tuple | list) or len(inputs) != 2:
            raise ValueError("This flow needs a context. Expected a pair (x, context). Received: no pair")
        return inputs[0], self.condition.rows(inputs[1])

    def fit(self, x: Data | None = None, y: Tensor | None = None, *args: object, **kwargs: object) -> keras.callbacks.History:
        """`keras.Model.fit`, which first initialises ActNorm from data and compiles the model if that has not been done.

        Data are x alone, or tuples that begin with it. With a context, y is the context of every x; without one it is ignored.
        The default optimizer averages the weights (see `optimizer`), and `fit` leaves the average in the model. The history
        has the loss under its own name, with the prefix `val_` for validation data. Lower is better: callbacks like
        `EarlyStopping` and `ModelCheckpoint` that monitor it are set to `mode="min"`.
        """
        if not self.compiled:
            self.compile()
        call = inspect.signature(keras.Model.fit).bind(self, x, y, *args, **kwargs)
        self._prepare(call.arguments.get("callbacks"))
        validation = call.arguments.get("validation_data")
        if isinstance(validation, tuple | list):
            self._look_at(*validation[:2])
        elif validation is not None:
            call.arguments["validation_data"] = self._look_at(validation)
        call.arguments["x"] = self._look_at(x, y, start=True)
        self._build_optimizer()
        if getattr(self.optimizer, "use_ema", False):
            call.arguments["callbacks"] = with_averages(call.arguments.get("callbacks"), self)
        try:
            history = super().fit(*call.args[1:], **call.kwargs)
        except KeyboardInterrupt:
            after_fit(self)
            raise
        after_fit(self)
        return history

    def _prepare(self, callbacks: Any) -> None:
        """Sets the mode of callbacks that monitor the loss: Keras derives it for metrics of `compile` only.

        Refuses those that set the learning rate if it is a schedule, where Keras would raise an error at the first plateau.
        """
        callbacks = getattr(callbacks, "callbacks", callbacks) or []
        optimizer: Any = self.optimizer
        rate = optimizer.get_config().get("learning_rate")
        setters = keras.callbacks.ReduceLROnPlateau | keras.callbacks.LearningRateScheduler
        for callback in callbacks if isinstance(callbacks, list | tuple) else [callbacks]:
            watched = str(getattr(callback, "monitor", "")).removeprefix("val_")
            if watched == self.loss_metric.name and getattr(callback, "mode", None) == "auto":
                callback.mode = "min"
            if isinstance(callback, setters) and isinstance(rate, dict):
                raise ValueError(
                    f"`{type(callback).__name__}` sets the learning rate, which is a schedule in this optimizer. Expected a "
                    "number, such as `compile(keras.optimizers.Adam(1e-3, global_clipnorm=50.0))`. Received: "
                    f"{rate.get('class_name')}, a schedule"
                )

    def evaluate(
        self, x: Data | None = None, y: Tensor | None = None, *args: object, **kwargs: object
    ) -> float | list[float] | dict[str, float]:
        """`keras.Model.evaluate`: the mean of the loss, with the same noise, if any, at every call."""
        within_fit = "_use_cached_eval_dataset" in kwargs  # which has looked at these data before
        return super().evaluate(x if within_fit else self._look_at(x, y), y, *args, **kwargs)

    def predict(self, x: Data, *args: object, **kwargs: object) -> np.ndarray:
        """`keras.Model.predict`: the loss of every event; with a context, of pairs `(x, context)`."""
        return super().predict(self._look_at(x), *args, **kwargs)

    def train_on_batch(
        self, x: Tensor, y: Tensor | None = None, *args: object, **kwargs: object
    ) -> float | list[float] | dict[str, float]:
        """`keras.Model.train_on_batch`. The first one starts every ActNorm from its data, as `fit` does."""
        x = self._look_at(x, y, start=True)
        train_on(self)
        self._build_optimizer()
        return super().train_on_batch(x, y, *args, **kwargs)

    def test_on_batch(
        self, x: Tensor, y: Tensor | None = None, *args: object, **kwargs: object
    ) -> float | list[float] | dict[str, float]:
        """`keras.Model.test_on_batch`."""
        return super().test_on_batch(self._look_at(x, y), y, *args, **kwargs)

    def _look_at(self, data: Any, y: Tensor | None = None, start: bool = False) -> Any:
        """The same data, after a check of whether they fit; with `start`, ActNorm is initialised from them if it has not been."""
        start = start and not self.initialized
        if not start and not self.condition and self.sure_to_fit(data):
            return data
        batch, data = first_batch(data, self.initial_size)
        if batch is None:
            if start:
                raise ValueError(
                    "ActNorm starts from data. Expected an array, a generator, a `tf.data.Dataset` or a `keras.utils.PyDataset`, "
                    f"or a call of `initialize` before. Received: {type(data).__name__}"
                )
            return data
        # All of an array, and of pairs of arrays; of anything else the first batch.
        whole = data if hasattr(data, "shape") or isinstance(data, tuple | list) else batch
        self.check_data(inputs_of(whole))
        some, context = inputs_of(batch), None
        if self.condition:
            second = whole[1] if isinstance(whole, tuple | list) and len(whole) > 1 else None
            context = self.condition.check(second if y is None else y)
        if start:
            self.initialize(some) if context is None else self.initialize(some, context[: some.shape[0]])
        return data
