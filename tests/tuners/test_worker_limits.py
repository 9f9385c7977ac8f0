"""What this host has for the workers of a loader, as its own files say it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from advisor.tuners import host, worker_limits


def test_as_many_as_there_are_cores_for_and_as_memory_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


@pytest.mark.parametrize("group", ["0::/a/b", "3:cpu,cpuacct:/a/b"])
def test_a_quota_of_cores_at_any_level(tmp_path: Path, group: str) -> None:
    groups, process = tmp_path / "groups", tmp_path / "self"
    v1 = "cpu" in group
    own = groups / ("cpu/a/b" if v1 else "a/b")
    own.mkdir(parents=True)
    process.mkdir()
    (process / "cgroup").write_text(f"1:memory:/c\n{group}\n")

    def limit(folder: Path, quota: int | None) -> None:
        if v1:
            (folder / "cpu.cfs_quota_us").write_text(f"{-1 if quota is None else quota}\n")
            (folder / "cpu.cfs_period_us").write_text("100000\n")
        else:
            (folder / "cpu.max").write_text(f"{'max' if quota is None else quota} 100000\n")

    there = len(os.sched_getaffinity(0))
    assert host.cores(groups, process) == there
    limit(own, None)
    assert host.cores(groups, process) == there
    limit(own.parent, 150_000)
    assert host.cores(groups, process) == 1


@pytest.mark.parametrize(
    ("line", "folder", "most", "now", "idle"),
    [
        ("0::/a/b", "", "memory.max", "memory.current", "inactive_file"),
        (
            *("5:memory:/a/b", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
            "total_inactive_file",
        ),
    ],
)
def test_memory_that_a_control_group_leaves(
    tmp_path: Path, line: str, folder: str, most: str, now: str, idle: str
) -> None:
    groups, process = tmp_path / "groups", tmp_path / "self"
    own = groups / folder / "a" / "b"
    own.mkdir(parents=True)
    process.mkdir()
    (process / "cgroup").write_text(line + "\n")
    whole = host.free_bytes(groups, process)
    assert whole > 2**20
    (own.parent / most).write_text("max\n" if line.startswith("0") else f"{2**63 - 4096}\n")
    (own.parent / now).write_text("5000\n")
    assert host.free_bytes(groups, process) == pytest.approx(whole, rel=0.2)
    (own / most).write_text("9000\n")
    (own / now).write_text("8000\n")
    assert host.free_bytes(groups, process) == 1000
    (own / "memory.stat").write_text(f"anon 4000\n{idle} 3000\n")
    assert host.free_bytes(groups, process) == 4000
    assert 2**20 < host.own_bytes() < 2**40


def test_batches_that_do_not_fit_are_refused_before_they_end_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 MiB of shared memory, as Docker gives to a container."""
    monkeypatch.setattr(host, "shared_bytes", lambda: (2**30, 64 * 2**20))
    assert worker_limits.shortage(9 * 2**20, 2, workers=2) == ""
    assert worker_limits.shortage(9 * 2**20, 2, workers=4) == (
        "9 batches of 9 MiB do not fit into /dev/shm, of which 64 MiB is free; in a container "
        "give more, as docker's --shm-size"
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert worker_limits.shortage(9 * 2**20, 2, workers=2).startswith("5 batches of 9 MiB")


def test_tensors_that_are_more_files_than_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "files_left", lambda: 1000)
    assert worker_limits.shortage(2**10, 300, workers=1) == ""
    assert "ulimit -n" in worker_limits.shortage(2**10, 300, workers=2)
    whole, free = host.shared_bytes()
    assert free <= whole
