import os
import threading

import pytest

from keras_auxref.serving.versions import versions, write_version


def _write(text):
    def write(folder):
        (folder / "saved_model.pb").write_text(text)

    return write


def _content(folder):
    return (folder / "saved_model.pb").read_text()


def test_numbers_go_up_and_nothing_is_overwritten(tmp_path):
    path = tmp_path / "deep" / "model"
    assert versions(path) == []
    assert write_version(path, _write("a")) == path / "1"
    assert write_version(path, _write("b")) == path / "2"
    assert write_version(path, _write("c"), version=10) == path / "10"
    assert write_version(path, _write("d")) == path / "11"  # by number: as text, 2 comes last
    (path / "notes").mkdir()
    (path / "12").write_text("a file")
    assert versions(path) == [1, 2, 10, 11]
    assert [_content(path / str(n)) for n in versions(path)] == ["a", "b", "c", "d"]
    assert write_version(path, _write("e")) == path / "13"


def test_a_version_is_replaced_only_when_asked(tmp_path):
    write_version(tmp_path, _write("a"))
    write_version(tmp_path, _write("b"))
    called = []
    with pytest.raises(FileExistsError, match=r"Received: .*1\. Pass overwrite=True"):
        write_version(tmp_path, called.append, version=1)
    assert not called  # refused before the work
    write_version(tmp_path, _write("new a"), version=1, overwrite=True)
    write_version(tmp_path, _write("new b"), overwrite=True)
    assert [_content(tmp_path / n) for n in ("1", "2")] == ["new a", "new b"]
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_a_version_appears_whole(tmp_path):
    seen = []

    def write(folder):
        (folder / "saved_model.pb").write_text("half")
        seen.extend(versions(tmp_path))
        assert folder.parent == tmp_path
        assert not folder.name.isdigit()

    write_version(tmp_path, write)
    assert seen == []
    assert versions(tmp_path) == [1]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failure_keeps_what_was_there(tmp_path, overwrite):
    write_version(tmp_path, _write("a"))

    def fail(folder):
        (folder / "saved_model.pb").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_version(tmp_path, fail, overwrite=overwrite)
    assert os.listdir(tmp_path) == ["1"]
    assert _content(tmp_path / "1") == "a"


def test_several_at_once_get_a_number_each(tmp_path):
    barrier = threading.Barrier(8)

    def export(i):
        def write(folder):
            barrier.wait()
            _write(str(i))(folder)

        write_version(tmp_path, write)

    threads = [threading.Thread(target=export, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert versions(tmp_path) == list(range(1, 9))
    assert {_content(tmp_path / str(n)) for n in range(1, 9)} == {str(i) for i in range(8)}


def test_bad_folders_and_numbers(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="Expected a folder"):
        write_version(tmp_path / "file", _write("a"))
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "saved_model.pb").write_text("")
    with pytest.raises(FileExistsError, match="Give the folder around it"):
        write_version(tmp_path / "1", _write("a"))
    for version in (-1, "2", 1.5, True):
        with pytest.raises(ValueError, match=r"`version` must be None or a whole number. Expected None, 0, 1, 2, …"):
            write_version(tmp_path, _write("a"), version=version)
