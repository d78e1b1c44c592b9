"""What compiled code writes to file descriptor 2 stays away from the terminal, unless it explains a failure."""

import os

import pytest

from experiments.harness.notices import LEVEL, silenced


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv(LEVEL, "3")


def test_silent_inside_and_not_after(capfd):
    with silenced():
        os.write(2, b"a notice\n")
    os.write(2, b"a message\n")
    assert capfd.readouterr().err == "a message\n"


def test_an_exception_shows_what_was_written(capfd):
    def fails():
        with silenced():
            os.write(2, b"the reason\n")
            raise ImportError("no library")

    with pytest.raises(ImportError, match="no library"):
        fails()
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "the reason\nafter\n"


def test_no_descriptor_is_left_open():
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    for _ in range(3):
        with silenced():
            pass
    assert len(os.listdir("/proc/self/fd") if before else []) == len(before)


def test_level_0_shows_everything(capfd, monkeypatch):
    monkeypatch.setenv(LEVEL, "0")
    with silenced():
        os.write(2, b"a notice\n")
    assert capfd.readouterr().err == "a notice\n"
