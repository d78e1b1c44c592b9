"""Calls signatures of SavedModels in a process that has TensorFlow and neither Keras, TFP nor this package. Run, not imported.

    python plain_tensorflow.py cases.npz results.npz

Keys of the arrays in `cases.npz` are `folder|signature|case|input`, those of `results.npz` `folder|signature|case|output`.
"""

import logging
import sys

for name in ("keras", "tf_keras", "tensorflow_probability", "keras_auxref"):
    sys.modules[name] = None  # importing it raises ImportError

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402


class Warnings(logging.Handler):
    """TensorFlow warns through absl's logger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def main(cases: str, results: str) -> None:
    warnings = Warnings()
    for logger in ("absl", "tensorflow"):
        logging.getLogger(logger).addHandler(warnings)
    grouped: dict[tuple[str, str, str], dict[str, tf.Tensor]] = {}
    for key, value in np.load(cases).items():
        *call, name = key.split("|")
        grouped.setdefault(tuple(call), {})[name] = tf.constant(value)
    loaded, answers = {}, {}
    for (folder, signature, case), inputs in grouped.items():
        if folder not in loaded:
            loaded[folder] = tf.saved_model.load(folder)
        for name, value in loaded[folder].signatures[signature](**inputs).items():
            answers["|".join((folder, signature, case, name))] = value.numpy()
    np.savez(results, **answers)
    assert not warnings.messages, warnings.messages
    present = [name for name in sys.modules if name.split(".")[0] in ("keras_auxref", "tensorflow_probability")]
    assert all(sys.modules[name] is None for name in present), present


if __name__ == "__main__":
    main(*sys.argv[1:])
