"""Whether another user could read, change or replace a file, as StrictModes of sshd_config(5)."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_MOST_LINKS = 40
"""On the way to a file, as Linux has it."""


def insecure_reason(path: Path, descriptor: int, group_reads: bool = False) -> str:
    """How another user except root could have read or set an open file; '' if none could.

    Args:
        path: what was opened.
        group_reads: its group may read it.
    """
    if not hasattr(os, "geteuid"):
        return ""
    try:
        found = os.fstat(descriptor)
        last = found
        for step, last in _steps(path):
            if fault := _fault(step, last):
                return fault
    except OSError as exc:
        return f"{path}: {exc.strerror or exc}"
    if not os.path.samestat(found, last):
        return f"{path} was replaced while it was read"
    readers = stat.S_IROTH if group_reads else stat.S_IRGRP | stat.S_IROTH
    if found.st_mode & readers:
        return f"others can read {path} (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _fault(step: Path, found: os.stat_result) -> str:
    """How another user could replace one step of the path; '' if none could."""
    if found.st_uid not in (0, os.geteuid()):
        return f"{step} is another user's ({found.st_uid})"
    if stat.S_ISLNK(found.st_mode):
        return ""
    mode = stat.S_IMODE(found.st_mode)
    writers = mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not writers or (stat.S_ISDIR(found.st_mode) and _bears(mode, writers, found.st_gid)):
        return ""
    return f"others can write {step} (mode {mode:o})"


def _bears(mode: int, writers: int, gid: int) -> bool:
    """Whether what lies in a folder is safe although others can write the folder: it is sticky, or
    its group has no other member."""
    return bool(mode & stat.S_ISVTX) or (writers == stat.S_IWGRP and _of_oneself(gid))


def _of_oneself(gid: int) -> bool:
    """Whether a group is the user's private one, as many systems make it for each user."""
    import grp
    import pwd

    try:
        name, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def _steps(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Each folder and link on the path to a file, from the root on; the file itself is the last.

    Raises:
        OSError: a step cannot be read, or the links go round in a circle.
    """
    at, *parts = path.absolute().parts
    here, ahead, links = Path(at), parts[::-1], 0
    yield here, here.lstat()
    while ahead:
        part = ahead.pop()
        if part == "..":
            here = here.parent
            continue
        step = here / part
        found = step.lstat()
        yield step, found
        if not stat.S_ISLNK(found.st_mode):
            here = step
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        there = step.readlink()
        if there.is_absolute():
            here = Path(there.anchor)
        ahead += [part for part in there.parts if part != there.anchor][::-1]
