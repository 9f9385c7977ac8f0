"""Attempts on a real Ray cluster of this machine, whose nodes say that they have GPUs.

With $RAY_ATTEMPTS set to a file, a table of all attempts is written there.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from advisor.client import Client, Job
from advisor.service.executors import ExecutorAway
from advisor.service.executors.ray import RayExecutor
from tests.cache.servers import free_port
from tests.service import clusters
from tests.service.clusters import TOKEN, Cluster, until
from tests.service.test_serve import Process

ray = pytest.importorskip("ray.dashboard.optional_deps", reason="ray[default] is not installed")

LEASE_S = 8.0
SERVE = f"""
from advisor.cli import main
from advisor.service import attempts, reconcile

attempts.LEASE_S = reconcile.LEASE_S = {LEASE_S}  # a test waits for the end of one
main()
"""
MODEL = """
import os, time
from pathlib import Path
import torch

Path({where!r}).write_text(os.environ["NODE_OF_TEST"])
while not Path({gate!r}).exists():
    time.sleep(0.05)

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        with clusters.cluster("H100", "A100") as found:
            yield found


@dataclass
class Team:
    """A server that can be killed and started again, and who asks it."""

    folder: Path
    cluster: Cluster
    process: Process | None = None
    client: Client = field(init=False)
    told: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._words = ["--database", f"sqlite:///{self.folder}/service.db"]
        self._words += ["--executor", self.cluster.address, "--port", str(free_port())]
        self.start()
        assert self.process is not None
        self.client = Client(f"http://127.0.0.1:{self.process.port}", self.process.token)

    def start(self) -> None:
        self.process = Process(*self._words, program=("-c", SERVE))

    def kill(self) -> None:
        assert self.process is not None
        self.process.stop(signal.SIGKILL)

    def ask(self, gpu: str, what: str) -> Asked:
        folder = self.folder / uuid.uuid4().hex
        folder.mkdir()
        where, gate = folder / "where", folder / "gate"
        code = folder / "code"
        code.mkdir()
        (code / "model.py").write_text(MODEL.format(where=str(where), gate=str(gate)))
        options = {"shape": ["8x4"], "budget": "3s", "trials": 1, "effort": "quick"}
        job = self.client.submit("model.py:Net", folder=code, gpu=gpu, **options)
        self.told.append((job.id, what))
        return Asked(self.client, job.id, where, gate)

    def table(self) -> str:
        lines = ["| job | what happened | asked for | attempt | state | why |", "|-|-|-|-|-|-|"]
        for number, what in self.told:
            job = self.client.job(number)
            for one in job.tries or [{"number": 0, "state": job.state, "reason": job.reason}]:
                cells = (number, what, job.where, one["number"], one["state"], one["reason"])
                lines.append(f"| {' | '.join(map(str, cells))} |")
        return "\n".join(lines)


@dataclass
class Asked:
    """A job whose attempts wait where its model begins, until they are let through."""

    client: Client
    id: int
    where: Path
    gate: Path

    @property
    def now(self) -> Job:
        return self.client.job(self.id)

    def begun(self) -> str:
        """The node on which an attempt is in the middle of its work, once one is."""
        found: str = until(lambda: self.where.exists() and self.where.read_text())
        self.where.unlink()
        return found

    def finish(self) -> Job:
        self.gate.touch()
        until(lambda: self.now.over)
        return self.now


def states(job: Job) -> list[str]:
    return [one["state"] for one in job.tries]


@pytest.fixture(scope="module")
def team(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    team = Team(tmp_path_factory.mktemp("team"), cluster)
    try:
        yield team
        if table := os.environ.get("RAY_ATTEMPTS"):
            Path(table).write_text(team.table() + "\n")
    finally:
        team.kill()


def test_placed_by_label_while_the_server_is_killed(team: Team) -> None:
    one, two = team.ask("H100", "the server was killed"), team.ask("A100", "the server was killed")
    none = team.ask("H200", "no node has that GPU")
    assert one.begun() == team.cluster.nodes["H100"].folder
    assert two.begun() == team.cluster.nodes["A100"].folder
    team.kill()
    one.gate.touch()
    two.gate.touch()
    team.start()
    for asked in (one, two):
        job = asked.finish()
        assert (job.state, states(job)) == ("done", ["done"]) and job.record
    job = until(lambda: (found := none.now).reason and found)
    assert job.state == "queued" and "named 'H200'" in job.reason
    assert "H100" in job.reason and "A100" in job.reason


def test_cancelled(team: Team) -> None:
    asked = team.ask("H100", "it was cancelled")
    asked.begun()
    node = team.cluster.nodes["H100"]
    assert node.attempts()
    team.client.cancel(asked.id)
    until(lambda: not node.attempts())
    until(lambda: states(asked.now) == ["cancelled"])


def test_a_node_is_gone(team: Team) -> None:
    asked = team.ask("A100", "the node was killed")
    asked.begun()
    node = team.cluster.nodes["A100"]
    node.kill_raylet()
    until(lambda: not node.attempts())
    job = until(lambda: (found := asked.now).state == "preempted" and found)
    assert "is gone" in job.tries[0]["reason"]
    node.kill()
    team.cluster.add("A100")
    assert asked.begun() == team.cluster.nodes["A100"].folder
    job = asked.finish()
    assert (job.state, states(job)) == ("done", ["preempted", "done"])


def test_the_head_is_gone_and_remembers_nothing(team: Team) -> None:
    asked = team.ask("H100", "the head was killed")
    asked.begun()
    team.cluster.kill()
    with pytest.raises(ExecutorAway):
        RayExecutor(team.cluster.address).room()
    team.cluster.start()
    asked.begun()
    job = asked.finish()
    assert (job.state, states(job)) == ("done", ["lost", "done"])
    assert "Ray does not know it" in job.tries[0]["reason"]
