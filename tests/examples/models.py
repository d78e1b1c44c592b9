"""Small SavedModels for the tests of serving, and a client."""

import contextlib
import http.client
import json
import math
import os
from pathlib import Path

import tensorflow as tf


class Classifier(tf.Module):
    def __init__(self, scale):
        super().__init__()
        self.w = tf.Variable(scale * tf.reshape(tf.linspace(-1.0, 1.0, 64 * 10), (64, 10)))

    @tf.function(input_signature=[tf.TensorSpec([None, 64], tf.float32, name="x")])
    def classify(self, x):
        p = tf.nn.softmax(x @ self.w)
        return {"probabilities": p, "class": tf.argmax(p, -1)}


class Flow(tf.Module):
    """Uniform on [0, 2/3]⁴⁸, so that an image outside has a log-likelihood of -Infinity."""

    def __init__(self):
        super().__init__()
        self.scale = tf.Variable(1.5)

    @tf.function(input_signature=[tf.TensorSpec([None, 4, 4, 3], tf.float32, name="images")])
    def log_prob(self, images):
        inside = tf.reduce_all((images >= 0) & (images * self.scale <= 1), (1, 2, 3))
        return {"log_prob": tf.where(inside, 48 * tf.math.log(self.scale), -math.inf)}

    @tf.function(input_signature=[tf.TensorSpec([None, 4, 4, 3], tf.float32, name="images")])
    def encode(self, images):
        log_det = tf.fill(tf.shape(images)[:1], 48 * tf.math.log(self.scale))
        return {"z": tf.reshape(self.scale * images, (-1, 48)), "log_det": log_det}

    @tf.function(input_signature=[tf.TensorSpec([None, 48], tf.float32, name="z")])
    def decode(self, z):
        return {"images": tf.reshape(z / self.scale, (-1, 4, 4, 3))}

    @tf.function(
        input_signature=[
            tf.TensorSpec([], tf.int32, name="n"),
            tf.TensorSpec([], tf.int64, name="seed"),
            tf.TensorSpec([], tf.float32, name="temperature"),
        ]
    )
    def sample(self, n, seed, temperature):
        with tf.control_dependencies([tf.debugging.assert_non_negative(temperature, "temperature is negative")]):
            images = tf.random.stateless_uniform(tf.stack([n, 4, 4, 3]), tf.stack([seed, 0]))
        return {"images": temperature * images / self.scale}


class Gate(tf.Module):
    """y = x, when nothing has been written to a file. A named pipe in its place holds requests until its other end is opened."""

    def __init__(self, file: Path):
        super().__init__()
        self.file = str(file)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, name="x")])
    def wait(self, x):
        with tf.control_dependencies([tf.io.write_file(self.file, "")]):
            return {"y": tf.identity(x)}


def write_classifier(folder: Path, version: int) -> None:
    """A version of the classifier: its scale is its number. It appears whole, as those of `export_saved_model` do."""
    model = Classifier(version)
    aside = folder.parent / f"{folder.name}-{version}-aside"
    tf.saved_model.save(model, str(aside), {"serving_default": model.classify})
    folder.mkdir(exist_ok=True)
    aside.rename(folder / str(version))


def write_flow(folder: Path) -> None:
    flow = Flow()
    functions = {name: getattr(flow, name) for name in ("log_prob", "encode", "decode", "sample")}
    tf.saved_model.save(flow, str(folder / "1"), {"serving_default": flow.log_prob, **functions})


def write_gate(folder: Path, file: Path) -> None:
    file.touch()
    model = Gate(file)
    tf.saved_model.save(model, str(folder / "1"), {"serving_default": model.wait})


@contextlib.contextmanager
def closed(file: Path):
    """Holds the requests to a `Gate`; yields what lets them go, once and for all."""
    aside, opened = file.with_suffix(".aside"), []

    def let_go():
        opened.append(os.open(file, os.O_RDWR))  # the other end, for those who wait
        aside.touch()
        aside.replace(file)  # for those who come

    os.mkfifo(aside)
    aside.replace(file)
    try:
        yield let_go
    finally:
        if not opened:
            let_go()
        os.close(opened[0])


def call(port, path, content=None, method=None, headers=None, timeout=120):
    """Status and JSON of one request over a connection of its own."""
    body = content if content is None or isinstance(content, bytes) else json.dumps(content).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, body, headers or {})
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"{}")
    finally:
        connection.close()
