"""Silences notices of TensorFlow and of converters that do not concern a user."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet(*names: str) -> Iterator[None]:
    """While this lasts, the loggers of these names are silent."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True  # and not a level, which absl sets again
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
