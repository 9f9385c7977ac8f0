"""Two measurements at once: the second one says so before it starts or removes anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from advisor.cache.records import Records
from advisor.cache.stores import open_store
from advisor.errors import Busy
from advisor.persistence import HOST, lock_names, measuring
from tests.face.commands import advisor

COMMAND = ("python", "train.py")


@pytest.fixture
def records(own_surroundings: Path) -> Records:
    return Records(open_store(str(own_surroundings)))


def test_a_second_tuning_starts_and_removes_nothing(tmp_path: Path, records: Records) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')")
    runs = records.studies.parent / "runs"
    runs.mkdir(parents=True)
    with measuring(records, COMMAND, lock_names()):
        second = advisor(tmp_path, "tune", "--", *COMMAND)
        other = advisor(tmp_path, "tune", "--", "python", "other.py")
        target = advisor(tmp_path, "tune", "torchvision:resnet18", "--shape", "4x3x32x32")
    for refused in (second, other, target):
        assert refused.returncode == 1
        assert refused.stderr.startswith(f"advisor: another advisor (process {os.getpid()}) ")
        assert "measures on" in refused.stderr and "wait for it" in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "started").exists() and list(runs.iterdir()) == []


def test_the_lock_of_a_process_that_was_killed_is_free(records: Records) -> None:
    code = (
        "import os, sys; from advisor.open_store import open_records; "
        "from advisor.persistence import measuring\n"
        "with measuring(open_records(None), ['a'], ['cpu']): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    with measuring(records, ["a"], [HOST]):
        pass


def test_other_gpus_are_free_whatever_store_is_used(tmp_path: Path, records: Records) -> None:
    other = Records(open_store(f"dir:{tmp_path}/other"))
    with measuring(records, ["one"], ["GPU-a"]):
        with measuring(other, ["two"], ["GPU-b"]):
            pass
        said = r"on GPU GPU-a now; .*CUDA_VISIBLE_DEVICES"
        both = measuring(other, ["two"], ["GPU-b", "GPU-a"])
        with pytest.raises(Busy, match=said), both:
            pass
        same = measuring(records, ["one"], ["GPU-b"])
        with pytest.raises(Busy, match="this very command"), same:
            pass
        with measuring(other, ["two"], ["GPU-b"]):  # what was held before is free again
            pass
