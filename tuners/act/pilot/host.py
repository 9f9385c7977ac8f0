"""What this host gives to the processes that a script starts, for loading data. Linux."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_PROCESS = Path("/proc/self")
_SHARED = Path("/dev/shm")


def cores(groups: Path = _GROUPS, process: Path = _PROCESS) -> int:
    """Those that this process may use, by its affinity and its control groups."""
    found = [float(len(os.sched_getaffinity(0)))]
    for group in _groups(groups, process):
        for said in _lines(group / "cpu.max"):
            quota, _, period = said.partition(" ")
            found += [int(quota) / int(period)] if quota != "max" else []
    return max(1, int(min(found)))


def free_bytes(groups: Path = _GROUPS, process: Path = _PROCESS) -> int:
    """Of memory, by the host and the control groups of this process."""
    found = [_kib(Path("/proc/meminfo"), "MemAvailable")]
    for group in _groups(groups, process):
        for most, now in zip(
            _lines(group / "memory.max"), _lines(group / "memory.current"), strict=False
        ):
            found += [int(most) - int(now)] if most != "max" else []
    return max(0, min(found))


def own_bytes(process: Path = _PROCESS) -> int:
    """Of memory, that this process holds of its own: of which what it forks may need a copy, as
    Python writes to whatever it looks at."""
    return _kib(process / "status", "RssAnon")


def shared_bytes() -> int:
    """Of the memory through which worker processes hand batches over, used or not."""
    try:
        there = os.statvfs(_SHARED)
    except OSError:
        return 0
    return there.f_blocks * there.f_frsize


def files_read(process: Path = _PROCESS) -> list[str]:
    """Files that this process reads by position: one that it forks moves that position for both.

    What is mapped is read without one, and what is empty not at all.
    """
    mapped = {line.split(maxsplit=5)[-1] for line in _lines(process / "maps")}
    return sorted({path for path in _open_to_read(process) if path not in mapped})


def _open_to_read(process: Path) -> Iterator[str]:
    for entry in (process / "fd").iterdir():
        try:
            there, path = entry.stat(), str(entry.readlink())
        except OSError:  # the one that this folder is read by, gone by now
            continue
        if int(entry.name) <= 2 or not stat.S_ISREG(there.st_mode) or not there.st_size:
            continue
        said = dict(line.split(":", 1) for line in _lines(process / "fdinfo" / entry.name))
        if int(said.get("flags", "0"), 8) & os.O_ACCMODE != os.O_WRONLY:
            yield path


def _groups(groups: Path, process: Path) -> Iterator[Path]:
    """The folders of a process's control group (v2) and of those that it is in."""
    for line in _lines(process / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folder = groups / path.lstrip("/")
            yield from (at for at in (folder, *folder.parents) if groups in (at, *at.parents))


def _kib(file: Path, name: str) -> int:
    """A size in KiB that a file of lines 'name: 1 kB' tells, in bytes."""
    said = next((line.split() for line in _lines(file) if line.startswith(f"{name}:")), [])
    return int(said[1]) * 1024 if len(said) > 1 else 0


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
