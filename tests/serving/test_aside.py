import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from keras_auxref.serving import aside
from keras_auxref.serving.versions import versions, write_version

# A process without TensorFlow, which starts at once: the module needs nothing else of the package.
WRITER = f"""
import runpy, sys, time
from pathlib import Path
with runpy.run_path({aside.__file__!r})["writing_aside"](Path(sys.argv[1])) as folder:
    (folder / "half").write_text("")
    print(folder.name, flush=True)
    time.sleep(60)
"""


def _write(text):
    return lambda folder: (folder / "saved_model.pb").write_text(text)


@contextlib.contextmanager
def _another_process(path):
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path):
    with _another_process(tmp_path) as (process, name):
        write_version(tmp_path, _write("a"))
        assert sorted(os.listdir(tmp_path)) == [name, "1"]  # it is in progress
        process.kill()
        process.wait()
        assert (tmp_path / name / "half").exists()
        write_version(tmp_path, _write("b"))
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_what_another_thread_writes_stays(tmp_path):
    with aside.writing_aside(tmp_path) as first:
        with aside.writing_aside(tmp_path) as second:
            assert first.is_dir()
        assert not second.exists()
        assert first.is_dir()
    assert os.listdir(tmp_path) == []


def test_others_folders_stay(tmp_path):
    for name in (".writing-", ".writing-my letters", "writing-abcdefgh"):
        (tmp_path / name).mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".writing-symbolic").symlink_to(tmp_path / "elsewhere")
    (tmp_path / ".writing-linked_8").symlink_to(tmp_path / "elsewhere")
    before = sorted(os.listdir(tmp_path))
    with aside.writing_aside(tmp_path):
        pass
    assert sorted(os.listdir(tmp_path)) == before


def test_without_locks_age_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(aside, "fcntl", None)
    young, old = tmp_path / ".writing-abcdefgh", tmp_path / ".writing-01234567"
    for folder in (young, old):
        folder.mkdir()
    os.utime(old, (0, 0))
    with aside.writing_aside(tmp_path):
        assert young.exists()
        assert not old.exists()


def _exchanges(folder):
    for name in "ab":
        (folder / name).mkdir()
    return aside._exchange(folder / "a", folder / "b")


def test_who_watches_always_sees_a_version(tmp_path):
    if not _exchanges(tmp_path):
        pytest.skip("two folders cannot change places on this file system")
    path = tmp_path / "model"
    write_version(path, _write("0"))
    looks, missing, done = 0, 0, threading.Event()

    def watch():
        nonlocal looks, missing
        while not done.is_set():
            looks += 1
            missing += not os.path.exists(path / "1")

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(1, 201):
        write_version(path, _write(str(number)), overwrite=True)
        assert (path / "1" / "saved_model.pb").read_text() == str(number)
    done.set()
    watcher.join()
    assert looks > 200
    assert missing == 0
    assert os.listdir(path) == ["1"]


@pytest.mark.parametrize("broken", [False, True])
def test_where_folders_cannot_change_places(tmp_path, monkeypatch, broken):
    monkeypatch.setattr(aside, "_exchange", lambda source, target: False)
    write_version(tmp_path, _write("old"))
    rename, failures = os.rename, []

    def fail_at_the_second(source, target):
        if Path(source).name.startswith(aside.WRITING):
            failures.append(target)
            raise KeyboardInterrupt
        rename(source, target)

    if broken:
        monkeypatch.setattr(os, "rename", fail_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            write_version(tmp_path, _write("new"), overwrite=True)
        assert failures
    else:
        write_version(tmp_path, _write("new"), overwrite=True)
    assert (tmp_path / "1" / "saved_model.pb").read_text() == ("old" if broken else "new")
    assert os.listdir(tmp_path) == ["1"]


def test_a_version_that_was_being_replaced_comes_back(tmp_path):
    """Killed between the two steps, where they are two."""
    write_version(tmp_path, _write("only copy"))
    (tmp_path / ".replaced-abcdefgh").mkdir()
    os.rename(tmp_path / "1", tmp_path / ".replaced-abcdefgh" / "1")
    write_version(tmp_path, _write("new"))
    assert versions(tmp_path) == [1, 2]
    assert (tmp_path / "1" / "saved_model.pb").read_text() == "only copy"
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]
