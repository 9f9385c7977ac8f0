"""Executors run attempts: on this machine, or on Ray.

An executor does not use the database. The reconciler asks an executor for its capacity, starts
attempts on it, and follows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from advisor.errors import AdvisorError, UsageError, printable
from advisor.jobs.spec import JobSpec, gpu_matches

LOCAL, NONE, RAY = "local", "none", ("ray-jobs", "ray")  # the kinds of `advisor serve --executor`


class Unplaceable(AdvisorError):
    """No device of the executor can run the attempt now; the message says what is missing."""


class ExecutorAway(AdvisorError):
    """The executor does not answer, so the states of its attempts are unknown. The message does not
    name the executor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Devices of one kind on one machine.

    Attributes:
        gpu: the device's name from NVML, 'NVIDIA H100 80GB HBM3', or only its kind, 'H100', if the
            cluster knows no more; '' for the CPU.
        gpus: how many GPUs are free; 0 for the CPU, which is listed only if it is free.
        total: how many GPUs the machine has.
        why: why some GPUs are not free, for people; '' if all are.
    """

    gpu: str
    gpus: int
    total: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """An attempt to start.

    Attributes:
        attempt: its id in the database; `external`: its name at the executor.
        gpu: the device to use, as its Capacity names it.
        server_url: where the worker finds the server.
        token: the start token, which works once and is not stored.
    """

    attempt: int
    job: int
    external: str
    gpu: str
    server_url: str
    token: str
    asked: JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """An attempt's state. 'unknown': the executor never had the attempt, or has forgotten it."""

    state: Literal["running", "ended", "preempted", "unknown"]
    reason: str = ""


class Executor(Protocol):
    """Starts and ends attempts. Methods raise ExecutorAway if the executor does not answer."""

    @property
    def name(self) -> str:
        """The executor's unique name: 'local:HOST:DIGEST', 'ray:URL'."""

    def capacity(self) -> Sequence[Capacity]: ...

    def start(self, start: Start) -> None:
        """Start an attempt. Raises Unplaceable if no device fits."""

    def status(self, external: Sequence[str]) -> Mapping[str, Status]:
        """The status of each of these attempts, which are all that should run."""

    def stop(self, external: str) -> None:
        """End an attempt and all that it started. An attempt that is over stays unchanged."""

    def close(self) -> None:
        """End the workers of this machine, and close connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """An executor's last answer. `why`: the reason that it is down; '' if it is up."""

    name: str
    capacities: Sequence[Capacity] = ()
    why: str = ""

    @property
    def devices(self) -> Sequence[Capacity]:
        """The capacities, summed for each device name, the CPU last."""
        found = []
        for name in sorted({one.gpu for one in self.capacities} - {""}):
            alike = [one for one in self.capacities if one.gpu == name]
            free, total = sum(one.gpus for one in alike), sum(one.total for one in alike)
            why = "; ".join(dict.fromkeys(one.why for one in alike if one.why))
            found.append(Capacity(gpu=name, gpus=free, total=total, why=why))
        cpus = sum(not one.gpu for one in self.capacities)
        why = "" if cpus else "a job is measured on this executor"
        return [*found, Capacity(gpu="CPU", gpus=cpus, total=max(cpus, 1), why=why)]


def why_waits(gpu: str, gpus: int, machines: Iterable[Machine]) -> tuple[str, bool]:
    """Returns (why a job for these devices waits, or ''; whether any machine has such devices)."""
    up = [one for one in machines if not one.why]
    known = [capacity for one in up for capacity in one.capacities]
    if not gpus and up:
        idle = any(not one.gpu for one in known)
        return "" if idle else "waits for a CPU on which no job is measured", True
    named = [one for one in known if one.gpu and gpu_matches(gpu, one.gpu)]
    if gpus and any(one.gpus >= gpus for one in named):
        return "", True
    wanted = f"{gpus} GPUs" if gpus > 1 else "a GPU" if gpus else "a CPU"
    if named:
        why = "; ".join(dict.fromkeys(one.why for one in named if one.why))
        free = max(one.gpus for one in named)
        return f"waits for {wanted} of {named[0].gpu}: {free} free" + f" ({why})" * bool(why), True
    called = f" named {gpu!r}" if gpu else ""
    there = ", ".join(dict.fromkeys(one.gpu or "the CPU" for one in known)) or "none"
    return f"no known machine has {wanted}{called} (known: {there}); the job waits", False


def last_line(text: str) -> str:
    """The last line of a traceback or a message, for people; '' if there is none."""
    lines = [line.strip() for line in text.splitlines()]
    return printable(next((line for line in reversed(lines) if line.strip(".")), ""))[:300]


def open_executors(texts: Iterable[str], database: str) -> list[Executor]:
    """Open the executors that `advisor serve --executor` names; 'none' opens no executor. Raises
    UsageError if a text is unknown or given twice, or 'none' is not the only text. `database`: its
    URL without the password."""
    from advisor.service.executors.local import Local
    from advisor.service.executors.ray import RayExecutor

    if NONE in (texts := list(texts)):
        if len(texts) > 1:
            raise UsageError(f"--executor {NONE}: starts no jobs; give it alone, or leave it out")
        return []
    found: dict[str, Executor] = {}
    for text in texts:
        scheme = text.partition(":")[0]
        if scheme not in (LOCAL, *RAY):
            known = ", ".join([LOCAL, *RAY, NONE])
            raise UsageError(f"--executor {text[:80]!r}: expected one of {known}")
        one = Local(database) if scheme == LOCAL else RayExecutor(text)
        if found.setdefault(one.name, one) is not one:
            raise UsageError(f"--executor {text[:80]!r}: given twice; give it once")
    return list(found.values())
