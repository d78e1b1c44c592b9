import importlib.util

import numpy as np
import pytest

from experiments.harness import data


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
    with pytest.raises(ValueError, match="Expected one of digits, patches, mnist"):
        data.load("imagenet")


def test_unreachable_server_is_noticed():
    assert not data._reachable("http://127.0.0.1:9/nothing", seconds=3)


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


def test_patches_are_fixed_and_share_no_pixel_with_validation(monkeypatch):
    photographs = data._photographs()
    patches = data.load("patches")
    assert patches.describe() == {
        "name": "patches",
        "train": 18190,
        "validation": 228,
        "image_shape": [32, 32, 3],
        "classes": 2,
    }
    assert patches.train_images.dtype == np.uint8
    # Photographs whose pixels are their own numbers, modulo what a byte of each channel holds.
    numbered = []
    for label, photograph in enumerate(photographs):
        number = np.arange(photograph[..., 0].size) + label * photograph[..., 0].size
        digits = np.stack([number % 256, number // 256 % 256, number // 65536], axis=-1)
        numbered.append(digits.reshape(photograph.shape).astype("uint8"))
    monkeypatch.setattr(data, "_photographs", lambda: numbered)
    traced = data.load("patches")

    def pixels(images):
        seen = np.zeros(2**20, bool)
        red, green, blue = np.moveaxis(images.astype("int32"), -1, 0)
        seen[red + 256 * green + 65536 * blue] = True
        return np.flatnonzero(seen)

    train, validation = pixels(traced.train_images), pixels(traced.validation_images)
    assert not np.intersect1d(train, validation).size
    # Nothing much is left unused: about a fifth of the pixels is for validation, and a few at its edges for neither.
    total = sum(photograph[..., 0].size for photograph in photographs)
    assert 0.17 < len(validation) / total < 0.21
    assert len(train) / total > 0.7
    # The same patches in the same order, both photographs in every part.
    whole = np.concatenate([photograph.reshape(-1, 3) for photograph in photographs])
    first = traced.train_images[5].reshape(-1, 3).astype(int) @ [1, 256, 65536]
    np.testing.assert_array_equal(patches.train_images[5].reshape(-1, 3), whole[first])
    assert set(patches.train_labels[:50]) == set(patches.validation_labels[:50]) == {0, 1}


def test_resized_averages_squares_and_rounds_halves_up():
    image = np.array([[0, 1, 255, 255], [0, 1, 255, 254], [1, 1, 7, 8], [1, 2, 9, 10]], "uint8")[None, :, :, None]
    dataset = data.Dataset("test", image, np.zeros(1, int), np.concatenate([image, image]), np.zeros(2, int))
    half = dataset.resized(2)
    # Means ½, 254¾, 1¼, 8½.
    np.testing.assert_array_equal(half.train_images[0, :, :, 0], [[1, 255], [1, 9]])
    assert half.train_images.dtype == np.uint8
    assert half.validation_images.shape == (2, 2, 2, 1)
    assert dataset.resized(4) is dataset
    assert dataset.resized(None) is dataset
    with pytest.raises(ValueError, match="Expected a divisor of 4 and 4"):
        dataset.resized(3)
