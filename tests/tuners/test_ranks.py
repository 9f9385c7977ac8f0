"""Several ranks of one job: rank 0 decides, and ranks with different advice stop."""

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
from advisor.tuners.faults import Stopped
from tests.cache.servers import free_port
from tests.forks import call


def run_rank(case: str, env: Mapping[str, str], folder: Path) -> None:
    """Run the script of one rank. Its output goes to the file output-RANK."""
    os.chdir(folder)
    os.environ.update(env)
    import torch.distributed as dist
    from torch import nn

    rank = int(env["RANK"])
    sys.stdout = Path(f"output-{rank}").open("w")  # noqa: SIM115
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    if case in ("late", "apart"):
        ranks.AWAITED_S = 0.1
    if case == "apart":
        meet_apart(Path("left"), waits=rank > 0)
        dist.barrier()
        return
    if case == "differ, and rank 0 ends" and rank > 0:
        slow_down_reads()
    try:
        if case == "strict":
            advisor.apply(advisor.Model("nothing.py:Net", device="cpu"), shape=(4, 8), strict=True)
        advice = advisor.lookup(advisor.Model("model.py:Net", device="cpu"), shape=(4 + rank, 8))
        if case == "late" and rank > 0:
            wait_for_end_of_rank_0(env)
        if case.startswith("differ"):
            advice = advisor.Advice(Config(channels_last=rank == 1), device="cpu")
        advice.prepare(nn.Linear(8, 3))
        print("advice", advice.status, advice.batch_size, advice.reason)
    except advisor.AdvisorError as exc:
        print("error", type(exc).__name__, exc)
    sys.stdout.close()
    if case in ("late", "differ, and rank 0 ends"):
        os._exit(0)
    dist.barrier()  # the store ends with the process of rank 0


def meet_apart(left: Path, *, waits: bool) -> None:
    """Rank 0 gives up before the others come."""
    while waits and not left.exists():
        time.sleep(0.01)
    try:
        print(ranks.common(["compile"]))
    except Stopped as exc:
        print("stopped", exc.why, exc)
    sys.stdout.close()
    left.touch()


def slow_down_reads() -> None:
    """Delay this rank's reads of the store beyond the time limit."""
    get = ranks.Group.get

    def slow(self: ranks.Group, key: str, seconds: float) -> bytes | None:
        value = get(self, key, seconds)
        time.sleep(0.5)
        return value

    ranks.Group.get = slow  # type: ignore[method-assign]


def wait_for_end_of_rank_0(env: Mapping[str, str]) -> None:
    """Wait until rank 0, which hosts the store, has ended."""
    address = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    with contextlib.suppress(ConnectionError), socket.create_connection(address) as store:
        store.recv(1)  # returns when the process ends


def run_job(folder: Path, case: str, size: int = 2) -> list[str]:
    """Run a job and return the output of each rank. Forked ranks need no new import of torch."""
    (folder / "model.py").write_text("from torch import nn\n\nclass Net(nn.Linear):\n    pass\n")
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(size)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    running = [call(run_rank, case, env | {"RANK": str(rank)}, folder) for rank in range(size)]
    assert [process.wait(200) for process in running] == [0] * size
    return [(folder / f"output-{rank}").read_text().strip() for rank in range(size)]


def test_rank_0_decides_for_all(tmp_path: Path) -> None:
    rank_0, *others = run_job(tmp_path, "lookup")
    assert rank_0.startswith("advice miss 4 ")
    # All ranks use the advice of rank 0; the batch size is their own.
    assert [other.split(" ")[:3] for other in others] == [["advice", "miss", "5"]]
    assert all("decided by rank 0" in other for other in others)


def test_every_rank_raises_the_error_of_rank_0(tmp_path: Path) -> None:
    for output in run_job(tmp_path, "strict"):
        assert output.startswith("error ") and "nothing.py" in output


@pytest.mark.parametrize("case", ["differ", "differ, and rank 0 ends"])
def test_error_names_the_rank_that_differs(tmp_path: Path, case: str) -> None:
    for out in run_job(tmp_path, case, size=3):
        assert out.startswith("error RanksDiffer rank 1 of 3 would train with other advice"), out


def test_rank_that_arrives_after_rank_0_has_ended_raises(tmp_path: Path) -> None:
    rank_0, rank_1 = run_job(tmp_path, "late")
    assert rank_0.startswith("advice miss 4 ")
    assert rank_1.startswith("error RanksDiffer rank 1 of 2 cannot compare its advice with the")
    assert "\n" not in rank_1


def test_ranks_that_meet_at_different_steps_all_stop(tmp_path: Path) -> None:
    outputs = run_job(tmp_path, "apart", size=3)
    assert len({*outputs}) == 1 and outputs[0].startswith("stopped unclear the ranks are at")


def test_advice_is_not_compared_outside_a_process_group() -> None:
    assert ranks.Group.current() is None
    assert not ranks.compare("anything")
