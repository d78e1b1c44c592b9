"""Training with a moving average of weights: what `fit` leaves, and what validation and files see meanwhile."""

import keras
import numpy as np
import pytest

from keras_auxref import Flow, Glow
from keras_auxref.flows.averaging import AveragedAdam

MOMENTUM = 0.3


class Trained(keras.callbacks.Callback):
    """The weights after every step, as they are trained."""

    def on_train_begin(self, logs=None):
        self.weights = []

    def on_train_batch_end(self, batch, logs=None):
        self.weights.append(values(self.model))

    def average(self):
        """a ← m a + (1 − m) w, from the first weights on, with m = min(MOMENTUM, (1 + t)/(10 + t)) after t steps."""
        found = self.weights[0]
        for t, weights in enumerate(self.weights[1:], start=1):
            m = min(MOMENTUM, (1 + t) / (10 + t))
            found = [m * a + (1 - m) * w for a, w in zip(found, weights, strict=True)]
        return found


def values(model):
    return [keras.ops.convert_to_numpy(weight) for weight in model.trainable_variables]


def flow(x):
    model = Flow(2, steps=1, hidden=4, coupling="affine", seed=1)
    model.compile(Flow.optimizer(0.05, warmup_steps=0, average=MOMENTUM))
    model.initialize(x)
    return model


def close(first, second, tolerance=1e-5):
    return all(np.allclose(a, b, atol=tolerance) for a, b in zip(first, second, strict=True))


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(0).normal(size=(32, 2)).astype("float32")


@pytest.mark.parametrize("stop", [False, True])
def test_fit_ends_with_the_average_also_where_it_stops_early(x, stop, tmp_path):
    keras.utils.set_random_seed(0)
    model, trained, seen = flow(x), Trained(), []
    file = tmp_path / "best.keras"
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append((values(model), trained.average())))
    end = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", stop))
    callbacks = [trained, look, keras.callbacks.ModelCheckpoint(file), end]
    history = model.fit(x, batch_size=8, epochs=2, verbose=0, shuffle=False, validation_data=(x,), callbacks=callbacks)

    assert len(trained.weights) == (4 if stop else 8)  # after the epoch training went on from the weights, not the average
    assert close(values(model), trained.average())
    assert not close(values(model), trained.weights[-1], 1e-3)
    for shown, average in seen:
        assert close(shown, average)
    assert history.history["val_loss"][-1] == pytest.approx(model.evaluate(x, verbose=0, return_dict=True)["loss"], rel=1e-5)
    assert close(values(keras.models.load_model(file)), values(model))


@pytest.mark.slow
def test_training_goes_on_from_the_weights_after_validation(x):
    ends = []
    for validation in (None, (x,)):
        keras.utils.set_random_seed(0)
        model, trained = flow(x), Trained()
        model.fit(x, batch_size=8, epochs=3, verbose=0, shuffle=False, validation_data=validation, callbacks=trained)
        ends.append(trained.weights[-1])
    assert close(*ends, 1e-6)


@pytest.mark.parametrize("further", ["fit", "train_on_batch", "loaded", "compiled"])
def test_training_goes_on_from_the_weights_after_fit(x, further):
    """Not from the average, which lags behind: many short trainings would hardly move. Unless others were loaded."""
    model, trained = flow(x), Trained()
    model.compile(AveragedAdam(0.05, use_ema=True, ema_momentum=MOMENTUM))  # whose rate is a number
    model.fit(x, batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=trained)
    weights, average = trained.weights[-1], values(model)
    assert not close(weights, average, 1e-3)
    if further == "compiled":
        model.compile(keras.optimizers.SGD(0.0))
    else:
        model.optimizer.learning_rate = 0.0
    if further == "loaded":
        for weight in model.trainable_variables:
            weight.assign_add(keras.ops.ones_like(weight))
    if further == "train_on_batch":
        model.train_on_batch(x)
        found = values(model)
    else:
        model.fit(x, epochs=1, verbose=0, callbacks=trained)
        found = trained.weights[-1]
    expected = {"loaded": [a + 1 for a in average], "compiled": average}.get(further, weights)
    assert close(found, expected)


def test_fit_averages_by_default(x):
    model = Flow(2, steps=1, hidden=4, seed=1)
    model.fit(x, epochs=1, verbose=0)
    assert (model.optimizer.use_ema, model.optimizer.get_config()["ema_momentum"]) == (True, 0.999)


def test_options_of_the_optimizer():
    plain, other = Glow.optimizer(average=None), Glow.optimizer(average=0.9, algorithm="adamax", max_norm=1.0, decay_steps=10)
    assert isinstance(plain, keras.optimizers.Adam)
    assert isinstance(other, keras.optimizers.Adamax)
    assert (other.use_ema, other.get_config()["ema_momentum"], other.global_clipnorm) == (True, 0.9, 1.0)
    assert float(other.learning_rate) == pytest.approx(1e-5)
    with pytest.raises(ValueError, match=r"adamax.*Received: 'sgd'"):
        Glow.optimizer(algorithm="sgd")
