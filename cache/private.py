"""Checks if another user could read, set or replace a file, like StrictModes of sshd_config(5)."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path


def insecure_reason(path: Path, descriptor: int, group_reads: bool = False) -> str:
    """How another user except root could have read or set an open file; '' if nobody could. With
    `group_reads`, the file's group may read it."""
    if not hasattr(os, "geteuid"):
        return ""
    try:
        found = last = os.fstat(descriptor)
        for step in _steps(path.absolute()):
            last = step.lstat()
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
    """How another user could replace one step of the path; '' if nobody could."""
    if found.st_uid not in (0, os.geteuid()):
        return f"{step} is another user's ({found.st_uid})"
    if stat.S_ISLNK(found.st_mode):
        return ""
    mode = stat.S_IMODE(found.st_mode)
    writers = mode & (stat.S_IWGRP | stat.S_IWOTH)
    own = mode & stat.S_ISVTX or (writers == stat.S_IWGRP and _is_private(found.st_gid))
    if not writers or (stat.S_ISDIR(found.st_mode) and own):
        return ""
    return f"others can write {step} (mode {mode:o})"


def _is_private(gid: int) -> bool:
    """Whether a group has no other member, as many systems make one for each user."""
    import grp
    import pwd

    try:
        name, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def _steps(path: Path, links: int = 40) -> Iterator[Path]:
    """Each folder and link on the path to a file, from the root on; the file itself is the last."""
    here = Path(path.anchor)
    yield here
    for part in path.parts[1:]:
        step = here.parent if part == ".." else here / part
        yield step
        if step.is_symlink():
            if not links:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            yield from _steps(here / step.readlink(), links - 1)
            step = step.resolve()
        here = step
