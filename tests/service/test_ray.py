"""The Ray executor, on a fake head and on a real local cluster whose nodes claim fake GPUs."""

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
from tests.service.clusters import FEW, TOKEN, Cluster, Stack
from tests.service.serving import ask, fake_server, make_start

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
def stack(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("team")
    running = Stack(folder, "--executor", cluster.address, lease_s=4.0)
    try:
        yield running
    finally:
        running.server.stop(signal.SIGKILL)


class GatedJob:
    """A job whose attempts wait at the start of the model file until `finish` opens the gate."""

    def __init__(self, stack: Stack, folder: Path, gpu: str) -> None:
        self.stack, self.where = stack, folder / f"{gpu}-where"
        self.gate = folder / f"{gpu}-gate"
        model = MODEL.format(where=str(self.where), gate=str(self.gate))
        self.id = stack.submit({"model.py": model}, target="model.py:Net", gpu=gpu, **FEW)

    @property
    def now(self) -> Job:
        return self.stack.client.job(self.id)

    @property
    def external(self) -> str:
        last = select(Attempt.external).where(Attempt.job == self.id).order_by(Attempt.id.desc())
        with Database(self.stack.database).reading() as session:
            return session.scalars(last).first() or ""

    def wait_running(self) -> str:
        """Wait until an attempt runs, and return its node."""
        found: str = until(lambda: self.where.exists() and self.where.read_text())
        self.where.unlink()
        return found

    def finish(self) -> Job:
        self.gate.touch()
        return self.stack.until(self.id, lambda job: job.over)


def states(job: Job) -> list[str]:
    return [one["state"] for one in job.attempts]


@contextlib.contextmanager
def head(answers: Mapping[str, Any], status: int = 200) -> Iterator[tuple[RayExecutor, list[Any]]]:
    """An executor for a fake head, and the list of requests that the head gets."""
    sent: list[tuple[str, bytes]] = []

    def answer(path: str) -> tuple[int, dict[str, str], bytes]:
        found = answers.get(path.partition("?")[0], answers.get(""))
        data = found if isinstance(found, bytes) else json.dumps(found).encode()
        return 404 if found is None else status, {}, data

    with fake_server(answer, sent) as url:
        yield RayExecutor(f"ray-jobs:{url}"), sent


def test_invalid_heads_raise_executor_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for status, body, why in (
        (200, b"<html>", "^no head of Ray"),
        (200, b"[]", "^no head of Ray"),
        (200, b'{"data": {"result": {"result": [{}]}}}', "^no head of Ray"),
        (401, b"Unauthorized", "^Unauthorized; set RAY_AUTH_TOKEN"),
        (500, b"Traceback:\nValueError: x\x07", r"^HTTP 500: ValueError: x\?"),
    ):
        with head({"": body}, status) as (executor, _), pytest.raises(ExecutorAway, match=why):
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


def test_the_cluster_state_is_read_and_jobs_are_labelled_with_their_gpu() -> None:
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
    one = make_start("advisor-6", "H100", 1, env={"pip": "timm einops"})
    with head({"/api/jobs/": {"submission_id": "advisor-6"}}) as (executor, sent):
        executor.start(one)
        executor.start(replace(one, gpu=UNNAMED))
    first, second = (json.loads(body) for _token, body in sent)
    labels = [request["entrypoint_label_selector"] for request in (first, second)]
    assert labels == [{ACCELERATOR: "H100"}, {}] and first["metadata"] == given
    assert first["runtime_env"]["pip"] == ["timm", "einops"]


@pytest.mark.long
def test_jobs_survive_a_kill_of_the_server(stack: Stack, cluster: Cluster, tmp_path: Path) -> None:
    one, two, none = (GatedJob(stack, tmp_path, gpu) for gpu in ("H100", "A100", "H200"))
    assert one.wait_running() == cluster.nodes["H100"].folder
    assert two.wait_running() == cluster.nodes["A100"].folder
    given = json.loads(cluster.ask("GET", f"/api/jobs/{one.external}"))["runtime_env"]["env_vars"]
    assert given.keys() == {"ADVISOR_SERVER", "ADVISOR_START_TOKEN"}  # Ray shows these to everybody
    own = {"digest": digest(made()).hex()}
    stolen = ask(stack.port, "POST", "/api/attempt/begin", given["ADVISOR_START_TOKEN"], own)
    assert stolen.status == 409
    stack.server.stop(signal.SIGKILL)
    one.gate.touch()
    two.gate.touch()
    stack.start()
    for asked in (one, two):
        job = asked.finish()
        assert (job.state, states(job)) == ("done", ["done"]) and job.record, job
        reason = job.attempts[0]["reason"]
        assert ("used a second time" in reason) == (asked is one) and job.record in reason
    job = until(lambda: (found := none.now).reason and found)
    assert job.state == "queued" and "named 'H200'" in job.reason
    assert "H100" in job.reason and "A100" in job.reason


@pytest.mark.long
def test_a_lost_node_and_a_cancelled_job(stack: Stack, cluster: Cluster, tmp_path: Path) -> None:
    asked = GatedJob(stack, tmp_path, "A100")
    asked.wait_running()
    node = cluster.nodes["A100"]
    assert node.attempts()
    node.kill_raylet()
    until(lambda: not node.attempts())
    job = until(lambda: (found := asked.now).state == "preempted" and found)
    assert "is gone" in job.attempts[0]["reason"]
    node.kill()
    node = cluster.add("A100")
    assert asked.wait_running() == node.folder
    stack.client.cancel(asked.id)
    until(lambda: not node.attempts())
    job = until(lambda: (found := asked.now).attempts[-1]["state"] != "running" and found)
    assert (job.state, states(job)) == ("cancelled", ["preempted", "cancelled"])


@pytest.mark.long
def test_a_restarted_head_has_lost_its_jobs(stack: Stack, cluster: Cluster, tmp_path: Path) -> None:
    asked = GatedJob(stack, tmp_path, "H100")
    asked.wait_running()
    executor, external = RayExecutor(cluster.address), asked.external
    assert executor.status([external])[external].state == "running"
    cluster.kill()
    with pytest.raises(ExecutorAway):
        executor.status([external])
    cluster.start("H100")
    assert executor.status([external])[external].state == "unknown"
    asked.wait_running()
    job = asked.finish()
    assert (job.state, states(job)) == ("done", ["lost", "done"])
