"""What this host gives to a process and to what it starts. Linux; elsewhere 0, or nothing.

The standard library alone: the guard of a worker reads it too, which imports nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

SHARE = 0.95
"""Of a limit that may be used: at the limit itself the kernel kills, and not always the worker."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_GROUPS = Path("/sys/fs/cgroup")
_PROCESS = Path("/proc/self")
_SHARED = Path("/dev/shm")
_PR_SET_DUMPABLE = 4


def control(option: int, value: int) -> None:
    """prctl(2), where there is one."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def keep_private() -> None:
    """No other process of this user is to read tokens out of this one's environment, or its memory.
    One of root's can."""
    control(_PR_SET_DUMPABLE, 0)


def cores(groups: Path = _GROUPS, process: Path = _PROCESS) -> int:
    """Those that this process may use, by its affinity, which the kernel keeps within its cpuset,
    and the quotas of its control groups (v2 or v1)."""
    found = [float(len(os.sched_getaffinity(0)))]
    quotas = [
        said.partition(" ")[::2]
        for group in _groups(groups, process)
        for said in _lines(group / "cpu.max")
    ]
    for group in _groups(groups, process, "cpu"):
        quotas += zip(
            _lines(group / "cpu.cfs_quota_us"), _lines(group / "cpu.cfs_period_us"), strict=False
        )
    # 'max' is no quota, nor is v1's -1.
    found += [int(quota) / int(period) for quota, period in quotas if quota.isdigit()]
    return max(1, int(min(found)))


def memory_limit(groups: Path = _GROUPS, process: Path = _PROCESS) -> int:
    """Bytes that may be used: the machine's, or less where a control group says so (v2 or v1)."""
    v2 = [group / "memory.max" for group in _groups(groups, process)]
    v1 = [group / "memory.limit_in_bytes" for group in _groups(groups, process, "memory")]
    # 'max' is none at all.
    said = [int(said) for file in (*v2, *v1) for said in _lines(file) if said.isdigit()]
    known = [one for one in (_total(), *said) if 0 < one < 2**60]
    return int(SHARE * min(known)) if known else 0


def free_bytes(groups: Path = _GROUPS, process: Path = _PROCESS) -> int:
    """Of memory, by the host and the control groups (v2 or v1) of this process. What a group holds
    of files that were read and are not in use counts as free, as the kernel gives it up."""
    found = [_kib(Path("/proc/meminfo"), "MemAvailable")]
    v2 = (
        (group, "memory.max", "memory.current", "inactive_file")
        for group in _groups(groups, process)
    )
    v1 = (
        (group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        for group in _groups(groups, process, "memory")
    )
    for group, most, now, idle in (*v2, *v1):
        limit, held = _number(group / most), _number(group / now)
        if limit is not None and held is not None:
            found += [limit - held + _field(group / "memory.stat", idle)]
    return max(0, min(found))


def shared_bytes() -> int:
    """Of the memory through which worker processes hand batches over, used or not."""
    return _shared()[0]


def shared_free_bytes() -> int:
    """The same, of what nobody uses now."""
    return _shared()[1]


def _shared() -> tuple[int, int]:
    try:
        there = os.statvfs(_SHARED)
    except OSError:
        return 0, 0
    return there.f_blocks * there.f_frsize, there.f_bavail * there.f_frsize


def files_left() -> int:
    """Files that this process may open beside those that are open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(0, most - len(list((_PROCESS / "fd").iterdir())))


def own_bytes() -> int:
    """Of memory, that this process holds of its own: of which what it forks may need a copy, as
    Python writes to whatever it looks at."""
    return _kib(_PROCESS / "status", "RssAnon")


def peak_bytes() -> int:
    """That this process held at its peak (proc(5), VmHWM)."""
    return _kib(_PROCESS / "status", "VmHWM")


def reset_peak() -> None:
    """Start a new peak of this process (proc(5), clear_refs)."""
    with contextlib.suppress(OSError):
        (_PROCESS / "clear_refs").write_text("5")


def resident_bytes(process: int) -> int:
    """Of memory, that a process holds, what it shares with others included."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def proportional_bytes(process: int) -> int:
    """As `resident_bytes`, where what several share counts once among them."""
    return _kib(Path(f"/proc/{process}/smaps_rollup"), "Pss") or resident_bytes(process)


def killed_for_memory() -> int:
    """How many processes the kernel has ended so far because memory ran out, anywhere here."""
    found = [x.split()[1] for x in _lines(Path("/proc/vmstat")) if x.startswith("oom_kill ")]
    return int(found[0]) if found else 0


def family(process: int) -> list[int]:
    """A process and all that it started, and that those did; those that left it excepted."""
    parents: dict[int, list[int]] = {}
    for entry in _processes():
        try:
            # The name may hold spaces and brackets: what follows the last one counts.
            parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it ended meanwhile
        parents.setdefault(parent, []).append(entry)
    found = [process]
    for one in found:
        found += parents.get(one, [])
    return found


def files_read() -> list[str]:
    """Files that this process reads by position: one that it forks moves that position for both.

    What is mapped is read without one, and what is empty not at all.
    """
    mapped = {line.split(maxsplit=5)[-1] for line in _lines(_PROCESS / "maps")}
    return sorted({path for path in _open_to_read() if path not in mapped})


def held_open() -> list[str]:
    """What a forked process would share with this one: such files, and connections."""
    return [*files_read(), *(path for _, path in _descriptors() if path.startswith("socket:"))]


def _open_to_read() -> Iterator[str]:
    for entry, path in _descriptors():
        try:
            there = entry.stat()
        except OSError:
            continue
        if int(entry.name) <= 2 or not stat.S_ISREG(there.st_mode) or not there.st_size:
            continue
        said = dict(line.split(":", 1) for line in _lines(_PROCESS / "fdinfo" / entry.name))
        if int(said.get("flags", "0"), 8) & os.O_ACCMODE != os.O_WRONLY:
            yield path


def _descriptors() -> Iterator[tuple[Path, str]]:
    """What this process has open, and where that leads."""
    for entry in (_PROCESS / "fd").iterdir():
        with contextlib.suppress(OSError):  # the one that this folder is read by, gone by now
            yield entry, str(entry.readlink())


def _groups(groups: Path, process: Path, controller: str = "") -> Iterator[Path]:
    """The folders of a process's control group and of those that it is in: v1's of a controller,
    else v2's."""
    root = groups / controller
    for line in _lines(process / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            # Inside a container the path may be the host's, and the root is the group itself.
            folder = root / path.lstrip("/")
            yield from (at for at in (folder, *folder.parents) if root in (at, *at.parents))


def _processes() -> Iterator[int]:
    try:
        entries = list(Path("/proc").iterdir())
    except OSError:
        return
    yield from (int(entry.name) for entry in entries if entry.name.isdigit())


def _total() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * _PAGE
    except (OSError, ValueError):
        return 0


def _kib(file: Path, name: str) -> int:
    """A size in KiB that a file of lines 'name: 1 kB' tells, in bytes."""
    return 1024 * _field(file, f"{name}:")


def _field(file: Path, name: str) -> int:
    """The number behind a name in a file of such lines; 0 where there is none."""
    said = (line.split() for line in _lines(file))
    return next((int(words[1]) for words in said if words[:1] == [name] and len(words) > 1), 0)


def _number(file: Path) -> int | None:
    """What a file of one number says; None where it says none, as 'max'."""
    said = _lines(file)
    return int(said[0]) if said and said[0].isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
