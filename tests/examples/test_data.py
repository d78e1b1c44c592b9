import importlib.util
import time

import numpy as np
import pytest
from common import data


def test_digits_split_is_fixed_and_disjoint():
    first, second = data.load("digits"), data.load("digits")
    np.testing.assert_array_equal(first.train_images, second.train_images)
    assert len(first.train_images) == 1297
    assert len(first.validation_images) == 500
    images = np.concatenate([first.train_images, first.validation_images])
    assert len(images) == 1797
    # Stratified: every class has its share of the validation images.
    assert set(np.bincount(first.validation_labels)) <= {48, 49, 50, 51, 52}


def test_vectors_are_flat_and_between_0_and_1():
    digits = data.load("digits")
    (x, labels), (x_val, _) = digits.vectors()
    assert x.shape == (1297, 64)
    assert x_val.shape == (500, 64)
    assert x.dtype == np.float32
    assert x.min() == 0
    assert x.max() == 1
    assert labels.shape == (1297,)
    assert digits.describe() == {
        "name": "digits",
        "train": 1297,
        "validation": 500,
        "image_shape": [8, 8, 1],
        "classes": 10,
    }


def test_limit_keeps_the_classes():
    few = data.load("digits").limit(3)
    assert len(few.train_images) == 3
    assert few.classes == 10


def test_unknown_name():
    with pytest.raises(ValueError, match="Expected one of digits, mnist"):
        data.load("imagenet")


def test_unreachable_server_is_noticed_quickly():
    started = time.perf_counter()
    assert not data._reachable("http://127.0.0.1:9/nothing", seconds=3)
    assert time.perf_counter() - started < 4


@pytest.mark.skipif(importlib.util.find_spec("tensorflow_datasets") is None, reason="needs tensorflow-datasets")
def test_a_failed_download_is_one_sentence(tmp_path, monkeypatch):
    import tensorflow_datasets as tfds

    def refuse(*args, **kwargs):
        raise OSError("the disk is full\nand more that nobody reads")

    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(data, "_reachable", lambda url: True)
    monkeypatch.setattr(tfds, "builder", lambda name: tfds.core.DatasetBuilder)
    monkeypatch.setattr(tfds.core.DatasetBuilder, "is_prepared", lambda: False, raising=False)
    monkeypatch.setattr(tfds, "load", refuse)
    with pytest.raises(data.DataUnavailableError, match=r"^The data set mnist could not be prepared \(the disk is full\): use "):
        data.load("mnist")
