"""What starts attempts at jobs: this machine, or Ray.

An executor knows no database. The reconciler, which does, asks it for its capacity, starts attempts
there, and follows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from advisor.errors import AdvisorError
from advisor.jobs.spec import JobSpec

State = Literal["running", "ended", "preempted", "unknown"]


class Unplaceable(AdvisorError):
    """Nothing here can run that, now; the text says what is missing."""


class ExecutorAway(AdvisorError):
    """The executor does not answer; of its attempts nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Devices of one kind, as one attempt can have them.

    Attributes:
        gpu: the device's name as NVML has it, 'NVIDIA H100 80GB HBM3', or what kind it is where a
            cluster knows no more, 'H100'; '' for the CPU.
        gpus: how many are free; 0 for the CPU, which is listed only if it is free.
        total: how many there are.
        why: why some are not free, for people; '' if all are.
    """

    gpu: str
    gpus: int
    total: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """An attempt to start.

    Attributes:
        attempt: its id in the database; `number` of the job's attempts.
        external: what the executor is to call it.
        server_url: where its worker finds the server.
        token: its start token, which works once and is not stored.
    """

    attempt: int
    job: int
    number: int
    external: str
    server_url: str
    token: str
    asked: JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What became of an attempt. `unknown`: the executor has never heard of it, or forgot; `reason`
    is for people, and may be ''."""

    state: State
    reason: str = ""


class Executor(Protocol):
    """Starts attempts, and ends them. Every method raises ExecutorAway if it does not answer."""

    @property
    def name(self) -> str:
        """Unique: 'local:HOST', 'ray:ADDRESS'."""

    def capacity(self) -> Sequence[Capacity]: ...

    def start(self, start: Start) -> None:
        """Start an attempt.

        Raises:
            Unplaceable: it has nothing that fits.
        """

    def status(self, external: Sequence[str]) -> Mapping[str, Status]:
        """What became of each of some attempts."""

    def stop(self, external: str) -> None:
        """End an attempt and all that it started; one that is over is left alone."""

    def close(self) -> None:
        """Release what is open."""
