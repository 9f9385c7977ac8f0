"""Folders and files as a store needs them, and whether a folder is on a network file system."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

MOUNTS = Path("/proc/self/mounts")
_NETWORK = re.compile(
    r"nfs\d?|lustre|gpfs|cifs|smb\w*|beegfs(_nodev)?|ceph|glusterfs|afs|9p|panfs|wekafs|orangefs"
    r"|pvfs2|ocfs2|gfs2?|virtiofs|fuse(\..+)?"
)
_ESCAPED = re.compile(r"\\([0-7]{3})")


def network(path: Path, mounts: Path = MOUNTS) -> str:
    """The type of the network or FUSE file system that a path is, or would be, on; '' for none.

    There SQLite corrupts: https://sqlite.org/faq.html#q5.

    Linux only: elsewhere there are no `mounts` to read, and the answer is ''.
    """
    try:
        table = mounts.read_text(errors="surrogateescape")
    except OSError:
        return ""
    place = path.resolve()
    best, kind = -1, ""
    for line in table.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        where = Path(_ESCAPED.sub(lambda found: chr(int(found[1], 8)), fields[1]))
        # Of several mounts over one another at a place, the last counts.
        if len(where.parts) >= best and (where == place or where in place.parents):
            best, kind = len(where.parts), fields[2]
    return kind if _NETWORK.fullmatch(kind) else ""


def make_folder(path: Path) -> None:
    """A folder and those above it that are missing, for their owner alone.

    Raises:
        OSError: one cannot be made.
    """
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)


def open_regular(path: Path) -> BinaryIO:
    """A file to read; not a pipe or a device, which a reader would wait for.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(22, "not a regular file")
    return os.fdopen(descriptor, "rb")
