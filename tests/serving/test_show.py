import os
import runpy
import sys
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import AuxReflection, Glow, export_saved_model
from keras_auxref.serving.show import find_version, main, mosaic


@pytest.fixture(scope="module")
def flow(tmp_path_factory):
    model = Glow((4, 4, 1), levels=1, steps=1, hidden=2, mixing="conv", seed=0)
    path = tmp_path_factory.mktemp("exported") / "tiny"
    export_saved_model(model, path)
    export_saved_model(model, path, version=12)
    return path


def test_prints_signatures_and_draws_samples(flow, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    main([str(flow)])
    assert [path.name for path in tmp_path.iterdir()] == ["temporary"]  # nothing is left where it was called
    shown = capsys.readouterr().out
    assert "tiny, version 12:" in shown
    for line in ("← images: (batch, 4, 4, 1) float32", "→ log_prob: (batch) float32", "← n: number, int32"):
        assert line in shown
    assert shown.index("serving_default") < shown.index("decode") < shown.index("sample")
    first = tf.io.decode_png((tmp_path / "temporary" / "tiny-samples.png").read_bytes()).numpy()
    assert first.shape[0] == first.shape[1] > 4 * 4 * 24
    assert len(np.unique(first)) > 20
    main([str(flow / "1"), "--output", "deep/again.png", "--samples", "16"])
    assert "tiny, version 1:" in capsys.readouterr().out
    again = tf.io.decode_png((tmp_path / "deep" / "again.png").read_bytes()).numpy()
    np.testing.assert_allclose(again, first, rtol=0, atol=1)  # a last digit may change a grey by one
    main([str(flow), "--samples", "5", "--seed", "1", "--output", "other.png"])
    assert tf.io.decode_png((tmp_path / "other.png").read_bytes()).shape != first.shape


def test_a_classifier_has_no_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = keras.Sequential([keras.Input((None, 4)), AuxReflection(), keras.layers.Dense(3, activation="softmax")])
    export_saved_model(model, tmp_path / "model")
    main(["model"])
    assert "← inputs: (batch, any, 4) float32" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(list(map(str, arguments)))
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_wrong_arguments_get_a_sentence(flow, tmp_path, capsys):
    broken = tmp_path / "broken" / "1"
    broken.mkdir(parents=True)
    (broken / "saved_model.pb").write_bytes(b"not a model")
    (tmp_path / "file").write_text("")
    for arguments, expected in (
        (["nothing"], "Expected a SavedModel, or a folder with numbered versions of one. Received: nothing"),
        ([broken.parent], "Expected a SavedModel. Received one that does not load"),
        ([tmp_path / "file"], "Expected a SavedModel, or a folder"),
        ([flow, "--samples", "-1"], "expected a whole number from 0 to 10000, received -1"),
        ([flow, "--samples", str(2**40)], "from 0 to 10000"),
        ([flow, "--seed", str(2**63)], "expected a whole number of 64 bits"),
        ([flow, "--temperature", "-1"], "expected a number of at least 0, received -1"),
        ([flow, "--temperature", "nan"], "received nan"),
        ([flow, "--output", tmp_path], "expected a file, received a folder"),
        ([flow, "--output", tmp_path / "file" / "a.png"], "expected a file that can be written"),
    ):
        assert expected in refusal(capsys, *arguments)


def test_help_says_that_a_model_is_a_program(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "to load one is to run it" in " ".join(capsys.readouterr().out.split())


def test_a_signature_of_the_same_name_is_not_taken_for_a_flow(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    module = tf.Module()
    module.sample = tf.function(lambda x: {"y": x}, input_signature=[tf.TensorSpec([None], tf.float32, name="x")])
    tf.saved_model.save(module, str(tmp_path / "other" / "1"), {"sample": module.sample})
    main(["other"])
    assert "← x: (batch) float32" in capsys.readouterr().out
    assert os.listdir(tmp_path) == ["other"]


def test_as_a_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["show", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("keras_auxref.show", run_name="__main__")
    assert caught.value.code == 2
    assert "usage: python -m keras_auxref.show" in capsys.readouterr().err


def test_find_version(flow):
    assert find_version(flow) == flow / "12"
    assert find_version(flow / "1") == flow / "1"


@pytest.mark.parametrize(("count", "channels", "rows", "columns"), [(1, 3, 1, 1), (5, 1, 2, 3), (9, 3, 3, 3), (2, 4, 1, 2)])
def test_mosaic(count, channels, rows, columns):
    images = np.arange(count, dtype="float32")[:, None, None, None] / count * np.ones((1, 32, 32, channels), "float32")
    canvas = mosaic(images)
    assert canvas.shape == (rows * 97 + 1, columns * 97 + 1, channels if channels == 3 else 1)
    for i in range(count):
        top, left = (i // columns) * 97 + 1, (i % columns) * 97 + 1
        np.testing.assert_array_equal(canvas[top : top + 96, left : left + 96], np.float32(i / count))
        assert canvas[top - 1, left - 1, 0] == 1
