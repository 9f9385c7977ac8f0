"""Runs attempts as Ray jobs on a Ray cluster, placed by the label of a node's GPUs.

The server needs no Ray: this uses the REST API of Ray's head, version 2.60. Ray's source has jobs
in dashboard/modules/job (job_head.py; common.py, `JobSubmitRequest`); nodes with their labels and
resources, /api/v0/nodes, in dashboard/modules/state/state_head.py (util/state/common.py,
`NodeState`); used resources, some seconds late, /nodes?view=summary, in
dashboard/modules/node/node_head.py. Ray's jobs end when its head ends.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import urllib3

from advisor.errors import UsageError, printable, reason
from advisor.service.executors import Capacity, ExecutorAway, Start, Status, last_line

ACCELERATOR = "ray.io/accelerator-type"
"""Ray labels a node with its kind of GPU: 'H100' for an 'NVIDIA H100 80GB HBM3'."""
UNNAMED = "GPU without a label"
PORT = 8265  # the REST API's port if the address names none
FORMS = "ray-jobs:http[s]://HOST[:8265], or ray://HOST[:10001] where the REST API has port 8265"
_FORM = re.compile(
    r"(?:ray-jobs:(?P<scheme>https?)|ray)://(?P<host>[\w.-]+|\[[0-9a-fA-F:.]+\])(?::(?P<port>\d{1,5}))?/?"
)
_WORKER = "exec python -m advisor.jobs.worker"
"""'exec' replaces the shell: Ray kills only the process that it started, not its children."""
_WAITS_S = 15.0  # timeout of a request: longer than Ray's head waits for a node to accept a job
_MAX_ANSWER = 64 * 2**20
_MAX_NODES = 10_000
_USED = re.compile(r"^([\d.]+)/[\d.]+ (GPU|CPU)\b", re.MULTILINE)
_NEVER_BEGAN = ("JOB_SUPERVISOR_ACTOR_START_TIMEOUT", "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE")
"""Ray's error types for a job that found no free node."""
T = TypeVar("T")


class _Node(msgspec.Struct, frozen=True):
    node_id: str
    node_ip: str
    labels: dict[str, str]
    resources_total: dict[str, float]
    state: str
    state_message: str | None

    @property
    def gpu(self) -> str:
        return self.labels.get(ACCELERATOR) or UNNAMED

    @property
    def alive(self) -> bool:
        return self.state == "ALIVE"


class _Summary(msgspec.Struct, frozen=True):
    """`nodeLogicalResources`: each node's used resources, as text."""

    nodeLogicalResources: dict[str, str] | None


class _Asked(msgspec.Struct, frozen=True):
    advisor_gpus: int = 0
    advisor_gpu: str = ""


class _Job(msgspec.Struct, frozen=True):
    """`driver_node_id`: None until the job is placed; `driver_exit_code`: None until it exits."""

    submission_id: str | None
    status: str
    message: str | None
    error_type: str | None
    metadata: _Asked | None
    driver_node_id: str | None
    driver_exit_code: int | None

    @property
    def live(self) -> bool:
        return self.status in ("PENDING", "RUNNING")


class RayExecutor:
    """The executor for ray-jobs:http[s]://HOST[:PORT] or ray://HOST; UsageError for other forms.

    The cluster's token, if it requires one, is that of Ray: $RAY_AUTH_TOKEN, or the file
    $RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token.
    """

    def __init__(self, address: str) -> None:
        found = _FORM.fullmatch(address)
        if found is None or int(found["port"] or 0) > 0xFFFF:
            raise UsageError(f"--executor {address[:200]!r}: expected {FORMS}")
        port = int(found["port"] or PORT) if found["scheme"] else PORT
        self._url = f"{found['scheme'] or 'http'}://{found['host']}:{port}"
        self.name = f"ray:{self._url}"
        self._http = urllib3.PoolManager(timeout=_WAITS_S, retries=False)

    def capacity(self) -> Sequence[Capacity]:
        nodes = [node for node in self._nodes() if node.alive]
        used = self._used(nodes)
        found = []
        for node in nodes:
            if gpus := int(node.resources_total.get("GPU", 0)):
                taken = math.ceil(used[node.node_id, "GPU"])
                why = f"{taken} of {gpus} on {node.node_ip} are in use" if taken else ""
                free = max(0, gpus - taken)
                found.append(Capacity(gpu=node.gpu, gpus=free, total=gpus, why=why))
            if node.resources_total.get("CPU", 0) - used[node.node_id, "CPU"] >= 1:
                found.append(Capacity(gpu="", gpus=0))
        return found

    def start(self, start: Start) -> None:
        self._decoded(self._ask("POST", "/api/jobs/", _request(start)), str, "submission_id")

    def status(self, external: Sequence[str]) -> Mapping[str, Status]:
        if not external:
            return {}
        jobs, nodes = self._jobs(), {node.node_id: node for node in self._nodes()}
        return {one: _status(jobs.get(one), nodes) for one in external}

    def stop(self, external: str) -> None:
        self._ask("POST", f"/api/jobs/{quote(external, '')}/stop")

    def close(self) -> None:
        self._http.clear()

    def _used(self, nodes: Sequence[_Node]) -> Mapping[tuple[str, str], float]:
        """GPUs and CPUs in use by node: Ray's late count, or advisor's own if it is larger."""
        said = self._ask("GET", "/nodes?view=summary")
        account = self._decoded(said, _Summary, "data").nodeLogicalResources or {}
        used: dict[tuple[str, str], float] = defaultdict(float)
        for job in self._jobs().values():
            if job.live:
                _take(used, nodes, job)
        for node in nodes:
            for number, what in _USED.findall(account.get(node.node_id, "")):
                used[node.node_id, what] = max(used[node.node_id, what], float(number))
        return used

    def _nodes(self) -> list[_Node]:
        """All nodes that Ray knows, dead ones too."""
        said = self._ask("GET", f"/api/v0/nodes?limit={_MAX_NODES}")
        return self._decoded(said, list[_Node], "data", "result", "result")

    def _jobs(self) -> dict[str, _Job]:
        """The attempts that Ray knows, by name."""
        found = self._decoded(self._ask("GET", "/api/jobs/"), list[_Job])
        named = {job.submission_id or "": job for job in found}
        return {name: job for name, job in named.items() if name.startswith("advisor-")}

    def _decoded(self, said: bytes, cls: type[T], *names: str) -> T:
        """The part of an answer under these nested names, as `cls`."""
        try:
            plain = json.loads(said)
            for name in names:
                plain = plain[name]
            return msgspec.convert(plain, cls, strict=False)
        except (ValueError, KeyError, TypeError, msgspec.MsgspecError) as exc:
            raise ExecutorAway("no head of Ray 2.60 or later answers at this address") from exc

    def _ask(self, method: str, path: str, body: object = None) -> bytes:
        """The body of an answer; nothing for 404. Raises ExecutorAway if there is no answer, or for
        another error."""
        try:
            answer = self._http.request(
                method, self._url + path, json=body, headers=_headers(), preload_content=False
            )
            said = answer.read(_MAX_ANSWER)
            answer.close()
        except (OSError, urllib3.exceptions.HTTPError) as exc:
            why = getattr(exc.__cause__, "strerror", "") or str(exc) or type(exc).__name__
            raise ExecutorAway(printable(why)) from exc
        if answer.status in (200, 404):
            return said if answer.status == 200 else b""
        why = last_line(said.decode(errors="replace"))
        if answer.status in (401, 403):
            raise ExecutorAway(f"{why}; set RAY_AUTH_TOKEN")
        raise ExecutorAway(f"HTTP {answer.status}: {why}")


for _described in (list[_Node], list[_Job], _Summary):  # before threads use them; see `cache.codec`
    msgspec.json.Decoder(_described)


def _request(start: Start) -> dict[str, Any]:
    """The body of a request that starts an attempt on a node with the claimed GPU."""
    asked = start.asked
    environment: dict[str, Any] = {
        "env_vars": {"ADVISOR_SERVER": start.server_url, "ADVISOR_START_TOKEN": start.token}
    }
    if "pip" in asked.env:
        environment["pip"] = asked.env["pip"].split()
    if "container" in asked.env:
        environment["image_uri"] = asked.env["container"]
    labelled = asked.gpus and start.gpu != UNNAMED
    return {
        "entrypoint": _WORKER,
        "submission_id": start.external,
        "runtime_env": environment,
        "metadata": {"advisor_gpus": str(asked.gpus), "advisor_gpu": start.gpu},
        "entrypoint_num_gpus": asked.gpus,
        "entrypoint_num_cpus": 0 if asked.gpus else 1,
        "entrypoint_label_selector": {ACCELERATOR: start.gpu} if labelled else {},
    }


def _take(used: dict[tuple[str, str], float], nodes: Sequence[_Node], job: _Job) -> None:
    """Add an attempt's device to `used`: on its node, or else on the first node that fits."""
    asked = job.metadata or _Asked()
    what, number = ("GPU", asked.advisor_gpus) if asked.advisor_gpus else ("CPU", 1)
    for node in nodes:
        free = node.resources_total.get(what, 0) - used[node.node_id, what]
        fits = free >= number and (what == "CPU" or node.gpu == asked.advisor_gpu)
        if job.driver_node_id == node.node_id or (not job.driver_node_id and fits):
            used[node.node_id, what] += number
            return


def _status(job: _Job | None, nodes: Mapping[str, _Node]) -> Status:
    if job is None:
        return Status(state="unknown", reason="Ray has no such job; was Ray's head restarted?")
    node, why = nodes.get(job.driver_node_id or ""), last_line(job.message or "")
    unfinished = job.driver_exit_code is None and (job.live or job.status == "FAILED")
    if node is not None and not node.alive and unfinished:
        gone = node.state_message or "Ray says it is dead"
        return Status(state="preempted", reason=f"its node {node.node_ip} is gone: {gone}")
    if job.live:
        return Status(state="running", reason=why if job.status == "PENDING" else "")
    if job.error_type in _NEVER_BEGAN:
        return Status(state="preempted", reason=f"Ray found no free node for the attempt: {why}")
    return Status(state="ended", reason=why if job.status == "FAILED" else job.status.lower())


def _headers() -> dict[str, str]:
    """The headers of a request. Raises ExecutorAway if the token's file cannot be read."""
    token, named = os.environ.get("RAY_AUTH_TOKEN", ""), os.environ.get("RAY_AUTH_TOKEN_PATH", "")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    if not token.strip() and (named or path.is_file()):
        try:
            token = path.read_text()
        except OSError as exc:
            raise ExecutorAway(f"token file {path}: {reason(exc)}") from exc
    return {"Authorization": f"Bearer {token.strip()}"} if token.strip() else {}
