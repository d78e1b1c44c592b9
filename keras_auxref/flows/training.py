"""Training by maximum likelihood with Keras' own `fit`, on images that are looked at before."""

import contextlib
import inspect
from typing import Any

import keras

from keras_auxref.flows import images as image_data
from keras_auxref.flows.warmup import Warmup


class LikelihoodModel(keras.Model):
    """A `keras.Model` of images whose `call` returns the loss of every image, its bits per dimension.

    A subclass has `bits`, `image_shape`, `bits_metric` (a `keras.metrics.Mean`), `initialized`, and `initialize(images)`, which
    starts what starts from data.
    """

    bits: int
    image_shape: tuple[int, ...]
    bits_metric: keras.metrics.Mean

    @property
    def initialized(self) -> bool:
        """True when nothing has to start from data any more."""
        raise NotImplementedError

    def initialize(self, images: Any) -> None:
        """Starts from these images."""
        raise NotImplementedError

    @staticmethod
    def optimizer(learning_rate: float = 1e-3, warmup_steps: int = 100, max_norm: float = 50.0) -> keras.optimizers.Optimizer:
        """Adam with a learning rate that rises over the first steps and gradients clipped to a global norm."""
        return keras.optimizers.Adam(Warmup(learning_rate, warmup_steps), global_clipnorm=max_norm)

    def compile(self, optimizer: Any = None, loss: Any = None, metrics: Any = None, **kwargs: Any) -> None:
        """`keras.Model.compile`, by default with `Glow.optimizer()`. Loss and metric are the flow's own: bits per dimension."""
        given = {"loss": loss, "metrics": metrics, **{key: kwargs.get(key) for key in ("weighted_metrics", "loss_weights")}}
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"A flow is trained by its own likelihood, and reports it as `bits_per_dim`. Expected no `{name}`. "
                    f"Received: {name}={value!r}"
                )
        super().compile(optimizer=LikelihoodModel.optimizer() if optimizer is None else optimizer, **kwargs)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a model that is loaded as it was when it was saved."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        self._build_optimizer()

    def _build_optimizer(self) -> None:
        """Makes the variables of the optimizer. Where TensorFlow meets new ones in a function it traces that a second time."""
        optimizer: Any = self.optimizer
        if self.compiled and not optimizer.built:
            with self.distribute_strategy.scope() if keras.backend.backend() == "tensorflow" else contextlib.nullcontext():
                optimizer.build(self.trainable_variables)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """The mean of bits per dimension, weighted by `sample_weight` if given, plus the losses of regularizers."""
        self.bits_metric.update_state(y_pred, sample_weight=sample_weight)
        if sample_weight is not None:
            weight = keras.ops.cast(sample_weight, y_pred.dtype)
            loss = keras.ops.sum(weight * y_pred) / keras.ops.sum(weight)
        else:
            loss = keras.ops.mean(y_pred)
        return keras.ops.sum(keras.ops.stack([loss, *(keras.ops.cast(extra, loss.dtype) for extra in self.losses)]))

    def fit(self, x: Any = None, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """`keras.Model.fit`, which starts ActNorm from the first images and compiles the model where that is still to do.

        Data are images alone, or tuples that begin with them. The history has `bits_per_dim` and `val_bits_per_dim`: less is
        better, which callbacks such as `EarlyStopping` and `ModelCheckpoint` have to be told by `mode="min"`.
        """
        if not self.compiled:
            self.compile()
        call = inspect.signature(keras.Model.fit).bind(self, x, *args, **kwargs)
        validation = call.arguments.get("validation_data")
        if isinstance(validation, tuple | list):
            self._look_at(validation[0])
        elif validation is not None:
            call.arguments["validation_data"] = self._look_at(validation)
        call.arguments["x"] = self._look_at(x, start=True)
        self._build_optimizer()
        return super().fit(*call.args[1:], **call.kwargs)

    def evaluate(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        """`keras.Model.evaluate`: the mean of `bits_per_dim`, with the same noise at every call."""
        within_fit = "_use_cached_eval_dataset" in kwargs  # which has looked at these data before
        return super().evaluate(x if within_fit else self._look_at(x), *args, **kwargs)

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """`keras.Model.predict`: `bits_per_dim` of every image."""
        return super().predict(self._look_at(x), *args, **kwargs)

    def train_on_batch(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """`keras.Model.train_on_batch`. The first one starts every ActNorm from its images, as `fit` does."""
        x = self._look_at(x, start=True)
        self._build_optimizer()
        return super().train_on_batch(x, *args, **kwargs)

    def test_on_batch(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """`keras.Model.test_on_batch`."""
        return super().test_on_batch(self._look_at(x), *args, **kwargs)

    def _look_at(self, data: Any, start: bool = False) -> Any:
        """The same data, after a look at their first images: are they images, and does ActNorm still have to start from them?"""
        start = start and not self.initialized
        if image_data.sure_to_fit(data, self.bits) and not start:
            return data
        some, data = image_data.first_images(data)
        if some is None:
            if start:
                raise ValueError(
                    "ActNorm starts from data. Expected an array, a generator, a `tf.data.Dataset` or a `keras.utils.PyDataset`, "
                    f"or a call of `initialize(images)` before. Received: {type(data).__name__}"
                )
            return data
        self._check_images(data if hasattr(data, "shape") else some)
        if start:
            self.initialize(some)
        return data

    def _check_images(self, x: Any) -> None:
        image_data.check_shape(x, self.image_shape)
        image_data.check_values(x, self.bits, image_data.levels(self.bits))
