"""Several processes of one job: rank 0 decides, and ranks that differ are stopped."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest

import advisor
from advisor.cache.config import Config
from advisor.tuners.act import ranks
from tests.cache.servers import free_port
from tests.forks import call


def train(how: str, env: Mapping[str, str], folder: Path) -> None:
    """A rank's script, in a process of its own; what it prints is in a file of its number."""
    os.chdir(folder)
    os.environ.update(env)
    import torch.distributed as dist
    from torch import nn

    rank = int(env["RANK"])
    sys.stdout = Path(f"said-{rank}").open("w")  # noqa: SIM115
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    if how == "late":
        ranks.AWAITED_S = 0.1
    if how == "differ, and rank 0 ends" and rank > 0:
        slow_to_read()
    try:
        if how == "strict":
            advisor.apply(advisor.Model("nothing.py:Net", device="cpu"), shape=(4, 8), strict=True)
        advice = advisor.lookup(advisor.Model("model.py:Net", device="cpu"), shape=(4 + rank, 8))
        if how == "late" and rank > 0:
            wait_for_end(env)
        if how.startswith("differ"):
            advice = advisor.Advice(Config(channels_last=rank == 1), device="cpu")
        advice.prepare(nn.Linear(8, 3))
        print("said", advice.status, advice.batch_size, advice.reason)
    except advisor.AdvisorError as exc:
        print("error", type(exc).__name__, exc)
    sys.stdout.close()
    if how in ("late", "differ, and rank 0 ends"):
        os._exit(0)
    dist.barrier()  # the store is in a process of theirs, and goes with it


def slow_to_read() -> None:
    """What the others have put comes to this rank later than it may."""
    get = ranks.Group.get

    def slow(self: ranks.Group, key: str, seconds: float) -> bytes | None:
        found = get(self, key, seconds)
        time.sleep(0.5)
        return found

    ranks.Group.get = slow  # type: ignore[method-assign]


def wait_for_end(env: Mapping[str, str]) -> None:
    """Of rank 0, which has the store."""
    address = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    with contextlib.suppress(ConnectionError), socket.create_connection(address) as store:
        store.recv(1)  # sends nothing, and closes with its process


def job(folder: Path, how: str, size: int = 2) -> list[str]:
    """What each rank of a job printed; none of them imports torch anew, which is most of it."""
    (folder / "model.py").write_text("from torch import nn\n\nclass Net(nn.Linear):\n    pass\n")
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(size)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    running = [call(train, how, env | {"RANK": str(rank)}, folder) for rank in range(size)]
    assert [process.wait(200) for process in running] == [0] * size
    return [(folder / f"said-{rank}").read_text().strip() for rank in range(size)]


def test_rank_0_decides(tmp_path: Path) -> None:
    first, *others = job(tmp_path, "after")
    assert first.startswith("said miss 4 ")
    # What rank 0 was told is what all train with; the batch is each script's own.
    assert [other.split(" ")[:3] for other in others] == [["said", "miss", "5"]]
    assert all("decided by rank 0" in other for other in others)


def test_an_error_of_rank_0_is_every_rank_s(tmp_path: Path) -> None:
    for said in job(tmp_path, "strict"):
        assert said.startswith("error ") and "nothing.py" in said


@pytest.mark.parametrize("how", ["differ", "differ, and rank 0 ends"])
def test_ranks_that_differ_are_named(tmp_path: Path, how: str) -> None:
    for said in job(tmp_path, how, size=3):
        assert said.startswith("error RanksDiffer rank 1 of 3 would train with other advice"), said


def test_a_rank_that_comes_once_rank_0_is_gone_says_so(tmp_path: Path) -> None:
    first, second = job(tmp_path, "late")
    assert first.startswith("said miss 4 ")
    assert second.startswith("error RanksDiffer rank 1 of 2 cannot compare its advice with the")
    assert "\n" not in second


def test_outside_a_process_group_nothing_is_compared() -> None:
    assert ranks.Group.current() is None
    assert not ranks.compare("anything")
