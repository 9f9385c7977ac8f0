"""Cores, memory and files that this host gives to a process. Linux only: elsewhere 0, or nothing.

Imports only the standard library, because a worker's guard process imports this file.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mimetypes
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

USABLE_SHARE = 0.95  # of a memory limit: at the limit the kernel kills any process under it
_PAGE = os.sysconf("SC_PAGE_SIZE")
_GROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
_PROCESS = _PROC / "self"
_PR_SET_DUMPABLE = 4
_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of control groups v2, then v1: limit, memory in use, and file cache as a part of that."""


def control(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def keep_private() -> None:
    """Prevent this user's other processes, but not root's, from reading this one's memory."""
    control(_PR_SET_DUMPABLE, 0)


def affinity() -> int:
    """Cores that this process may be scheduled on: the kernel keeps them within its cpuset."""
    there = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if there else os.cpu_count() or 1


def cores(groups: Path = _GROUPS, process: Path = _PROCESS) -> int:
    """Cores that this process may use, by its affinity and the quotas of its control groups."""
    found = [float(affinity())]
    for group in _groups(groups, process, "cpu"):
        for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
            quota = " ".join(_text(group / one) for one in names).split()
            if len(quota) == 2 and quota[0].isdigit():  # v2's 'max' is no quota, nor is v1's -1
                found.append(int(quota[0]) / int(quota[1]))
    return max(1, int(min(found)))


def memory_limit(groups: Path = _GROUPS, process: Path = _PROCESS) -> int:
    """Bytes that this process may use: the machine's memory, or a control group's lower limit."""
    limits = [limit for limit, _free in _memory(groups, process)]
    return int(USABLE_SHARE * min([os.sysconf("SC_PHYS_PAGES") * _PAGE, *limits]))


def free_bytes(groups: Path = _GROUPS, process: Path = _PROCESS) -> int:
    """Free bytes for this process: the least of the host's and its control groups'."""
    free = [free for _limit, free in _memory(groups, process)]
    return max(0, min([_field(_PROC / "meminfo", "MemAvailable:") * 1024, *free]))


def shared_bytes() -> tuple[int, int]:
    """Size and free bytes of /dev/shm, through which loader workers hand batches over."""
    with contextlib.suppress(OSError):
        there = os.statvfs("/dev/shm")
        return there.f_blocks * there.f_frsize, there.f_bavail * there.f_frsize
    return 0, 0


def files_left() -> int:
    """How many more files this process may open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(0, most - len(list((_PROCESS / "fd").iterdir())))


def own_bytes() -> int:
    """Private memory of this process, which a fork copies: reference counts write to its pages."""
    return _field(_PROCESS / "status", "RssAnon:") * 1024


def peak_bytes() -> int:
    """Peak memory of this process (proc(5), VmHWM)."""
    return _field(_PROCESS / "status", "VmHWM:") * 1024


def reset_peak() -> None:
    with contextlib.suppress(OSError):
        (_PROCESS / "clear_refs").write_text("5")


def resident_bytes(process: int) -> int:
    """Memory of a process, including memory that it shares with others."""
    said = _text(_PROC / str(process) / "statm").split()
    return int(said[1]) * _PAGE if len(said) > 1 else 0


def proportional_bytes(process: int) -> int:
    """As `resident_bytes`, but memory that several processes share is divided among them."""
    return _field(_PROC / str(process) / "smaps_rollup", "Pss:") * 1024 or resident_bytes(process)


def killed_for_memory() -> int:
    """How many processes of this host the kernel has killed so far for want of memory."""
    return _field(_PROC / "vmstat", "oom_kill")


def name(process: int) -> str:
    """The name of a process; '' if it has ended, or runs in another container."""
    return _text(_PROC / str(process) / "comm").strip()


def loaded_without(process: int, library: str, text: str) -> bool:
    """Whether a process has loaded a library, and no variable it began with holds this text."""
    # In this order: a child of a process with the library shows its parent's maps until it execs.
    began_with = _text(_PROC / str(process) / "environ")
    without = bool(began_with) and text not in began_with
    return without and library in _text(_PROC / str(process) / "maps")


@functools.cache
def cpu() -> str:
    """The text of /proc/cpuinfo on the first processor; the others are like it."""
    return _text(_PROC / "cpuinfo").partition("\n\n")[0]


def family(process: int) -> list[int]:
    """A process and all its descendants, except those whose parents have ended."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if entry.name.isdigit() and (said := _text(entry / "stat")):
            # The process's name may hold spaces and brackets: the fields follow the last bracket.
            parent = int(said.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [process]
    for one in found:
        found += children.get(one, [])
    return found


def files_read() -> list[str]:
    """Open files whose read position a fork would share with this process. Empty files, files that
    are mapped into memory, and fonts are left out: matplotlib keeps fonts open, and opens them
    again in a fork."""
    mapped = {line.split(maxsplit=5)[-1] for line in _text(_PROCESS / "maps").splitlines()}
    found = set()
    for entry, path in _descriptors():
        with contextlib.suppress(OSError):  # closed by now
            there = entry.stat()
            if int(entry.name) > 2 and stat.S_ISREG(there.st_mode) and there.st_size:
                said = _text(_PROCESS / "fdinfo" / entry.name).split()
                flags = int(said[said.index("flags:") + 1], 8) if "flags:" in said else 0
                font = (mimetypes.guess_type(path)[0] or "").startswith("font/")
                if flags & os.O_ACCMODE != os.O_WRONLY and path not in mapped and not font:
                    found.add(path)
    return sorted(found)


def held_open() -> list[str]:
    """Names of what a forked process would share with this one: `files_read` and connections."""
    return [*files_read(), *(path for _, path in _descriptors() if path.startswith("socket:"))]


def _descriptors() -> Iterator[tuple[Path, str]]:
    """Yields each open file descriptor of this process, and the path that it links to."""
    for entry in (_PROCESS / "fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this listing is closed by now
            yield entry, str(entry.readlink())


def _groups(groups: Path, process: Path, controller: str) -> Iterator[Path]:
    """Folders of a process's control groups: v2's, and v1's of a controller."""
    for line in _text(process / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = groups / controller if controllers else groups
            # Inside a container the path may be the host's, and the root is the group itself.
            folder = root / path.lstrip("/")
            yield from (at for at in (folder, *folder.parents) if root in (at, *at.parents))


def _memory(groups: Path, process: Path) -> Iterator[tuple[int, int]]:
    """(Limit, free) of each control group; inactive file cache is free: the kernel gives it up."""
    for group in _groups(groups, process, "memory"):
        for most, now, idle in _MEMORY:
            limit = _text(group / most).strip()
            if limit.isdigit():  # v2's 'max' is no limit
                held = int(_text(group / now) or 0) - _field(group / "memory.stat", idle)
                yield int(limit), int(limit) - held


def _field(file: Path, name: str) -> int:
    """The number after `name` in a file of lines 'name number'; 0 if no line has this name."""
    said = (line.split() for line in _text(file).splitlines())
    return next((int(words[1]) for words in said if words[:1] == [name] and len(words) > 1), 0)


def _text(file: Path) -> str:
    """The text of a file; '' if the file is gone or may not be read."""
    try:
        return file.read_text(errors="replace")  # a process may have any name
    except OSError:
        return ""
