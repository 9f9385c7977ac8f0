"""Brings the database, which is the truth, and the executors together: what waits is started where
there is room, and of what was started it is seen what became of it.

Several servers do this on one database: a job is claimed by one of them, and every change looks at
the state that it leaves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from advisor.errors import StoreError
from advisor.jobs.spec import is_meant
from advisor.service import attempts, jobs
from advisor.service.attempts import LEASE_S, Claimed, Running
from advisor.service.database import Database
from advisor.service.executors import Executor, ExecutorAway, Room, Start, Status, Unplaceable
from advisor.service.loop import Loop
from advisor.service.schema import Job

EVERY_S = 2.0
SILENT_S = 5 * LEASE_S
"""After which an attempt whose executor sees it run, and which does not beat, is given up."""
_UNKNOWN = Status(state="unknown", reason="its executor knows nothing of it")
_log = logging.getLogger("advisor")


class Reconciler:
    """Of one server.

    Attributes:
        loop: its turns.

    Args:
        server_url: where workers find a server of this database.
        now: a clock in seconds.
    """

    def __init__(
        self,
        database: Database,
        executors: Sequence[Executor],
        server_url: str,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database, self._executors, self._server_url = database, executors, server_url
        self._now = now
        self.loop = Loop("reconciler", EVERY_S, self.turn)
        self._last = self._since = now()
        self._away: dict[str, str] = {}

    def close(self) -> None:
        """Look at nothing any more, and end what runs on this machine: its workers save what they
        have, and say that they were preempted, to this server."""
        self.loop.close()
        for executor in self._executors:
            executor.close()

    def turn(self) -> None:
        """Look at everything once.

        Raises:
            StoreError: the database does not answer.
        """
        if self._now() - self._last > LEASE_S / 2:
            self._since = self._now()  # this machine slept, and so did its workers
        try:
            rooms = [room for executor in self._executors for room in self._turned(executor)]
            self._lose_silent()
            self._tell(rooms)
        except StoreError:
            self._since = self._now()
            raise
        finally:
            self._last = self._now()

    @property
    def _hears(self) -> bool:
        """Whether workers had the time to be heard: they are silent while no server is there, or
        its database is not."""
        return self._now() - self._since > LEASE_S

    def _turned(self, executor: Executor) -> Sequence[Room]:
        """See what an executor does, and start what it can; the room that it has left."""
        try:
            self._look(executor)
            rooms = self._fill(executor)
        except ExecutorAway as exc:
            if self._away.get(executor.name) != str(exc):
                _log.warning("executor %s: %s", executor.name, exc)
            self._away[executor.name] = str(exc)
            return []
        self._away.pop(executor.name, None)
        return rooms

    def _look(self, executor: Executor) -> None:
        with self._database.reading() as session:
            running = attempts.running(session, executor.name)
        if not running:
            return
        found = executor.status([one.external for one in running])
        for one in running:
            self._judge(executor, one, found.get(one.external, _UNKNOWN))

    def _judge(self, executor: Executor, one: Running, status: Status) -> None:
        """Do what follows from what an executor sees of an attempt."""
        if status.state == "running":
            late = self._hears and one.silent_s > SILENT_S
            if late:
                with self._database.writing() as session:
                    attempts.lose(session, one.attempt, f"not heard of for {one.silent_s:.0f} s")
            if late or one.unwanted:
                executor.stop(one.external)
            return
        if status.state == "unknown" and one.silent_s <= LEASE_S:
            return  # another server starts it now
        with self._database.writing() as session:
            if one.unwanted:
                attempts.stopped(session, one.attempt)
            elif status.state == "preempted":
                attempts.preempt(session, one.attempt, status.reason)
            else:
                attempts.lose(session, one.attempt, status.reason or "it ended without a word")
        executor.stop(one.external)

    def _lose_silent(self) -> None:
        """Give up attempts on executors that this server does not see, as another one's machine."""
        if not self._hears:
            return
        seen = {executor.name for executor in self._executors} - self._away.keys()
        with self._database.reading() as session:
            silent = [
                one
                for one in attempts.running(session)
                if one.silent_s > LEASE_S and one.executor not in seen
            ]
        for one in silent:
            with self._database.writing() as session:
                reason = f"not heard of for {one.silent_s:.0f} s, nor of its executor"
                if not attempts.stopped(session, one.attempt):
                    attempts.lose(session, one.attempt, reason)

    def _fill(self, executor: Executor) -> Sequence[Room]:
        """Start what waits, as long as there is room; the room that is left."""
        while True:
            with self._database.reading() as session:
                waits = bool(jobs.waiting(session, most=1))
            rooms = executor.room() if waits else []
            # Of each kind one room is left free for what needs much of it.
            kept = {room.gpu: room for room in sorted(rooms, key=lambda one: (one.total, one.gpus))}
            open_to = [one if kept[one.gpu] is one else replace(one, total=0) for one in rooms]
            if not any(self._started(executor, room) for room in open_to):
                return rooms

    def _started(self, executor: Executor, room: Room) -> bool:
        """Whether something was started in a room.

        Raises:
            ExecutorAway: it does not answer. As with any other exception, nothing stays claimed.
        """
        if room.gpu and not room.gpus:
            return False
        with self._database.writing() as session:
            claimed = attempts.claim(session, executor.name, room)
        if claimed is None:
            return False
        try:
            device = executor.start(self._start_of(claimed))
        except Unplaceable as exc:
            self._put_back(claimed, str(exc))
            return False
        except Exception as exc:
            reason = str(exc) if isinstance(exc, ExecutorAway) else _unforeseen(executor, exc)
            self._put_back(claimed, reason)
            raise
        with self._database.writing() as session:
            attempts.placed(session, claimed.attempt, device)
        return True

    def _put_back(self, claimed: Claimed, reason: str) -> None:
        with self._database.writing() as session:
            attempts.put_back(session, claimed.attempt, reason)

    def _start_of(self, claimed: Claimed) -> Start:
        return Start(
            external=claimed.external,
            server_url=self._server_url,
            token=claimed.token,
            asked=claimed.asked,
        )

    def _tell(self, rooms: Sequence[Room]) -> None:
        """Say of what waits why it does."""
        with self._database.reading() as session:
            waiting = [(job.id, why_waits(job, rooms), job.reason) for job in jobs.waiting(session)]
        for number, (reason, better), before in waiting:
            # Another server may know an executor that has what this one's have not.
            if reason and reason != before and (better or not before):
                with self._database.writing() as session:
                    jobs.because(session, [Job.id == number], reason)


def _unforeseen(executor: Executor, exc: Exception) -> str:
    return f"executor {executor.name} failed ({type(exc).__name__}); see the server's log"


def why_waits(job: Job, rooms: Sequence[Room]) -> tuple[str, bool]:
    """Why a job is not started, '' where it could be; and whether there is, at least, what it asks
    for."""
    if not job.gpus:
        fit = any(not room.gpu for room in rooms)
        return ("" if fit else "waits for a CPU that nothing is measured on"), bool(rooms)
    named = [room for room in rooms if room.gpu and is_meant(job.gpu, room.gpu)]
    if any(room.gpus >= job.gpus for room in named):
        return "", True
    wanted = f"{job.gpus} GPUs" if job.gpus > 1 else "a GPU"
    if named:
        free = max(room.gpus for room in named)
        why = "; ".join(dict.fromkeys(room.why for room in named if room.why))
        return f"waits for {wanted} of {named[0].gpu}: {free} free" + (
            f" ({why})" * bool(why)
        ), True
    there = ", ".join(dict.fromkeys(room.gpu or "the CPU" for room in rooms)) or "none now"
    called = f" named {job.gpu!r}" if job.gpu else ""
    return f"no executor has {wanted}{called}; there are: {there}", False
