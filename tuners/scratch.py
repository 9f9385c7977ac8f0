"""Folders for what a process and those that it starts write for now; none outlives them for long.

The standard library alone, and little of it: the guard of a worker reads it too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

PREFIX = "advisor-"
_OWNER = "owner"
"""A file in each, locked as long as its process lives, whatever ends that."""


class Scratch:
    """A folder of this user's alone, until `remove`; one that a killed process left is `swept`."""

    def __init__(self) -> None:
        import tempfile

        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)
        new = self.path / "new"
        self._owner = new.open("wb")
        with contextlib.suppress(OSError):  # a file system without locks: none is swept there
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(self.path / _OWNER)  # never to be seen unlocked

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_exc: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove it with all that is in it."""
        self._folder.cleanup()
        self._owner.close()


def sweep(root: Path) -> None:
    """Remove what is in a folder of those whose processes are gone."""
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):  # it has no owner, or is another user's
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        _remove_left(Path(entry.path))


def _remove_left(folder: Path) -> None:
    """Remove a folder of this user's.

    Raises:
        OSError: its owner is there, or it was none of these.
    """
    owner = os.open(folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(owner).st_uid != os.geteuid():
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
        except OSError:  # what was just ended has written once more
            (folder / _OWNER).touch()
    finally:
        os.close(owner)
