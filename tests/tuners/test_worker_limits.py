"""What this host has for the workers of a loader, as its own files say it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from advisor.tuners import host, worker_limits


def test_workers_fit_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2**20 < host.own_bytes() < 2**40
    monkeypatch.setattr(host, "free_bytes", lambda: 2**50)
    for cores in (1, 2, 9):
        monkeypatch.setattr(host, "cores", lambda cores=cores: cores)
        assert worker_limits.workers(0) == cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (worker_limits.workers(0), worker_limits.cores()) == (4, 4)
    monkeypatch.setattr(host, "shared_bytes", lambda: (12 * 2**20, 0))
    assert [worker_limits.workers(size) for size in (2**18, 2**19, 2**20, 2**24)] == [4, 2, 1, 0]
    monkeypatch.setattr(host, "own_bytes", lambda: 2**30)
    for free, expected in ((2**40, 4), (16 * 2**30, 4), (15 * 2**30, 2), (2**30, 0)):
        monkeypatch.setattr(host, "free_bytes", lambda free=free: free)
        assert worker_limits.workers(0) == expected


INACTIVE = "inactive_file 3000"
V1_MEMORY = {"/a/memory.limit_in_bytes": 2**63 - 4096, "/a/memory.usage_in_bytes": 5000}
V1_USED = {"/a/b/memory.limit_in_bytes": 9000, "/a/b/memory.usage_in_bytes": 8000}
V2_USED = {"/a/b/memory.max": 9000, "/a/b/memory.current": 8000}
QUOTA = "cpu.cfs_quota_us"
PERIOD = dict.fromkeys(["/a/cpu.cfs_period_us", "/a/b/cpu.cfs_period_us"], 100000)


@pytest.mark.parametrize(
    ("asked", "group", "files", "found"),
    [
        (host.cores, "0:", {"/a/b/cpu.max": "max 100000"}, None),
        (host.cores, "0:", {"/a/cpu.max": "150000 100000"}, 1),
        (host.cores, "3:cpu,cpuacct", {f"/a/b/{QUOTA}": -1, **PERIOD}, None),
        (host.cores, "3:cpu,cpuacct", {f"/a/{QUOTA}": 150000, **PERIOD}, 1),
        (host.memory_limit, "0:", {"/a/memory.max": 1000000, "/a/b/memory.max": "max"}, 950000),
        (host.memory_limit, "0:", {"/a/b/memory.max": "max"}, None),
        (host.memory_limit, "0:", {"/memory.max": 2000000}, 1900000),
        (host.memory_limit, "4:memory", {"/a/b/memory.limit_in_bytes": 3000000}, 2850000),
        (host.memory_limit, "4:cpu,memory", {"/memory.limit_in_bytes": 3000000}, 2850000),
        (host.memory_limit, "4:memory", {"/a/b/memory.limit_in_bytes": 2**63 - 4096}, None),
        (host.free_bytes, "0:", {"/a/memory.max": "max", "/a/memory.current": 5000}, None),
        (host.free_bytes, "0:", V2_USED, 1000),
        (host.free_bytes, "0:", V2_USED | {"/a/b/memory.stat": INACTIVE}, 4000),
        (host.free_bytes, "5:memory", V1_MEMORY, None),
        (host.free_bytes, "5:memory", V1_USED, 1000),
        (host.free_bytes, "5:memory", V1_USED | {"/a/b/memory.stat": f"total_{INACTIVE}"}, 4000),
    ],
)
def test_limits_of_a_control_group_at_any_level(
    tmp_path: Path,
    asked: Callable[[Path, Path], int],
    group: str,
    files: dict[str, object],
    found: int | None,
) -> None:
    """None: as without a limit."""
    groups, process = tmp_path / "groups", tmp_path / "self"
    process.mkdir()
    (process / "cgroup").write_text(f"9:name=systemd:/\n{group}:/a/b\n")
    whole = asked(groups, process)
    assert whole >= 1
    controller = next((one for one in ("memory", "cpu") if one in group.split(":")[1]), "")
    for name, text in files.items():
        path = groups / controller / name[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert asked(groups, process) == (pytest.approx(whole, rel=0.2) if found is None else found)


def test_batches_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB of shared memory, as Docker gives to a container; or more files than may be open."""
    monkeypatch.setattr(host, "shared_bytes", lambda: (2**30, 64 * 2**20))
    assert worker_limits.shortage(9 * 2**20, 2, workers=2) == ""
    assert "docker's --shm-size" in worker_limits.shortage(9 * 2**20, 2, workers=4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert worker_limits.shortage(9 * 2**20, 2, workers=2).startswith("5 batches of 9 MiB")
    monkeypatch.setattr(host, "files_left", lambda: 1000)
    assert "ulimit -n" in worker_limits.shortage(2**10, 300, workers=2)
