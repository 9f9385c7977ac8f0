"""Temporary folders that are removed even if their process is killed.

The standard library alone, and little of it: the guard of a worker imports this file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

PREFIX = "advisor-"
_OWNER = "owner"
"""A file in each, locked while its process lives."""


class Scratch:
    """A private folder until `remove`; `sweep` removes those of killed processes."""

    def __init__(self) -> None:
        import tempfile

        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)
        new = self.path / "new"
        self._owner = new.open("wb")
        with contextlib.suppress(OSError):  # on a file system without locks nothing is swept
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(self.path / _OWNER)  # it is never seen unlocked

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_exc: object) -> None:
        self.remove()

    def remove(self) -> None:
        self._folder.cleanup()
        self._owner.close()


def sweep(root: Path) -> None:
    """Remove the scratch folders in `root` whose processes are gone."""
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):  # it has no owner, or its owner lives
                    _remove_left(Path(entry.path))


def _remove_left(folder: Path) -> None:
    owner = os.open(folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        uids = {os.fstat(owner).st_uid, folder.lstat().st_uid}
        if uids != {os.geteuid()}:
            return
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        import shutil

        for one in list(folder.iterdir()):
            if one.name != _OWNER:
                if one.is_dir() and not one.is_symlink():
                    shutil.rmtree(one, ignore_errors=True)
                else:
                    one.unlink()
        (folder / _OWNER).unlink()
        try:
            folder.rmdir()
        except OSError:  # a dying process has written once more
            (folder / _OWNER).touch()
    finally:
        os.close(owner)
