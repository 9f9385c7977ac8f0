"""Attempts on a real Ray cluster of this machine, whose nodes say that they have GPUs.

With $RAY_ATTEMPTS set to a file, a table of all attempts is written there.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sqlalchemy import select

from advisor.client import Client, Job
from advisor.errors import UsageError
from advisor.jobs.token import digest, made
from advisor.service.database import Database
from advisor.service.executors import Capacity, ExecutorAway
from advisor.service.executors.ray import LABEL, RayExecutor
from advisor.service.executors.schemes import open_executors
from advisor.service.schema import Attempt
from tests.cache.servers import free_port
from tests.service import clusters
from tests.service.clusters import TOKEN, Cluster, until
from tests.service.serving import ask
from tests.service.test_serve import Process

LEASE_S = 4.0
SERVE = f"""
from advisor.cli import main
from advisor.service import attempts, reconcile

attempts.LEASE_S = reconcile.LEASE_S = {LEASE_S}  # a test waits for the end of one
reconcile.EVERY_S = 0.5  # and for what is seen
main()
"""
TABLE = """\
# Attempts on a Ray cluster that fares badly

Two nodes of one machine that say they have an H100 and an A100; each job tunes a small model for
three seconds, on the CPU. Made by:

    RAY_ATTEMPTS=benchmarks/results/ray_attempts.md pytest tests/service/test_ray.py
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
    pytest.importorskip("ray.dashboard.optional_deps", reason="ray[default] is not installed")
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
    database: Database = field(init=False)
    told: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.database = Database(f"sqlite:///{self.folder}/service.db")
        self._words = ["--database", self.database.url]
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
        # Nothing to choose from, so that nothing must be raced.
        only = {"precisions": ["default"], "batches": [], "compile": False}
        options = {"shape": ["8x4"], "budget": "3s", "effort": "quick", **only}
        job = self.client.submit("model.py:Net", folder=code, gpu=gpu, **options)
        self.told.append((job.id, what))
        return Asked(self.client, self.database, job.id, where, gate)

    def table(self) -> str:
        lines = [TABLE, "| job | meanwhile | asked for | attempt | state | why | record |"]
        lines.append("|---|---|---|---|---|---|---|")
        for number, what in self.told:
            job = self.client.job(number)
            for one in job.attempts or [{"number": "", "state": job.state, "reason": job.reason}]:
                record = job.record if one["state"] == "done" else ""
                told = (one["number"], one["state"], one["reason"], record)
                lines.append(f"| {' | '.join(map(str, (number, what, job.where, *told)))} |")
        return "\n".join(lines)


@dataclass
class Asked:
    """A job whose attempts wait where its model begins, until they are let through."""

    client: Client
    database: Database
    id: int
    where: Path
    gate: Path

    @property
    def now(self) -> Job:
        return self.client.job(self.id)

    @property
    def external(self) -> str:
        """Its latest attempt, as Ray calls it."""
        with self.database.reading() as session:
            last = (
                select(Attempt.external).where(Attempt.job == self.id).order_by(Attempt.id.desc())
            )
            return session.scalars(last).first() or ""

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
    return [one["state"] for one in job.attempts]


@pytest.fixture(scope="module")
def team(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    team = Team(tmp_path_factory.mktemp("team"), cluster)
    try:
        yield team
        if table := os.environ.get("RAY_ATTEMPTS"):
            Path(table).write_text(team.table() + "\n")
    finally:
        team.kill()
        team.database.close()


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("ray-jobs:http://head.example", "ray:http://head.example:8265"),
        ("ray-jobs:https://head.example:443/", "ray:https://head.example:443"),
        ("ray-jobs:http://[::1]:8265", "ray:http://[::1]:8265"),
        ("ray://head.example:10001", "ray:http://head.example:8265"),
    ],
)
def test_an_address(address: str, name: str) -> None:
    [executor] = open_executors([address], "")
    assert executor.name == name


@pytest.mark.parametrize(
    "address",
    [
        "ray:8265",
        "ray://",
        "ray-jobs:ray://head",
        "ray-jobs:ftp://head",
        "ray-jobs:http://user:secret@head",
        "ray-jobs:http://head:99999",
        "ray-jobs:http://head/path",
    ],
)
def test_no_address(address: str) -> None:
    with pytest.raises(UsageError, match=r"expected ray-jobs:http\[s\]://HOST"):
        open_executors([address], "")


def test_what_is_no_ray_is_away() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.handle_request, daemon=True).start()
        with pytest.raises(ExecutorAway, match=r"HTTP 501"):
            RayExecutor(f"ray-jobs:http://127.0.0.1:{other.server_port}").capacity()


@pytest.mark.parametrize("said", [b"<html>", b"[]", b'{"data": {"result": {"result": [{}]}}}'])
def test_what_says_something_else_is_no_ray(said: bytes) -> None:
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(said)

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.handle_request, daemon=True).start()
        with pytest.raises(ExecutorAway, match=r"no head of Ray"):
            RayExecutor(f"ray-jobs:http://127.0.0.1:{other.server_port}").capacity()


def steal(team: Team, one: Asked) -> None:
    """What an attempt was given, which Ray tells everybody, is worth nothing once it has begun."""
    job = json.loads(team.cluster.ask("GET", f"/api/jobs/{one.external}"))
    given = job["runtime_env"]["env_vars"]
    assert given.keys() == {"ADVISOR_SERVER", "ADVISOR_START_TOKEN"}
    assert team.process is not None
    port, start = team.process.port, given["ADVISOR_START_TOKEN"]
    assert ask(port, "GET", "/api/attempt", start).status == 401
    own = {"digest": digest(made()).hex()}
    assert ask(port, "POST", "/api/attempt/begin", start, own).status == 409


@pytest.mark.long
def test_placed_by_label_while_the_server_is_killed(team: Team) -> None:
    one, two = team.ask("H100", "the server was killed"), team.ask("A100", "the server was killed")
    none = team.ask("H200", "no node has that GPU")
    assert one.begun() == team.cluster.nodes["H100"].folder
    assert two.begun() == team.cluster.nodes["A100"].folder
    steal(team, one)
    team.kill()
    one.gate.touch()
    two.gate.touch()
    team.start()
    for asked in (one, two):
        job = asked.finish()
        assert (job.state, states(job)) == ("done", ["done"]) and job.record
        reason = job.attempts[0]["reason"]
        assert ("used a second time" in reason) == (asked is one) and job.record in reason
    job = until(lambda: (found := none.now).reason and found)
    assert job.state == "queued" and "named 'H200'" in job.reason
    assert "H100" in job.reason and "A100" in job.reason


@pytest.mark.long
def test_what_others_use_is_no_room(cluster: Cluster) -> None:
    executor = RayExecutor(cluster.address)
    job = {"entrypoint": "sleep 60", "submission_id": "others", "entrypoint_num_gpus": 1}
    job["entrypoint_label_selector"] = {LABEL: "A100"}
    cluster.ask("POST", "/api/jobs/", job)
    until(lambda: Capacity(gpu="H100", gpus=1, total=1) in executor.capacity())
    taken = until(
        lambda: [one for one in executor.capacity() if one.gpu == "A100" and not one.gpus]
    )
    assert "1 of 1" in taken[0].why
    cluster.ask("POST", "/api/jobs/others/stop")


def test_a_token_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ExecutorAway, match=f"token file {tmp_path}/none: No such file"):
        RayExecutor("ray-jobs:http://127.0.0.1:1").capacity()


@pytest.mark.long
def test_a_wrong_token(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-another-cluster")
    with pytest.raises(ExecutorAway, match="set RAY_AUTH_TOKEN"):
        RayExecutor(cluster.address).capacity()


@pytest.mark.long
def test_a_node_is_gone_and_what_goes_on_is_cancelled(team: Team) -> None:
    asked = team.ask("A100", "the node was killed; then it was cancelled")
    asked.begun()
    node = team.cluster.nodes["A100"]
    assert node.attempts()
    node.kill_raylet()
    until(lambda: not node.attempts())
    job = until(lambda: (found := asked.now).state == "preempted" and found)
    assert "is gone" in job.attempts[0]["reason"]
    node.kill()
    node = team.cluster.add("A100")
    assert asked.begun() == node.folder
    team.client.cancel(asked.id)
    until(lambda: not node.attempts())
    job = until(lambda: (found := asked.now).attempts[-1]["state"] != "running" and found)
    assert (job.state, states(job)) == ("cancelled", ["preempted", "cancelled"])


@pytest.mark.long
def test_the_head_is_gone_and_remembers_nothing(team: Team) -> None:
    asked = team.ask("H100", "the head was killed")
    asked.begun()
    executor, external = RayExecutor(team.cluster.address), asked.external
    assert executor.status([external])[external].state == "running"
    team.cluster.kill()
    with pytest.raises(ExecutorAway):
        executor.status([external])
    team.cluster.start("H100")
    assert executor.status([external])[external].state == "unknown"
    asked.begun()
    job = asked.finish()
    assert (job.state, states(job)) == ("done", ["lost", "done"])
