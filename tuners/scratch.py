"""Temporary folders that are removed even if their process is killed.

Imports only a little of the standard library, because a worker's guard process imports this file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from pathlib import Path

FOLDER_PREFIX = "advisor."  # short: a socket's path has 107 bytes at most, TMPDIR included


class ScratchFolder:
    """A private folder that lasts until `remove`. Its process holds a lock on the folder; `sweep`
    removes the folders of killed processes."""

    def __init__(self) -> None:
        import tempfile

        new = Path(tempfile.mkdtemp(prefix=f".{FOLDER_PREFIX}"))
        lock = os.open(new, os.O_RDONLY)
        with contextlib.suppress(OSError):  # on a file system without locks nothing is swept
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = new.rename(new.with_name(new.name[1:]))  # it is never seen unlocked
        self.remove = weakref.finalize(self, _remove, self.path, lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_exc: object) -> None:
        self.remove()


def sweep(root: Path) -> None:
    import shutil

    for folder in root.glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # it is no folder, or its process lives
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _remove(folder: Path, lock: int) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
