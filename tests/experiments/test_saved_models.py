"""The models that ship: each loads, is what its card says, and all of them together stay small."""

import functools
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from experiments.harness import data
from keras_auxref.serving.show import describe, find_version, folder_size
from tests.support import assert_agree

FOLDER = Path(__file__).parents[2] / "saved_models"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
MOST_BYTES = 15e6


@pytest.fixture(scope="module")
def load():
    # The functions hold their variables weakly: the model has to live as long as they do.
    return functools.cache(lambda name: tf.saved_model.load(str(find_version(FOLDER / name))))


def _card(name):
    return (FOLDER / name / "README.md").read_text()


def test_what_ships():
    assert NAMES == ["digits", "mnist-flow", "mnist-pixels"]
    assert folder_size(FOLDER) < MOST_BYTES
    listed = (FOLDER / "README.md").read_text()
    configured = (FOLDER / "models.config").read_text()
    for name in NAMES:
        assert f"]({name}/README.md)" in listed
        assert f'name: "{name}" base_path: "/models/{name}"' in configured
        extra = ["samples.png"] if name == "mnist-flow" else []
        assert sorted(path.name for path in (FOLDER / name).iterdir()) == ["1", "README.md", *extra]


@pytest.mark.parametrize("name", NAMES)
def test_cards_tell_signatures_size_and_commands(name, load):
    card = _card(name)
    for table in describe(load(name)):
        inputs, outputs = ("<br>".join(f"`{item}`" for item in part) for part in (table.inputs, table.outputs))
        assert f"| `{table.name}` | {inputs} | {outputs} |" in card
    assert f"Size: {folder_size(find_version(FOLDER / name)) / 1e6:.2f} MB" in card
    modules = re.findall(r"python -m experiments\.(\w+)", card)
    assert modules[-1] == "export"
    for module in modules:
        assert (FOLDER.parent / "experiments" / f"{module}.py").exists()
    assert f"saved_models/{name}" in card
    assert "Certificate" in card


def test_digits_reach_the_error_on_the_card(load):
    images, labels = data.load("digits").vectors()[1]
    model = load("digits")
    answer = model.signatures["serving_default"](inputs=tf.constant(images))
    error = 100 * np.mean(answer["class"].numpy() != labels)
    assert f"Error on {len(labels)} validation images: **{error:.2f} %**" in _card("digits")
    assert error < 4


def test_pixels(load):
    model = load("mnist-pixels")
    x = np.random.default_rng(0).uniform(size=(3, 784, 1)).astype("float32")
    answer = model.signatures["serving_default"](inputs=tf.constant(x))
    np.testing.assert_allclose(answer["probabilities"].numpy().sum(axis=-1), 1, rtol=1e-5)
    np.testing.assert_array_equal(answer["class"], np.argmax(answer["probabilities"], axis=-1))


@pytest.mark.slow
def test_the_flow_inverts_and_samples(load):
    model = load("mnist-flow")
    flow = model.signatures
    number = {"n": tf.constant(8), "seed": tf.constant(3, tf.int64), "temperature": tf.constant(1.0)}
    images = flow["sample"](**number)["images"]
    assert_agree(flow["sample"](**number)["images"], images)
    assert np.abs(flow["sample"](**{**number, "seed": tf.constant(4, tf.int64)})["images"] - images).max() > 0.1
    coded = flow["encode"](images=images)
    np.testing.assert_allclose(flow["decode"](z=coded["z"])["images"], images, atol=1e-4)
    log_normal = -0.5 * np.sum(np.square(coded["z"]), axis=-1) - 0.5 * 784 * np.log(2 * np.pi)
    np.testing.assert_allclose(flow["log_prob"](images=images)["log_prob"], log_normal + coded["log_det"], rtol=1e-5)
    # Of a model of digits a digit-like sample is more likely than noise.
    noise = tf.random.stateless_uniform(images.shape, (0, 0))
    assert np.min(flow["log_prob"](images=images)["log_prob"]) > np.max(flow["log_prob"](images=noise)["log_prob"])
    proven, mixings = re.search(r"Certificate: (\d+) of (\d+) mixings are proven", _card("mnist-flow")).groups()
    assert proven == mixings
