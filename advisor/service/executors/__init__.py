"""What starts attempts at jobs: this machine, Ray.

An executor knows no database. The reconciler, which does, asks it what could be started, starts
that, and looks what became of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from advisor.errors import AdvisorError
from advisor.jobs.spec import JobSpec, is_meant

State = Literal["running", "ended", "preempted", "unknown"]


class Unplaceable(AdvisorError):
    """Nothing here can run that, now; the text says what is missing."""


class ExecutorAway(AdvisorError):
    """The executor does not answer; of its attempts nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What could be started now.

    Attributes:
        gpu: the device's name as NVML has it, 'NVIDIA H100 80GB HBM3', or what kind it is where a
            cluster knows no more, 'H100'; '' for the CPU.
        gpus: how many of them one attempt can have now; 0 for the CPU, and where none is free.
        total: how many it could have if nothing else ran.
        why: for people, why some are not free; '' where all are.
    """

    gpu: str
    gpus: int
    total: int = 0
    why: str = ""

    def fits(self, asked: JobSpec) -> bool:
        """Whether what is asked for finds its device here."""
        if asked.gpus == 0:
            return not self.gpu
        return asked.gpus <= self.gpus and is_meant(asked.gpu, self.gpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What an attempt is started with.

    Attributes:
        external: what the executor is to call it, known before it is started.
        server_url: where its worker finds the server.
        token: its start token, good once: who reads it later has nothing.
    """

    external: str
    server_url: str
    token: str
    asked: JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What became of an attempt; `unknown`: the executor has never heard of it, or forgot.

    `reason` is for people, '' where there is nothing to say.
    """

    state: State
    reason: str = ""


class Executor(Protocol):
    """Starts attempts, and ends them."""

    @property
    def name(self) -> str:
        """What its attempts are noted under: 'local:HOST', 'ray:ADDRESS'."""

    def room(self) -> Sequence[Room]:
        """What could be started now.

        Raises:
            ExecutorAway: it does not answer.
        """

    def start(self, start: Start) -> str:
        """Start an attempt, once however often it is asked to; on which device, for people.

        Raises:
            Unplaceable: it has nothing that fits. ExecutorAway: it does not answer.
        """

    def status(self, external: Sequence[str]) -> Mapping[str, Status]:
        """What became of each of some attempts.

        Raises:
            ExecutorAway: it does not answer.
        """

    def stop(self, external: str) -> None:
        """End an attempt and all that it started; one that is over is left alone.

        Raises:
            ExecutorAway: it does not answer.
        """

    def close(self) -> None:
        """Keep nothing open."""
