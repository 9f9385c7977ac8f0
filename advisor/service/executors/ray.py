"""A Ray cluster: attempts are Ray jobs, placed by the label of a node's GPUs.

Spoken with over the REST API of Ray's head, so that a server needs no Ray. Of Ray 2.60: its jobs in
ray/dashboard/modules/job (job_head.py; common.py, `JobSubmitRequest`); its nodes with their labels
and resources in dashboard/modules/state/state_head.py, /api/v0/nodes (util/state/common.py,
`NodeState`); what is in use of them in dashboard/modules/node/node_head.py, /nodes?view=summary,
some seconds late. Ray's jobs do not outlive its head.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import re
import ssl
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from advisor.errors import UsageError, printable
from advisor.jobs.spec import JobSpec, gpu_matches
from advisor.service.executors import Capacity, Executor, ExecutorAway, Start, Status, Unplaceable

LABEL = "ray.io/accelerator-type"
"""Ray sets it itself where it finds a GPU: 'H100' for an 'NVIDIA H100 80GB HBM3'."""
UNNAMED = "GPU without a label"
PORT = 8265
"""Of the REST API, where an address names none."""
FORMS = "ray-jobs:http[s]://HOST[:8265], or ray://HOST[:10001] where the REST API has port 8265"
_FORM = re.compile(
    r"(?:ray-jobs:(?P<scheme>https?)|ray)://(?P<host>[\w.-]+|\[[0-9a-fA-F:.]+\])(?::(?P<port>\d{1,5}))?/?"
)
_WORKER = "exec python -m advisor.jobs.worker"
"""Without a shell between: Ray kills the process that it started, and not what that left behind."""
_WAITS_S = 15.0
"""Longer than Ray's head waits for a node that takes a job."""
_MAX_ANSWER = 64 * 2**20
_MAX_NODES = 10_000
_GPU, _CPU = "GPU", "CPU"
_USED = re.compile(r"^([\d.]+)/[\d.]+ (GPU|CPU)\b", re.MULTILINE)
T = TypeVar("T")
_NEVER_BEGAN = ("JOB_SUPERVISOR_ACTOR_START_TIMEOUT", "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE")
"""Ray's words for a job that found no node: others had taken it."""


@dataclass(frozen=True, slots=True)
class _Node:
    """`gpu`: its label's value, '' for none; `total`: of GPUs and CPUs; `gone`: why, '' alive."""

    id: str
    ip: str
    gpu: str
    total: Mapping[str, float]
    gone: str

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> _Node:
        total = said["resources_total"]
        return cls(
            id=said["node_id"],
            ip=said["node_ip"],
            gpu=said["labels"].get(LABEL, ""),
            total={what: float(total.get(what, 0.0)) for what in (_GPU, _CPU)},
            gone="" if said["state"] == "ALIVE" else said["state_message"] or "it is dead",
        )


@dataclass(frozen=True, slots=True)
class _Job:
    """`node`: its id, '' before it has one; `ended`: its command did, by itself; `error`: Ray's
    word for why it failed; `gpus` and `labels`: what it asked for, of an attempt."""

    id: str
    status: str
    why: str
    error: str
    node: str
    ended: bool
    gpus: int
    labels: tuple[str, ...]

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> _Job:
        asked = said["metadata"] or {}
        return cls(
            id=said["submission_id"] or "",
            status=said["status"],
            why=_last_line(said["message"] or ""),
            error=said["error_type"] or "",
            node=said["driver_node_id"] or "",
            ended=said["driver_exit_code"] is not None,
            gpus=int(asked.get("advisor_gpus", 0)),
            labels=tuple(asked.get("advisor_labels", "").split()),
        )

    @property
    def live(self) -> bool:
        return self.status in ("PENDING", "RUNNING")


class RayExecutor:
    """ray-jobs:http[s]://HOST[:PORT], or ray://HOST.

    The token of a cluster that asks for one is found as Ray finds it: $RAY_AUTH_TOKEN, the file
    $RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token.

    Raises:
        UsageError: the address has none of these forms.
    """

    def __init__(self, address: str) -> None:
        found = _FORM.fullmatch(address)
        if found is None or int(found["port"] or 0) > 0xFFFF:
            raise UsageError(f"--executor {address[:200]!r}: expected {FORMS}")
        self._tls = found["scheme"] == "https"
        port = int(found["port"] or PORT) if found["scheme"] else PORT
        self._address = found["host"].strip("[]"), port
        self.name = f"ray:{found['scheme'] or 'http'}://{found['host']}:{port}"

    def capacity(self) -> Sequence[Capacity]:
        nodes = [node for node in self._nodes() if not node.gone]
        used = self._used(nodes)
        rooms = []
        for node in nodes:
            if gpus := int(node.total[_GPU]):
                taken = math.ceil(used[node.id, _GPU])
                why = f"{taken} of {gpus} on {node.ip} are in use" if taken else ""
                free = max(0, gpus - taken)
                rooms.append(Capacity(gpu=node.gpu or UNNAMED, gpus=free, total=gpus, why=why))
            if node.total[_CPU] - used[node.id, _CPU] >= 1:
                rooms.append(Capacity(gpu="", gpus=0))
        return rooms

    def start(self, start: Start) -> None:
        asked = start.asked
        labels = self._labels(asked) if asked.gpus else []
        if self._job(start.external) is None:
            said = self._ask("POST", "/api/jobs/", _request(start, labels))[1]
            self._decoded(said, lambda said: said["submission_id"])

    def status(self, external: Sequence[str]) -> Mapping[str, Status]:
        jobs = {one: self._job(one) for one in external}
        nodes = {node.id: node for node in self._nodes()}
        return {one: _status(job, nodes) for one, job in jobs.items()}

    def stop(self, external: str) -> None:
        self._ask("POST", f"/api/jobs/{quote(external, '')}/stop")

    def close(self) -> None:
        """Nothing is open between two requests."""

    def _labels(self, asked: JobSpec) -> list[str]:
        """Those of the nodes that could run it, if not now; none where any GPU will do.

        Raises:
            Unplaceable: no node could.
        """
        nodes = [node for node in self._nodes() if not node.gone and node.total[_GPU] >= 1]
        named = [node for node in nodes if gpu_matches(asked.gpu, node.gpu or UNNAMED)]
        fit = [node for node in named if node.total[_GPU] >= asked.gpus]
        if not fit:
            wanted = f"{asked.gpus} GPUs" if asked.gpus > 1 else "a GPU"
            label = f" and {asked.gpu!r} in its label {LABEL}" if asked.gpu else ""
            raise Unplaceable(f"{self.name}: no node has {wanted}{label}; {_known(nodes)}")
        return sorted({node.gpu for node in fit if node.gpu}) if asked.gpu else []

    def _used(self, nodes: Iterable[_Node]) -> dict[tuple[str, str], float]:
        """What of the nodes is taken: as Ray's own account says, or by attempts since then."""
        said = self._read("/nodes?view=summary", lambda said: said["data"]["nodeLogicalResources"])
        used: dict[tuple[str, str], float] = defaultdict(float)
        for job in self._read("/api/jobs/", lambda said: [_Job.of(one) for one in said]):
            if job.live and job.id.startswith("advisor-"):
                _take(used, nodes, job)
        for node in nodes:
            for number, what in _USED.findall((said or {}).get(node.id, "")):
                used[node.id, what] = max(used[node.id, what], float(number))
        return used

    def _nodes(self) -> list[_Node]:
        """All that Ray knows, those that are gone too."""
        return self._read(
            f"/api/v0/nodes?limit={_MAX_NODES}",
            lambda said: [_Node.of(one) for one in said["data"]["result"]["result"]],
        )

    def _job(self, external: str) -> _Job | None:
        status, said = self._ask("GET", f"/api/jobs/{quote(external, '')}")
        return None if status == 404 else self._decoded(said, _Job.of)

    def _read(self, path: str, of: Callable[[Any], T]) -> T:
        return self._decoded(self._ask("GET", path)[1], of)

    def _decoded(self, said: bytes, of: Callable[[Any], T]) -> T:
        try:
            return of(json.loads(said))
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ExecutorAway(f"{self.name}: no head of Ray 2.60 or later answers there") from exc

    def _ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """Status and body of an answer, 200 or 404.

        Raises:
            ExecutorAway: nobody answers, or with a refusal or a fault.
        """
        sent = None if body is None else json.dumps(body)
        try:
            with contextlib.closing(self._connection()) as connection:
                connection.request(method, path, sent, _headers())
                answer = connection.getresponse()
                status, said = answer.status, answer.read(_MAX_ANSWER)
        except (OSError, http.client.HTTPException, ValueError) as exc:
            reason = getattr(exc, "strerror", "") or str(exc) or type(exc).__name__
            raise ExecutorAway(f"{self.name}: {reason}") from exc
        if status in (200, 404):
            return status, said
        why = _last_line(said.decode(errors="replace"))
        if status in (401, 403):
            raise ExecutorAway(f"{self.name}: {why}; set RAY_AUTH_TOKEN")
        raise ExecutorAway(f"{self.name}: HTTP {status}: {why}")

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._address
        if not self._tls:
            return http.client.HTTPConnection(host, port, timeout=_WAITS_S)
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(host, port, timeout=_WAITS_S, context=context)


def _request(start: Start, labels: Sequence[str]) -> dict[str, Any]:
    """What asks for an attempt, on a node that has one of these labels."""
    asked = start.asked
    environment: dict[str, Any] = {
        "env_vars": {"ADVISOR_SERVER": start.server_url, "ADVISOR_START_TOKEN": start.token}
    }
    if "pip" in asked.env:
        environment["pip"] = asked.env["pip"].split()
    if "container" in asked.env:
        environment["image_uri"] = asked.env["container"]
    return {
        "entrypoint": _WORKER,
        "submission_id": start.external,
        "runtime_env": environment,
        "metadata": {"advisor_gpus": str(asked.gpus), "advisor_labels": " ".join(labels)},
        "entrypoint_num_gpus": asked.gpus,
        "entrypoint_num_cpus": 0 if asked.gpus else 1,
        "entrypoint_label_selector": {LABEL: f"in({','.join(labels)})"} if labels else {},
    }


def _take(used: dict[tuple[str, str], float], nodes: Iterable[_Node], job: _Job) -> None:
    """Count what an attempt has, or will have on the first node that has it."""
    what, number = (_GPU, job.gpus) if job.gpus else (_CPU, 1)
    for node in nodes:
        free = node.total[what] - used[node.id, what]
        fits = free >= number and (not job.labels or node.gpu in job.labels)
        if node.id == job.node or (not job.node and fits):
            used[node.id, what] += number
            return


def _status(job: _Job | None, nodes: Mapping[str, _Node]) -> Status:
    if job is None:
        return Status(state="unknown", reason="Ray does not know it; was its head restarted?")
    node = nodes.get(job.node)
    if node is not None and node.gone and not job.ended and (job.live or job.status == "FAILED"):
        return Status(state="preempted", reason=f"its node {node.ip} is gone: {node.gone}")
    if job.live:
        return Status(state="running", reason=job.why if job.status == "PENDING" else "")
    if job.error in _NEVER_BEGAN:
        return Status(state="preempted", reason=f"Ray found no node for it: {job.why}")
    return Status(state="ended", reason=job.why if job.status == "FAILED" else job.status.lower())


def _known(nodes: Iterable[_Node]) -> str:
    counted = Counter((node.gpu or UNNAMED, int(node.total[_GPU])) for node in nodes)
    kinds = [f"{gpus} × {gpu} on {n} node(s)" for (gpu, gpus), n in sorted(counted.items())]
    return f"there are: {', '.join(kinds)}" if kinds else "there is no node with a GPU"


def _last_line(text: str) -> str:
    """Of a traceback or a message of Ray's, what says why."""
    lines = [line.strip() for line in text.splitlines()]
    return printable(next((line for line in reversed(lines) if line.strip(".")), ""))[:300]


def _headers() -> dict[str, str]:
    """Raises ValueError where the file with the token cannot be read."""
    token = os.environ.get("RAY_AUTH_TOKEN", "").strip()
    if not token:
        named = os.environ.get("RAY_AUTH_TOKEN_PATH", "")
        path = Path(named) if named else Path.home() / ".ray" / "auth_token"
        if named or path.is_file():
            try:
                token = path.read_text().strip()
            except OSError as exc:
                raise ValueError(f"token file {path}: {exc.strerror or exc}") from exc
    found = {"Content-Type": "application/json"}
    return found | ({"Authorization": f"Bearer {token}"} if token else {})


def _proof(executor: RayExecutor) -> Executor:
    return executor
