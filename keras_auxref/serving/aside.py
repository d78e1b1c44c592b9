"""Folders that are written under a temporary name and put into place in one step; leftovers of killed processes are removed."""

import contextlib
import ctypes
import errno
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

WRITING, REPLACED = ".writing-", ".replaced-"
_LEFT_OVER = re.compile(r"\.(writing|replaced)-\w{8}")  # as `tempfile` names them
_OLD_SECONDS = 24 * 3600
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


@contextlib.contextmanager
def writing_aside(parent: Path) -> Iterator[Path]:
    """A new folder in `parent` with a hidden name that is not a number; at the end it is removed, unless it was moved away.

    First, such folders of processes that no longer exist are removed. A lock, which ends with its process in any case,
    distinguishes them from those in use; on file systems without locks, an age of one day does.
    """
    with _locked(parent):  # nobody removes what is not locked yet
        _clear(parent)
    with _own(parent, WRITING) as folder:
        yield folder


def put(source: Path, target: Path) -> None:
    """Moves a folder to `target`, replacing what is there.

    On Linux the two are exchanged in one step, so `target` always exists; the old one is then at `source`. On other
    systems, and on file systems that cannot do this, `target` is missing for a moment.
    """
    if not target.exists():
        os.rename(source, target)
    elif not _exchange(source, target):
        with _own(target.parent, REPLACED) as old:
            os.rename(target, old / target.name)
            try:
                os.rename(source, target)
            except BaseException:
                os.rename(old / target.name, target)
                raise


def _exchange(source: Path, target: Path) -> bool:
    """Exchanges two paths, and returns whether that succeeded."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    if rename(_HERE, os.fsencode(source), _HERE, os.fsencode(target), _EXCHANGE) == 0:
        return True
    if (number := ctypes.get_errno()) in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(source), None, str(target))


@contextlib.contextmanager
def _own(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder, locked; it is removed at the end."""
    with contextlib.ExitStack() as stack:
        with _locked(parent):
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.enter_context(_locked(folder, wait=False))
        yield folder


def _clear(parent: Path) -> None:
    for folder in [Path(entry.path) for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False)]:
        if not _LEFT_OVER.fullmatch(folder.name):
            continue
        with contextlib.suppress(OSError), _locked(folder, wait=False) as free:
            if not (free or (free is None and time.time() - folder.stat().st_mtime > _OLD_SECONDS)):
                continue
            for child in folder.iterdir() if folder.name.startswith(REPLACED) else ():
                if not (parent / child.name).exists():  # killed between the two steps: this is the version
                    os.rename(child, parent / child.name)
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path, wait: bool = True) -> Iterator[bool | None]:
    """A context in which a folder is locked; yields whether that succeeded, or None if there are no locks."""
    if fcntl is None:
        yield None
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        free: bool | None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            free = True
        except BlockingIOError:
            free = False
        except OSError:
            free = None
        yield free
    finally:
        os.close(handle)
