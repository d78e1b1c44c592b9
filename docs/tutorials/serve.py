# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     name: python3
#   language_info:
#     name: python
#     pygments_lexer: ipython3
# ---

# %% [markdown]
# # Train, export, serve and call
#
# From a model in Python to answers over HTTP: we train a classifier, export it as a TensorFlow SavedModel, load it
# without this package, start a server, send requests, and publish a second version.

# %%
import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from keras_auxref import SVDDense, export_saved_model

keras.utils.set_random_seed(1)

# %% [markdown]
# ## Train
#
# `SVDDense` is a dense layer that trains its singular value decomposition: U and V are auxiliary reflections.

# %%
digits = load_digits()
x_train, x_test, y_train, y_test = train_test_split(
    (digits.data / 16).astype("float32"), digits.target, test_size=0.25, random_state=0
)
model = keras.Sequential(
    [
        keras.Input((64,)),
        SVDDense(map="aux", activation="relu", use_bias=True),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x_train, y_train, batch_size=32, epochs=20, verbose=0)
accuracy = model.evaluate(x_test, y_test, verbose=0)[1]
print(f"test accuracy: {accuracy:.3f}")

# %% [markdown]
# ## Export
#
# This takes one line. The folder has a sub-folder for each version, as TensorFlow Serving expects.

# %%
home = Path(tempfile.mkdtemp())
folder = export_saved_model(model, home / "digits")
for file in sorted(folder.rglob("*")):
    if file.is_file():
        print(f"{file.relative_to(home)}  {file.stat().st_size:,} bytes")

# %% [markdown]
# The folder is complete: a process with nothing but TensorFlow can load it. We start one that cannot import
# this package or TensorFlow Probability.

# %%
program = """
import sys
for name in ("keras_auxref", "tensorflow_probability"):
    sys.modules[name] = None  # importing it raises
import numpy as np
import tensorflow as tf

served = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
answer = served(inputs=np.load(sys.argv[2]))
print({name: tuple(tensor.shape) for name, tensor in answer.items()})
np.save(sys.argv[2], answer["probabilities"])
"""
np.save(home / "rows.npy", x_test[:5])
run = subprocess.run([sys.executable, "-c", program, folder, home / "rows.npy"], capture_output=True, text=True, check=True)
print(run.stdout.strip())
print("largest difference to the model:", np.abs(np.load(home / "rows.npy") - model.predict(x_test[:5], verbose=0)).max())

# %% [markdown]
# ## Serve
#
# TensorFlow Serving takes the folder as it is. `examples/serve.py` answers the same requests on Ray Serve
# (`pip install -e '.[serve]'`). In a shell this is `python examples/serve.py digits --keep 2`. Here we start it from
# Python, on a free port, and wait until it is ready.

# %%
root = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "examples" / "serve.py").exists())
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
url = f"http://127.0.0.1:{port}/v1/models/digits"


def get(address):
    with urllib.request.urlopen(address, timeout=30) as response:
        return json.loads(response.read())


command = [sys.executable, root / "examples" / "serve.py", home / "digits", "--port", str(port), "--keep", "2"]

# %% tags=["remove-cell"]
# Where Ray is too much to ask for, another script with the same models.
if "TUTORIAL_SERVER" in os.environ:
    command[1] = root / os.environ["TUTORIAL_SERVER"]

# %%
server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
while server.poll() is None:  # half a minute; if it ends, it has said why
    try:
        print(get(url)["model_version_status"])
        break
    except OSError:
        time.sleep(0.5)

# %% tags=["remove-cell"]
atexit.register(server.terminate)  # whatever fails below


# %% [markdown]
# ## Call
#
# Rows in, rows out. Any language with HTTP and JSON will do; in Python the standard library is enough.


# %%
def predict(rows):
    body = json.dumps({"instances": np.asarray(rows).tolist()}).encode()
    request = urllib.request.Request(f"{url}:predict", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read())["predictions"]


for row, truth in zip(predict(x_test[:5]), y_test, strict=False):
    print(f"class {row['class']} with probability {max(row['probabilities']):.3f}, truth {truth}")

served = np.array([row["class"] for row in predict(x_test)])
print(f"test accuracy over HTTP: {np.mean(served == y_test):.3f}")
begin = time.perf_counter()
for _ in range(50):
    predict(x_test[:1])
print(f"one row at a time: {(time.perf_counter() - begin) / 50 * 1000:.1f} ms a request")

# %% tags=["remove-cell"]
assert abs(np.mean(served == y_test) - accuracy) < 1e-6

# %% [markdown]
# A request that does not fit is refused, with the reason:

# %%
try:
    predict(x_test[:1, :63])
except urllib.error.HTTPError as error:
    print(error.code, json.loads(error.read())["error"])

# %% [markdown]
# ## A second version
#
# We continue training and export again: the new version gets the next number. The server picks it up by itself, within
# seconds, and loses no request. With `--keep 2` the old version is still served as well.

# %%
model.fit(x_train, y_train, batch_size=32, epochs=10, verbose=0)
print("exported version", export_saved_model(model, home / "digits").name)
while get(f"{url}/metadata")["model_spec"]["version"] != "2":
    time.sleep(0.5)
print(f"test accuracy over HTTP: {np.mean(np.array([row['class'] for row in predict(x_test)]) == y_test):.3f}")

# %% [markdown]
# To roll back, remove the new version:

# %%
(home / "digits" / "2").rename(home / "digits" / "2.bad")
while get(f"{url}/metadata")["model_spec"]["version"] != "1":
    time.sleep(0.5)
again = np.array([row["class"] for row in predict(x_test)])
print(f"test accuracy over HTTP: {np.mean(again == y_test):.3f}")
server.send_signal(signal.SIGTERM)
server.wait(120)

# %% tags=["remove-cell"]
assert abs(np.mean(again == y_test) - accuracy) < 1e-6

# %% [markdown]
# [Serving](../serving.md) has every option, the requests of a flow, limits, a cluster, TensorFlow Serving and Kubernetes.
