"""Numbered folders, as TensorFlow Serving expects them, each of which appears complete or not at all."""

import os
from collections.abc import Callable
from pathlib import Path

from keras_auxref.ops.checks import whole_number_or_none
from keras_auxref.serving.aside import put, writing_aside

_ATTEMPTS = 100


def versions(path: Path) -> list[int]:
    """The version numbers under a folder, in order; none for a folder that does not exist."""
    return sorted(int(child.name) for child in _numbered(path) if child.is_dir())


def _numbered(path: Path) -> list[Path]:
    children = path.iterdir() if path.is_dir() else ()
    return [child for child in children if child.name.isascii() and child.name.isdigit()]


def write_version(path: Path, write: Callable[[Path], None], version: int | None = None, overwrite: bool = False) -> Path:
    """Lets `write` fill a temporary folder and renames that to the next free version number under `path`, or to `version`.

    A server that watches `path` only looks at folders whose name is a number, so it never sees an incomplete model. Existing
    versions stay, unless `overwrite` allows one to be replaced: `version` or, if that is None, the newest. The new one then
    takes its place in one step, if the system can do that. Leftovers of killed exports under `path` are removed.

    Returns:
        The folder of the version.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"A model is exported into a folder of versions. Expected a folder. Received a file: {path}")
    if (path / "saved_model.pb").exists():
        raise FileExistsError(
            f"Expected a folder of numbered versions, or none. Received a SavedModel itself: {path}. Give the folder around it."
        )
    version = whole_number_or_none("version", version, least=0)
    if version is None and overwrite:
        version = max(versions(path), default=1)
    if version is not None and not overwrite:
        _refuse_existing(path, version)  # before the work, and again after it
    path.mkdir(parents=True, exist_ok=True)
    with writing_aside(path) as aside:  # on the same disk, so that renaming is one step
        write(aside)
        aside.chmod(0o755)  # so that a server run by another user can read it
        return _place(aside, path, version, overwrite)


def _refuse_existing(path: Path, version: int) -> None:
    if (path / str(version)).exists():
        raise FileExistsError(
            f"Expected a version that does not exist yet. Received: {path / str(version)}. Pass overwrite=True to replace it, or "
            "no version for the next free one."
        )


def _place(aside: Path, path: Path, version: int | None, overwrite: bool) -> Path:
    if version is not None:
        target = path / str(version)
        if overwrite:
            put(aside, target)
        else:
            _refuse_existing(path, version)
            os.rename(aside, target)
        return target
    for _ in range(_ATTEMPTS):
        target = path / str(max([0, *(int(child.name) for child in _numbered(path))]) + 1)
        try:
            os.rename(aside, target)
        except OSError:
            if not target.exists():
                raise
            continue  # another export has taken the number
        return target
    raise FileExistsError(f"Found no free version under {path}: others take them as fast as this process asks.")
