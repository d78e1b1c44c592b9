"""TensorFlow's start-up notices, which it writes whatever TF_CPP_MIN_LOG_LEVEL says (TensorFlow 2.21)."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

LEVEL = "TF_CPP_MIN_LOG_LEVEL"


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """While this lasts, compiled code writes to no terminal; what it has written is shown if an exception ends it.

    TF_CPP_MIN_LOG_LEVEL=0 in the environment shows everything. Python's own messages go the same way.
    """
    if os.environ.setdefault(LEVEL, "3") == "0":
        yield
        return
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), 2)
        try:
            yield
        except BaseException:
            _restore(terminal)
            aside.seek(0)
            with open(os.dup(2), "wb") as stderr:
                shutil.copyfileobj(aside, stderr)
            raise
        _restore(terminal)


def _restore(terminal: int) -> None:
    sys.stderr.flush()
    os.dup2(terminal, 2)
    os.close(terminal)
