"""Attempts on a real Ray cluster of this machine, whose nodes say that they have GPUs."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from advisor.client import Job
from advisor.jobs.token import digest, made
from advisor.service.database import Database
from advisor.service.executors import Capacity, ExecutorAway
from advisor.service.executors.ray import ACCELERATOR, UNNAMED, RayExecutor
from advisor.service.schema import Attempt
from tests.forks import until
from tests.service.clusters import FEW, TOKEN, Cluster, Team
from tests.service.serving import answering, ask, start_of

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
        with contextlib.closing(Cluster()) as found:
            found.start("H100", "A100")
            yield found


@pytest.fixture(scope="module")
def team(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    folder = tmp_path_factory.mktemp("team")
    team = Team(folder, "--executor", cluster.address, lease_s=4.0)
    try:
        yield team
    finally:
        team.server.stop(signal.SIGKILL)


class Waiting:
    """A job whose attempts wait where its model begins, until they are let through."""

    def __init__(self, team: Team, folder: Path, gpu: str) -> None:
        self.team, self.where, self.gate = team, folder / f"{gpu}-where", folder / f"{gpu}-gate"
        model = MODEL.format(where=str(self.where), gate=str(self.gate))
        self.id = team.submit({"model.py": model}, target="model.py:Net", gpu=gpu, **FEW)

    @property
    def now(self) -> Job:
        return self.team.client.job(self.id)

    @property
    def external(self) -> str:
        """Its latest attempt, as Ray calls it."""
        last = select(Attempt.external).where(Attempt.job == self.id).order_by(Attempt.id.desc())
        with Database(self.team.database).reading() as session:
            return session.scalars(last).first() or ""

    def begun(self) -> str:
        """The node on which an attempt is in the middle of its work, once one is."""
        found: str = until(lambda: self.where.exists() and self.where.read_text())
        self.where.unlink()
        return found

    def finish(self) -> Job:
        self.gate.touch()
        return self.team.until(self.id, lambda job: job.over)


def states(job: Job) -> list[str]:
    return [one["state"] for one in job.attempts]


@contextlib.contextmanager
def head(answers: Mapping[str, Any], status: int = 200) -> Iterator[tuple[RayExecutor, list[Any]]]:
    """An executor of a made-up head, and what it is sent."""
    sent: list[tuple[str, bytes]] = []

    def answer(path: str) -> tuple[int, dict[str, str], bytes]:
        found = answers.get(path.partition("?")[0], answers.get(""))
        data = found if isinstance(found, bytes) else json.dumps(found).encode()
        return 404 if found is None else status, {}, data

    with answering(answer, sent) as url:
        yield RayExecutor(f"ray-jobs:{url}"), sent


def test_what_is_no_head_of_ray_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for status, said, why in (
        (200, b"<html>", "^no head of Ray"),
        (200, b"[]", "^no head of Ray"),
        (200, b'{"data": {"result": {"result": [{}]}}}', "^no head of Ray"),
        (401, b"Unauthorized", "^Unauthorized; set RAY_AUTH_TOKEN"),
        (500, b"Traceback:\nValueError: x\x07", r"^HTTP 500: ValueError: x\?"),
    ):
        with head({"": said}, status) as (executor, _), pytest.raises(ExecutorAway, match=why):
            executor.capacity()
    nobody = RayExecutor("ray-jobs:http://127.0.0.1:1")
    with pytest.raises(ExecutorAway, match=r"^Connection refused"):
        nobody.capacity()
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ExecutorAway, match=f"token file {tmp_path}/none: No such file"):
        nobody.capacity()


def node(id: str, gpu: str = "", gpus: int = 0, state: str = "ALIVE") -> dict[str, Any]:
    has = {"resources_total": {"CPU": 1.0, "GPU": gpus, "memory": 1.0}, "state_message": None}
    labels = {ACCELERATOR: gpu} if gpu else {}
    return {"node_id": id, "node_ip": f"10.0.0.{id}", "labels": labels, "state": state, **has}


def job(id: str, status: str, **more: Any) -> dict[str, Any]:
    none = dict.fromkeys(["message", "error_type", "driver_node_id", "driver_exit_code"])
    return {"submission_id": id, "status": status, "metadata": None, **none, **more}


def test_a_cluster_is_read_and_an_attempt_is_placed_where_it_was_claimed() -> None:
    nodes = [node("1", "H100", 2), node("2", gpus=1), node("3", "H100", 2, "DEAD")]
    given = {"advisor_gpus": "1", "advisor_gpu": "H100"}
    jobs = {
        "advisor-1": job("advisor-1", "PENDING", metadata=given, message="waits\n..."),
        "advisor-2": job("advisor-2", "RUNNING", driver_node_id="3"),
        "advisor-3": job("advisor-3", "FAILED", message="Traceback:\nOSError: x"),
        "advisor-4": job("advisor-4", "FAILED", error_type="JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE"),
        "others": job("others", "RUNNING", metadata={"x": "y"}),
    }
    answers = {
        "/api/v0/nodes": {"data": {"result": {"result": nodes}}},
        "/nodes": {"data": {"nodeLogicalResources": {"2": "0.5/1.0 GPU\n1.0/1.0 CPU\n"}}},
        "/api/jobs/": list(jobs.values()),
        **{f"/api/jobs/{name}": one for name, one in jobs.items()},
    }
    with head(answers) as (executor, _):
        assert executor.capacity() == [
            Capacity(gpu="H100", gpus=1, total=2, why="1 of 2 on 10.0.0.1 are in use"),
            Capacity(gpu="", gpus=0),
            Capacity(gpu=UNNAMED, gpus=0, total=1, why="1 of 1 on 10.0.0.2 are in use"),
        ]
        found = executor.status([f"advisor-{n}" for n in range(1, 6)]).values()
        assert [(one.state, one.reason.partition("; ")[0]) for one in found] == [
            ("running", "waits"),
            ("preempted", "its node 10.0.0.3 is gone: Ray says it is dead"),
            ("ended", "OSError: x"),
            ("preempted", "Ray found no free node for the attempt: "),
            ("unknown", "Ray has no such job"),
        ]
    one = start_of("advisor-6", "H100", 1, env={"pip": "timm einops"})
    with head({"/api/jobs/": {"submission_id": "advisor-6"}}) as (executor, sent):
        executor.start(one)
        executor.start(replace(one, gpu=UNNAMED))
    first, second = (json.loads(body) for _token, body in sent)
    labels = [request["entrypoint_label_selector"] for request in (first, second)]
    assert labels == [{ACCELERATOR: "H100"}, {}] and first["metadata"] == given
    assert first["runtime_env"]["pip"] == ["timm", "einops"]


@pytest.mark.long
def test_placed_while_the_server_is_killed(team: Team, cluster: Cluster, tmp_path: Path) -> None:
    one, two, none = (Waiting(team, tmp_path, gpu) for gpu in ("H100", "A100", "H200"))
    assert one.begun() == cluster.nodes["H100"].folder
    assert two.begun() == cluster.nodes["A100"].folder
    given = json.loads(cluster.ask("GET", f"/api/jobs/{one.external}"))["runtime_env"]["env_vars"]
    assert given.keys() == {"ADVISOR_SERVER", "ADVISOR_START_TOKEN"}  # which Ray tells everybody
    own = {"digest": digest(made()).hex()}
    stolen = ask(team.port, "POST", "/api/attempt/begin", given["ADVISOR_START_TOKEN"], own)
    assert stolen.status == 409
    team.server.stop(signal.SIGKILL)
    one.gate.touch()
    two.gate.touch()
    team.start()
    for asked in (one, two):
        job = asked.finish()
        assert (job.state, states(job)) == ("done", ["done"]) and job.record, job
        reason = job.attempts[0]["reason"]
        assert ("used a second time" in reason) == (asked is one) and job.record in reason
    job = until(lambda: (found := none.now).reason and found)
    assert job.state == "queued" and "named 'H200'" in job.reason
    assert "H100" in job.reason and "A100" in job.reason


@pytest.mark.long
def test_a_node_is_gone_and_a_job_cancelled(team: Team, cluster: Cluster, tmp_path: Path) -> None:
    asked = Waiting(team, tmp_path, "A100")
    asked.begun()
    node = cluster.nodes["A100"]
    assert node.attempts()
    node.kill_raylet()
    until(lambda: not node.attempts())
    job = until(lambda: (found := asked.now).state == "preempted" and found)
    assert "is gone" in job.attempts[0]["reason"]
    node.kill()
    node = cluster.add("A100")
    assert asked.begun() == node.folder
    team.client.cancel(asked.id)
    until(lambda: not node.attempts())
    job = until(lambda: (found := asked.now).attempts[-1]["state"] != "running" and found)
    assert (job.state, states(job)) == ("cancelled", ["preempted", "cancelled"])


@pytest.mark.long
def test_the_head_is_gone_and_knows_nothing(team: Team, cluster: Cluster, tmp_path: Path) -> None:
    asked = Waiting(team, tmp_path, "H100")
    asked.begun()
    executor, external = RayExecutor(cluster.address), asked.external
    assert executor.status([external])[external].state == "running"
    cluster.kill()
    with pytest.raises(ExecutorAway):
        executor.status([external])
    cluster.start("H100")
    assert executor.status([external])[external].state == "unknown"
    asked.begun()
    job = asked.finish()
    assert (job.state, states(job)) == ("done", ["lost", "done"])
