"""What is an image, and what is refused."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import Glow
from keras_auxref.flows.batches import first_batch, inputs_of
from keras_auxref.flows.images import check_values, levels, support, sure_to_fit

SHAPE = (4, 4, 3)


@functools.cache
def shared(bits):
    return model(bits)


def model(bits=8):
    return Glow(SHAPE, levels=1, steps=1, hidden=2, mixing="fixed", seed=1, bits=bits)


def eight_bits(dtype, seed=0):
    x = np.random.default_rng(seed).integers(0, 256, (8, *SHAPE)).astype(dtype)
    x.flat[:2] = 0, 255
    return x


WITH_NAN = (eight_bits("float32") / 255).copy()
WITH_NAN[3, 1, 1, 1] = np.nan
# name: images, bits, what was received, what converts them
WRONG = {
    "floats in 0 … 255": (eight_bits("float32"), 8, "float32 from 0 to 255", "images / 255"),
    "the same for 5 bits": (eight_bits("float64"), 5, "float64 from 0 to 255", "images / 255"),
    "16 bits as floats": (257 * eight_bits("float32"), 8, "float32 from 0 to 65535", "images / 65535"),
    "8 bits in 5": (eight_bits("uint8"), 5, "uint8 from 0 to 255", "images // 8"),
    "16 bits in 8": (257 * eight_bits("uint16"), 8, "uint16 from 0 to 65535", "images // 256"),
    "negative integers": (eight_bits("int32") - 128, 8, "int32 from -128 to 127", "+ 128"),
    "int8": ((eight_bits("int32") - 128).astype("int8"), 8, "int8 from -128 to 127", "+ 128"),
    "[-1, 1]": (eight_bits("float32") / 127.5 - 1, 8, "float32 from -1 to 1", "(images + 1) / 2"),
    "standardised": (eight_bits("float32") / 60 - 2, 8, "float32 from -2 to 2.25", "images.min()"),
    "NaN": (WITH_NAN, 8, "float32 with 1 values", "nan_to_num"),
    "infinity": (np.where(np.isnan(WITH_NAN), np.inf, WITH_NAN), 8, "float32 with 1 values", "nan_to_num"),
    "masks": (eight_bits("uint8") > 100, 8, "bool", "astype"),
}


@pytest.mark.parametrize("name", WRONG)
def test_images_out_of_range_are_refused_with_the_line_that_converts_them(name):
    x, bits, received, conversion = WRONG[name]
    flow = shared(bits)
    for call in (flow.bits_per_dim, flow.log_prob, flow.encode, flow.initialize, flow.fit, flow.evaluate, flow.predict):
        with pytest.raises(ValueError, match="Images do not fit this model") as caught:
            call(x)
        message = str(caught.value)
        assert f"Expected integers 0 … {2**bits - 1}, or numbers in [0, 1]. Received: {received}" in message
        assert conversion in message.split("To convert them:")[1]
        assert not flow.flow.initialized


class Batches(keras.utils.PyDataset):
    def __init__(self, x):
        super().__init__()
        self.x = x

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return (self.x,)


SOURCES = {
    "array": lambda x: x,
    "tensor": tf.constant,
    "dataset": lambda x: tf.data.Dataset.from_tensors(x),
    "pairs": lambda x: tf.data.Dataset.from_tensors((x, np.zeros(len(x)))),
    "sequence": Batches,
    "generator": lambda x: ((x,) for _ in range(2)),
}


@pytest.fixture(scope="module")
def trained():
    flow = model()
    flow.fit(eight_bits("uint8"), verbose=0)
    return flow


@pytest.mark.parametrize("source", SOURCES)
def test_fit_and_evaluate_look_at_the_first_batch_of_everything_that_keras_takes(source, trained):
    wrong, flow = SOURCES[source], trained
    with pytest.raises(ValueError, match="float32 from 0 to 255"):
        shared(8).fit(wrong(eight_bits("float32")), verbose=0)
    assert not shared(8).flow.initialized
    steps = int(flow.optimizer.iterations)
    for call in (flow.fit, flow.evaluate, flow.predict):
        with pytest.raises(ValueError, match="float32 from 0 to 255"):
            call(wrong(eight_bits("float32")), verbose=0)
    with pytest.raises(ValueError, match="float32 from 0 to 255"):
        flow.fit(eight_bits("uint8"), validation_data=wrong(eight_bits("float32")), verbose=0)
    assert int(flow.optimizer.iterations) == steps
    result = flow.fit(wrong(eight_bits("float32") / 255), validation_data=SOURCES[source](eight_bits("uint8")), verbose=0)
    assert np.isfinite(result.history["val_bits_per_dim"]).all()


def test_one_image_out_of_range_in_an_array_is_found_wherever_it_is():
    x = np.concatenate([np.zeros((400, *SHAPE), "float32"), eight_bits("float32")])
    with pytest.raises(ValueError, match="float32 from 0 to 255"):
        model().fit(x, verbose=0)


def test_batch_methods_and_calls_look_too():
    flow = model()
    flow.compile()
    for call in (flow.train_on_batch, flow.test_on_batch, flow):
        with pytest.raises(ValueError, match="float32 from 0 to 255"):
            call(eight_bits("float32"))


def test_dictionaries_get_a_sentence():
    x, flow = eight_bits("uint8"), model()
    dataset = tf.data.Dataset.from_tensors({"label": np.zeros(8), "image": x})
    with pytest.raises(ValueError, match=r"Received: a dictionary with the keys 'label', 'image'.*example\['image'\]") as caught:
        flow.fit(dataset, verbose=0)
    assert len(str(caught.value)) < 250
    for call in (flow.bits_per_dim, flow.log_prob, flow.initialize, flow.fit):
        with pytest.raises(ValueError, match="a dictionary with the keys"):
            call({"image": x})
    with pytest.raises(ValueError, match="a dictionary with the keys"):
        flow.evaluate(({"image": x},))


def test_what_fits_is_not_read():
    def never():
        raise AssertionError("read ahead")
        yield np.zeros((1, *SHAPE), "uint8")

    data = tf.data.Dataset.from_generator(never, output_signature=tf.TensorSpec((None, *SHAPE), tf.uint8))
    assert sure_to_fit(data, 8)
    assert model()._look_at(data) is data
    assert not sure_to_fit(data, 5)
    assert not sure_to_fit(data.map(lambda x: tf.cast(x, tf.float32)), 8)


def test_the_edges_of_what_is_taken():
    for bits in (1, 5, 8, 16):
        check_values(np.array([0, 2**bits - 1]), bits, levels(bits))
        check_values(np.array([0.0, 1.0]), bits, levels(bits))
        with pytest.raises(ValueError, match="Expected integers"):
            check_values(np.array([0, 2**bits]), bits, levels(bits))
        with pytest.raises(ValueError, match="clip"):
            check_values(np.array([0.0, 1 + 0.51 / (2**bits - 1)]), bits, levels(bits)) if bits > 1 else check_values(
                np.array([0.0, 1.5 - 1e-9]), bits, support(0.99)
            )
    check_values(np.zeros((0, 4)), 8, levels(8))
    check_values(np.array([True]), 1, levels(1))
    low, high, _ = support(0.9)
    check_values(np.array([low, high]), 8, support(0.9))  # what `decode` may return is taken by `encode`


def test_first_batch_uses_nothing_up():
    assert first_batch(None, 2) == (None, None)
    generator = iter([1])
    assert first_batch(generator, 2) == (None, generator)  # an iterator that Keras does not take either
    some, data = first_batch((n for n in ([1], [2], [3])), 2)
    assert some == [1]
    assert list(data) == [([1],), ([2],), ([3],)]
    assert inputs_of((([5],), 1)) == 5
