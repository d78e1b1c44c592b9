"""Silences messages of TensorFlow and of converters that do not concern users."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet(*names: str) -> Iterator[None]:
    """A context in which the loggers with these names are silent."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True  # instead of a level, which absl resets
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
