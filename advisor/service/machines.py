"""The machines that jobs run on, as the pages show them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from advisor.service.executors import Executor, ExecutorAway, Room
from advisor.service.schema import Attempt, Job

ASKS_S = 5.0
"""An executor is asked at most this often, however many people look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """GPUs of one name, or the CPU, of an executor. `why`: why some are not free."""

    name: str
    free: int
    total: int
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """An executor; `why` it is down, '' if it is up."""

    name: str
    devices: Sequence[Device] = ()
    why: str = ""


class Machines:
    """The executors of this server."""

    def __init__(self, executors: Sequence[Executor] = ()) -> None:
        self._executors = executors
        self._lock = threading.Lock()
        self._asked, self._seen = -ASKS_S, tuple[Machine, ...]()

    def look(self) -> Sequence[Machine]:
        """Each executor with its devices, some seconds old at most."""
        with self._lock:
            if time.monotonic() - self._asked >= ASKS_S:
                self._seen = tuple(map(_machine, self._executors))
                self._asked = time.monotonic()
            return self._seen


def _machine(executor: Executor) -> Machine:
    try:
        return Machine(name=executor.name, devices=_devices(executor.room()))
    except ExecutorAway as exc:
        return Machine(name=executor.name, why=str(exc))


def _devices(rooms: Sequence[Room]) -> Sequence[Device]:
    """The devices of some rooms, of equal names together, the CPU last."""
    found = []
    for name in sorted({room.gpu for room in rooms} - {""}):
        alike = [room for room in rooms if room.gpu == name]
        found.append(
            Device(
                name=name,
                free=sum(room.gpus for room in alike),
                total=sum(room.total for room in alike),
                why="; ".join(dict.fromkeys(room.why for room in alike if room.why)),
            )
        )
    cpus = sum(not room.gpu for room in rooms)
    why = "" if cpus else "a job is measured on this executor"
    return [*found, Device(name="CPU", free=cpus, total=max(cpus, 1), why=why)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A job that runs, and where."""

    job: int
    what: str
    executor: str
    device: str
    started: float


def running(session: Session) -> list[Running]:
    """The jobs that run, of all servers of the database."""
    columns = (Attempt.executor, Attempt.device, Attempt.started)
    query = select(Job.id.label("job"), Job.what, *columns).join(Job, Attempt.job == Job.id)
    rows = session.execute(query.where(Attempt.state == "running").order_by(Job.id)).mappings()
    return [Running(**row) for row in rows]


def troubles(machines: Sequence[Machine]) -> list[str]:
    """Why no executor can start anything; empty if one can."""
    if not machines:
        return ["This server has no executor, so it starts no jobs. See --executor."]
    if all(one.why for one in machines):
        return [f"The executor {one.name} is down: {one.why}" for one in machines]
    return []
