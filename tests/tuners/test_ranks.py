"""Several processes of one job: rank 0 decides, and ranks that differ are stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from advisor.tuners.act import ranks
from tests.cache.servers import free_port

TRAIN = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from torch import nn
import advisor
from advisor.cache.config import Config

how = sys.argv[1]
rank = int(os.environ["RANK"])
if how == "file":
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank,
                            world_size=int(os.environ["WORLD_SIZE"]))
elif how != "before":
    dist.init_process_group("gloo")
try:
    if how == "strict":
        advisor.apply("nothing.py:Net", shape=(4, 8), device="cpu", strict=True)
    advice = advisor.lookup("model.py:Net", shape=(4 + rank, 8), device="cpu")
    if how == "before":
        dist.init_process_group("gloo")
    if how == "differ":
        advice = advisor.Advice(Config(channels_last=rank == 1), device="cpu")
    model = advice.prepare(nn.Linear(8, 3))
    print("said", advice.status, advice.batch_size, advice.reason, flush=True)
except advisor.AdvisorError as exc:
    print("error", type(exc).__name__, exc, flush=True)
"""


def job(folder: Path, how: str, size: int = 3) -> list[str]:
    """What each rank of a job printed."""
    (folder / "train.py").write_text(TRAIN)
    (folder / "model.py").write_text("from torch import nn\n\nclass Net(nn.Linear):\n    pass\n")
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    running = [
        subprocess.Popen(
            [sys.executable, "train.py", how, str(folder / "rendezvous")],
            cwd=folder,
            env=os.environ | env | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    said = []
    for process in running:
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        said.append(out.strip())
    return said


@pytest.mark.parametrize("how", ["after", "file"])
def test_rank_0_decides(tmp_path: Path, how: str) -> None:
    first, *others = job(tmp_path, how)
    assert first.startswith("said miss 4 ")
    # What rank 0 was told is what all train with; the batch is each script's own.
    assert [other.split(" ")[:3] for other in others] == [
        ["said", "miss", str(4 + rank)] for rank in range(1, len(others) + 1)
    ]
    assert all("decided by rank 0" in other for other in others)


def test_an_error_of_rank_0_is_every_rank_s(tmp_path: Path) -> None:
    for said in job(tmp_path, "strict", size=2):
        assert said.startswith("error ") and "nothing.py" in said


def test_ranks_that_differ_are_named(tmp_path: Path) -> None:
    for said in job(tmp_path, "differ"):
        assert said.startswith("error RanksDiffer rank 1 of 3 would train with other advice"), said


def test_ranks_that_looked_up_before_there_was_a_group_are_compared(tmp_path: Path) -> None:
    assert [said[:10] for said in job(tmp_path, "before", size=2)] == ["said miss "] * 2


def test_outside_a_process_group_nothing_is_compared() -> None:
    assert ranks.Group.current() is None
    assert not ranks.compare("anything")
