"""What the host has of memory for a process and all that it started. Linux; elsewhere 0.

The standard library alone: the guard reads it too, which imports nothing else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

SHARE = 0.95
"""Of a limit that may be used: at the limit itself the kernel kills, and not always the worker."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_GROUPS = Path("/sys/fs/cgroup")


def limit(groups: Path = _GROUPS, process: Path = Path("/proc/self")) -> int:
    """Bytes that may be used: the machine's, or less where a control group says so (v2 or v1)."""
    found = [_total()]
    for line in _lines(process / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may be the host's, and the root is the group itself.
        folder = root / path.lstrip("/")
        for at in (folder, *folder.parents):
            if root in (at, *at.parents):
                # 'max' is none at all.
                found += [int(said) for said in _lines(at / name) if said.isdigit()]
    known = [one for one in found if 0 < one < 2**60]
    return int(SHARE * min(known)) if known else 0


def _total() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * _PAGE
    except (OSError, ValueError):
        return 0


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


def _processes() -> Iterator[int]:
    try:
        entries = list(Path("/proc").iterdir())
    except OSError:
        return
    yield from (int(entry.name) for entry in entries if entry.name.isdigit())


def resident(process: int) -> int:
    """Bytes of memory that a process holds, what it shares with others included."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def proportional(process: int) -> int:
    """As `resident`, where what several share counts once among them."""
    for line in _lines(Path(f"/proc/{process}/smaps_rollup")):
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return resident(process)


def reset_peak() -> None:
    """Start a new peak of this process (proc(5), clear_refs)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Bytes that this process held at its peak (proc(5), VmHWM); 0 where that is not known."""
    found = [x.split()[1] for x in _lines(Path("/proc/self/status")) if x.startswith("VmHWM:")]
    return int(found[0]) * 1024 if found else 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
