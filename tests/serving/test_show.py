import subprocess
import sys

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
    main([str(flow)])
    shown = capsys.readouterr().out
    assert "tiny, version 12:" in shown
    for line in ("← images: (batch, 4, 4, 1) float32", "→ log_prob: (batch) float32", "← n: number, int32"):
        assert line in shown
    assert shown.index("serving_default") < shown.index("decode") < shown.index("sample")
    first = tf.io.decode_png((tmp_path / "tiny-samples.png").read_bytes()).numpy()
    assert first.shape[0] == first.shape[1] > 4 * 4 * 24
    assert len(np.unique(first)) > 20
    main([str(flow / "1"), "--output", "deep/again.png", "--samples", "16"])
    assert "tiny, version 1:" in capsys.readouterr().out
    np.testing.assert_array_equal(tf.io.decode_png((tmp_path / "deep" / "again.png").read_bytes()), first)
    main([str(flow), "--samples", "5", "--seed", "1", "--output", "other.png"])
    assert tf.io.decode_png((tmp_path / "other.png").read_bytes()).shape != first.shape


def test_a_classifier_has_no_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = keras.Sequential([keras.Input((None, 4)), AuxReflection(), keras.layers.Dense(3, activation="softmax")])
    export_saved_model(model, tmp_path / "model")
    main(["model"])
    assert "← inputs: (batch, any, 4) float32" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_as_a_command(tmp_path):
    done = subprocess.run([sys.executable, "-m", "keras_auxref.show", "nothing"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Expected a SavedModel, or a folder with numbered versions of one. Received: nothing" in done.stderr


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
