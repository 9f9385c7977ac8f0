"""One rank of a job raises, runs out of memory, is killed, or is slow: which one is named, and no
process is left. The other ranks hang, as in NCCL, and the launcher does not notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from advisor.errors import TargetFailed
from advisor.tuners.act.pilot.exchange import covered
from advisor.tuners.act.pilot.protocol import RankStep
from advisor.tuners.faults import failure, may_be_config_error
from advisor.tuners.measure.run import rank_shares
from advisor.tuners.measure.run import session as sessions
from advisor.tuners.measure.runner import ConfigFailed
from tests.forks import started_with, until
from tests.runs.test_commands import measure, script, started_run

JOB = """
import os, socket, sys, time

ranks = int(sys.argv[2])
with socket.create_server(("127.0.0.1", 0)) as free:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
children = []
for rank in range(ranks):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    children.append(os.fork())
    if not children[-1]:
        break
else:
    for child in children:
        os.waitpid(child, 0)
    sys.exit(1)

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")

class Net(nn.Linear):
    half = False
    def forward(self, x):
        Net.half = torch.is_autocast_enabled("cpu")
        return super().forward(x)

def fault():
    FAULT

model = nn.parallel.DistributedDataParallel(Net(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for step in range(10**7):
        x, y = torch.randn(32, 8), torch.randint(4, (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if rank == 1 and (WHEN):
            fault()
except RuntimeError as exc:
    if "peer" not in str(exc) and "onnection" not in str(exc):
        raise
    time.sleep(1000)
"""


def job(folder: Path, fault: str, when: str, ranks: int = 2) -> tuple[str, ...]:
    command = script(JOB.replace("FAULT", fault).replace("WHEN", when))
    return (*command, str(folder), str(ranks))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sessions, "LAUNCHER_S", 1.0)
    return tmp_path


@pytest.mark.parametrize(
    ("fault", "ranks", "outcome", "said"),
    [
        ("raise ValueError('bad')", 4, "failed", "rank 1: ValueError: bad (script.py:"),
        ("raise torch.OutOfMemoryError('full')", 2, "out_of_memory", "rank 1: OutOfMemoryError: "),
        ("os.kill(os.getpid(), 9)", 2, "crashed", "rank 1 is gone, and others still run"),
        ("os._exit(0)", 4, "crashed", "rank 1 is gone, and others still run"),
    ],
)
def test_a_rank_that_fails_under_a_config_is_named(
    folder: Path, fault: str, ranks: int, outcome: str, said: str
) -> None:
    """The next block has a new start of the command."""
    with started_run(job(folder, fault, "Net.half", ranks)) as (run, seen, own):
        assert (seen.processes, seen.interconnect) == (ranks, f"{ranks} per host")
        assert measure(run, own).steps == 8
        with pytest.raises(ConfigFailed) as caught:
            measure(run, own.replace(precision="bf16"))
        assert caught.value.outcome == outcome and str(caught.value).startswith(said)
        assert measure(run, own).steps == 8
    until(lambda: not started_with(folder))


def test_a_rank_that_fails_before_the_first_steps_is_named(folder: Path) -> None:
    command = job(folder, "raise ValueError('bad')", "step == 1")
    with pytest.raises(TargetFailed, match=r"rank 1: ValueError: bad"), started_run(command):
        pass
    until(lambda: not started_with(folder))


TABLE = """
print('''bad
E1130 17:13:15.8 7 torch/distributed/elastic/multiprocessing/api.py:1] failed (exitcode: 2)
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 8)  (SIGTERM)
------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_17:01:39
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 9)  (SIGKILL)
  traceback : Signal 9 (SIGKILL) received by PID 9
============''')
raise SystemExit(1)
"""


@pytest.mark.parametrize(("code", "ended"), [("-9", "signal SIGKILL;"), ("2", "exit code 2: bad;")])
def test_the_table_of_torchrun_is_read(code: str, ended: str) -> None:
    said = f"the command ended with exit code 1: rank 1 ended with {ended}"
    command = script(TABLE.replace("-9 (", f"{code} ("))
    with pytest.raises(TargetFailed, match=said), started_run(command):
        pass


def test_a_lost_connection_is_no_fault_of_a_config() -> None:
    gloo = "[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:23766. This is"
    assert failure(RuntimeError(gloo)) == ("failed", "another rank is gone (Connection closed)")
    assert not may_be_config_error(RuntimeError(gloo))
    assert may_be_config_error(RuntimeError("a kernel failed"))


def test_a_slow_rank_is_named(folder: Path) -> None:
    command = job(folder, "time.sleep(0.3)", "True", 4)
    with started_run(command) as (run, _seen, own):
        ranks = run.rank_steps(0.1, deadline_s=200)
        shares = rank_shares.shares(ranks)
        assert next(iter(shares)) == "rank 1", ranks
        assert ranks[1].waits_s < min(one.waits_s for rank, one in enumerate(ranks) if rank != 1)
        assert measure(run, own).steps == 8


def steps(*waits_s: float, loads_s: float = 0.0) -> list[RankStep]:
    """Steps of one second."""
    return [RankStep(step_s=1.0, waits_s=one, loads_s=loads_s) for one in waits_s]


def test_shares_of_a_step() -> None:
    for ranks, expected in (
        (steps(0.7, 0.1), {"rank 1": 0.6, "compute": 0.3, "exchange between ranks": 0.1}),
        (steps(0.1, 0.7, 0.7, 0.7), {"rank 0": 0.6, "compute": 0.3}),
        (steps(0.6, 0.6), {"exchange between ranks": 0.6, "compute": 0.4}),
        (steps(0.2, 0.1), {"compute": 0.9, "exchange between ranks": 0.1}),  # ranks alike
        (steps(0.1, 0.1, loads_s=0.7), {"loading": 0.7, "compute": 0.2}),
        (steps(1.0, 1.0), {"exchange between ranks": 1.0}),
    ):
        found = rank_shares.shares(ranks)
        assert list(found)[: len(expected)] == list(expected), found
        assert {name: found[name] for name in expected} == pytest.approx(expected)
        assert sum(found.values()) == pytest.approx(1.0)
    assert rank_shares.line(steps(0.7, 0.1)).startswith(
        "what limits the 2 ranks: rank 1, which is slow, 60% of a step (at most 2.50x without), "
    )
    gains = {one.what: one.gain for one in rank_shares.limits(steps(0.7, 0.1))}
    assert gains == pytest.approx({"rank 1": 2.5, "exchange between ranks": 1 / 0.9})
    assert covered([(5, 9), (0, 2), (1, 3), (6, 7), (4, 4)]) == 7
