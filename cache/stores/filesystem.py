"""File operations for stores, and whether a folder is on a network file system."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import secrets
import shutil
import stat
import time
from pathlib import Path
from typing import BinaryIO

from advisor.errors import StoreError, UsageError, reason

MOUNTS = Path("/proc/self/mounts")
WRITING = ".writing-"  # how the names of unfinished files begin
REMEDY = "point --cache or ADVISOR_CACHE to another folder"
_ABANDONED_S = 3600.0  # an unfinished file of this age has lost its writer
_NETWORK = re.compile(
    r"nfs\d?|lustre|gpfs|cifs|smb\w*|beegfs(_nodev)?|ceph|glusterfs|afs|9p|panfs|wekafs|orangefs"
    r"|pvfs2|ocfs2|gfs2?|virtiofs|fuse(\..+)?"
)
_STUDY = re.compile(r"[0-9a-f][0-9a-f@-]{0,120}(\.[a-z]{1,12}){0,2}")
_ESCAPED = re.compile(r"\\([0-7]{3})")


def network(path: Path, mounts: Path = MOUNTS) -> str:
    """The type of the network or FUSE file system of a path, even one that does not exist; or ''.
    There SQLite corrupts: https://sqlite.org/faq.html#q5. Linux only."""
    try:
        table = mounts.read_text(errors="surrogateescape")
        place = path.resolve()
    except (OSError, RuntimeError):  # no current folder; links in a circle
        return ""
    best, kind = -1, ""
    for fields in (line.split(" ") for line in table.splitlines()):
        if len(fields) < 3:
            continue
        where = Path(_ESCAPED.sub(lambda found: chr(int(found[1], 8)), fields[1]))
        # If several mounts cover the same place, the last one counts.
        if len(where.parts) >= best and place.is_relative_to(where):
            best, kind = len(where.parts), fields[2]
    return kind if _NETWORK.fullmatch(kind) else ""


def make_folder(path: Path) -> None:
    """Make a folder and the missing ones above it, for their owner alone. Raises OSError."""
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically; its folder is made if it is missing. Raises OSError."""
    make_folder(path.parent)
    _remove_abandoned(path.parent)
    temporary = path.with_name(f"{WRITING}{os.getpid()}-{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as exc:
        exc.filename = str(path)  # a full disk names no file
        raise
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # so that the file's entry is on disk too
    finally:
        os.close(folder)


@functools.cache
def _remove_abandoned(folder: Path) -> None:
    """Remove unfinished files of killed writers; once a process, as a folder may be large."""
    before = time.time() - _ABANDONED_S
    for path in folder.glob(f"{WRITING}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime < before:
                path.unlink()


def remove_folder(path: Path) -> None:
    """Remove a folder and all that is in it, read-only folders included, as far as possible."""
    for root, folders, _files in os.walk(path):
        for name in folders:
            folder = Path(root, name)
            with contextlib.suppress(OSError):
                if not folder.is_symlink():
                    folder.chmod(stat.S_IRWXU)
    shutil.rmtree(path, ignore_errors=True)


def check_folder(store: Path, folder: Path) -> None:
    """Raise StoreError if a folder of a store cannot take files. The folder need not exist yet."""
    there = next((one for one in (folder, *folder.parents) if os.path.lexists(one)), folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "cannot be written" if there.is_dir() else "is not a folder"
        raise StoreError(f"cache {store}: {there} {why}; {REMEDY}")


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read. Raises OSError, also for a pipe or device, which could block."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, most: int) -> bytes:
    """The content of a file. Raises OSError, also if it has more than `most` bytes."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size <= most:
            data = file.read(most + 1)
            if len(data) <= most:
                return data
    raise OSError(errno.EFBIG, f"larger than {most} bytes")


def absolute_path(path: str | Path) -> Path:
    """The absolute path; '~' is the user's home. Raises UsageError if the user has none, or if the
    current folder is gone."""
    try:
        return Path(path).expanduser().absolute()
    except (OSError, RuntimeError, ValueError) as exc:
        raise UsageError(f"cache {str(path)!r}: {reason(exc)}; give an absolute path") from exc


def study_file(folder: Path, name: str) -> Path:
    """The path of a file in a folder of studies; neither need exist yet. Raises UsageError if
    `name` is not a study's, StoreError if the folder or the file is a link."""
    if not _STUDY.fullmatch(name):
        raise UsageError(f"study {name[:80]!r}: expected KEY@BATCH, e.g. ae1bff61eea5@64")
    return not_a_link(not_a_link(folder) / name)


def not_a_link(path: Path) -> Path:
    if path.is_symlink():
        raise StoreError(f"{path}: is a link and is not followed; remove it")
    return path
