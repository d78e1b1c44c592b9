"""Imported before Keras, it imports Keras without TensorFlow's start-up notices. TF_CPP_MIN_LOG_LEVEL=0 shows them again.

TensorFlow 2.21 writes some of them to file descriptor 2 whatever the level is.
"""

import os
import sys

if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3") == "0":
    import keras
else:
    sys.stderr.flush()
    terminal, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        import keras  # noqa: F401
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(nowhere)
