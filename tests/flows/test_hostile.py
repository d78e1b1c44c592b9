"""What new users give a flow by mistake: each gets a sentence that says what was expected, or just works."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import Glow
from keras_auxref.ops import backend
from tests.flows.support import images
from tests.support import assert_agree

SHAPE = (4, 4, 3)


def small(shape=SHAPE, **kwargs):
    return Glow(shape, **{"levels": 1, "steps": 1, "hidden": 2, "mixing": "fixed", "seed": 1, **kwargs})


@pytest.fixture(scope="module")
def trained():
    model = small()
    model.fit(images(8, SHAPE), verbose=0)
    return model


@pytest.mark.parametrize("monitor", ["bits_per_dim", "val_bits_per_dim"])
def test_callbacks_know_that_less_is_better(trained, monitor, tmp_path):
    x = images(4, SHAPE)
    callbacks = [
        keras.callbacks.EarlyStopping(monitor=monitor),
        keras.callbacks.ReduceLROnPlateau(monitor=monitor),
        keras.callbacks.ModelCheckpoint(
            tmp_path / "best.weights.h5", monitor=monitor, save_best_only=True, save_weights_only=True
        ),
    ]
    trained.compile(optimizer=keras.optimizers.SGD(1e-6))
    trained.fit(x, validation_data=(x,), epochs=2, callbacks=callbacks, verbose=0)
    assert all(callback.monitor_op(1.0, 2.0) for callback in callbacks)
    mine = keras.callbacks.EarlyStopping(monitor=monitor, mode="max")
    trained.fit(x, validation_data=(x,), callbacks=[mine], verbose=0)
    assert mine.mode == "max"


@pytest.mark.parametrize(
    "callback", [keras.callbacks.ReduceLROnPlateau("bits_per_dim"), keras.callbacks.LearningRateScheduler(lambda epoch: 1e-3)]
)
def test_callbacks_that_set_the_rate_need_one_that_is_a_number(callback):
    with pytest.raises(ValueError, match=r"sets the learning rate.*Expected a number.*Received: \w+, a schedule"):
        small().fit(images(4, SHAPE), callbacks=[callback], verbose=0)


@pytest.mark.parametrize(("shape", "levels"), [((28, 28, 1), 2), ((32, 32, 3), 3), ((64, 64, 3), 3), ((6, 8, 1), 1)])
def test_levels_are_by_default_the_most_that_the_size_allows(shape, levels):
    model = Glow(shape, steps=1, hidden=2, mixing="permutation")
    assert model.get_config()["levels"] == levels


def test_odd_sizes_get_the_line_that_pads():
    with pytest.raises(ValueError, match=r"for levels=1. Received: \(None, 27, 28, 1\). To pad images to 28 × 28: ") as caught:
        Glow((27, 28, 1), steps=1, hidden=2)
    line = str(caught.value).split("`")[1]
    padded = eval(line, {"np": np, "images": np.zeros((2, 27, 28, 1))})
    assert padded.shape == (2, 28, 28, 1)


@pytest.mark.parametrize("n", [-1, 2.5, "4", None, True])
def test_sample_takes_a_number(trained, n):
    with pytest.raises(ValueError, match=r"`n` must be a number of samples. Expected 0, 1, 2, … Received: "):
        trained.sample(n)


def test_sample_takes_numbers_only(trained):
    with pytest.raises(ValueError, match="`temperature` must be a number"):
        trained.sample(1, temperature="hot")
    with pytest.raises(ValueError, match="`temperature`"):
        trained.sample(1, temperature=float("nan"))
    with pytest.raises(ValueError, match="`seed` must be a whole number or None"):
        trained.sample(1, seed=0.5)
    assert trained.sample(np.int64(2), seed=np.int32(1)).shape == (2, *SHAPE)


def test_a_generator_may_yield_arrays():
    model = small()
    history = model.fit((images(4, SHAPE, seed=k) for k in range(3)), steps_per_epoch=3, verbose=0).history
    assert np.isfinite(history["bits_per_dim"]).all()
    assert int(model.optimizer.iterations) == 3


def test_shapes_that_almost_fit_get_the_line_that_converts(trained):
    unbatched = tf.data.Dataset.from_tensor_slices(images(4, SHAPE))
    for model in (trained, small()):
        with pytest.raises(ValueError, match=r"Received: \(4, 4, 3\). To convert them: .*`dataset.batch\(64\)`"):
            model.fit(unbatched, verbose=0)
    with pytest.raises(ValueError, match=r"Received: \(2, 4, 4, 4\). To convert them: `images\[..., :3\]` drops"):
        trained.log_prob(images(2, (4, 4, 4)))
    with pytest.raises(ValueError, match=r"Received: \(2, 4, 4, 1\). To convert them: `np.repeat\(images, 3, axis=-1\)`"):
        trained.fit(images(2, (4, 4, 1)))
    with pytest.raises(ValueError, match=r"Received: \(2, 4, 4\). To convert them: `images\[..., None\]`"):
        small((4, 4, 1)).log_prob(images(2, (4, 4)))
    with pytest.raises(ValueError, match=r"Received: \(4, 4, 3\). To convert them: `images\[None\]`"):
        trained.log_prob(images(1, SHAPE)[0])


def test_a_list_of_images_is_a_batch(trained):
    x = images(3, SHAPE)
    assert_agree(trained.log_prob(list(x)), trained.log_prob(x))
    assert_agree(trained.bits_per_dim(list(x)), trained.bits_per_dim(x))
    assert_agree(trained.log_prob(x.tolist()), trained.log_prob(x))


def test_a_list_of_batches_is_not_taken_for_its_first(trained):
    x = images(2, SHAPE)
    for call in (trained.log_prob, trained.encode, trained.bits_per_dim):
        with pytest.raises(ValueError, match=r"Received: a list of 2 batches. To convert them: `np.concatenate\(images\)`"):
            call([x, x])


def test_images_of_zeros_and_ones_are_told_from_images_of_bytes():
    dark = np.random.default_rng(0).integers(0, 2, (8, *SHAPE)).astype("uint8")
    message = r"largest value of the first images is 1, .* reach 255: .*`bits=1`, or .* by 255"
    for start in (lambda model: model.fit(dark, verbose=0), lambda model: model.initialize(dark)):
        with pytest.warns(UserWarning, match=message) as heard:
            start(small())
        assert len([warning for warning in heard if "largest value" in str(warning.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        small(bits=1).fit(dark, verbose=0)
        small().fit(images(8, SHAPE), verbose=0)


@pytest.mark.parametrize("shape", [32, "8x8x3", (8, 8), (8, 8, 0), None, ("a", "b", "c")])
def test_shapes_of_images_are_three_numbers(shape):
    with pytest.raises(
        ValueError, match=r"`image_shape` must have three sizes. Expected \(height, width, channels\).*Received: "
    ):
        Glow(shape)


def test_several_replicas_are_refused_at_once(monkeypatch):
    monkeypatch.setattr(backend, "replicas", lambda: 2)
    with pytest.raises(ValueError, match=r"Expected no `tf.distribute` strategy.*Received: one with 2 replicas.*DataParallel"):
        small()


def test_one_trace_serves_all_batch_sizes(monkeypatch):
    calls, encode = [], Glow._encode

    def counted(self, x, context=None):
        calls.append(x.shape)
        return encode(self, x, context)

    monkeypatch.setattr(Glow, "_encode", counted)
    model = small()
    for n in (1, 2, 5):
        model.encode(images(n, SHAPE))
    assert [tuple(shape) for shape in calls] == [(None, *SHAPE)]
