"""The reconciler starts waiting jobs where there is room, and follows what was started. The
database is the truth.

Several servers do this on one database: a job is claimed by one of them, and every change looks at
the state that it changes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from advisor.errors import StoreError
from advisor.service import attempts, jobs
from advisor.service.attempts import LEASE_S, Running
from advisor.service.database import Database
from advisor.service.executors import Capacity, Executor, ExecutorAway, Status, Unplaceable
from advisor.service.machines import Machine, why_waits
from advisor.service.schema import Job

EVERY_S = 2.0
ASKS_S = 5.0
"""Between two questions for an executor's capacity if no job waits."""
SILENT_S = 5 * LEASE_S
"""An attempt without a heartbeat for so long is lost although its executor sees it run."""
_UNKNOWN = Status(state="unknown", reason="its executor knows nothing of it")
_log = logging.getLogger("advisor")


class Reconciler:
    """Of one server.

    Attributes:
        machines: the executors by name, as they last answered.

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
        self.machines = {one.name: Machine(name=one.name) for one in executors}
        self._asked = dict.fromkeys(self.machines, -ASKS_S)
        self._last = self._since = now()

    def close(self) -> None:
        """End what runs on this machine: its workers save what they have, and report that they were
        preempted."""
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
            for executor in self._executors:
                self._visit(executor)
            self._lose_silent()
            self._explain()
        except StoreError:
            self._since = self._now()
            raise
        finally:
            self._last = self._now()

    @property
    def _hears(self) -> bool:
        """Whether workers had time to report: they cannot while no server or no database is
        there."""
        return self._now() - self._since > LEASE_S

    def _visit(self, executor: Executor) -> None:
        """Follow an executor's attempts, and start what it has room for."""
        try:
            self._follow(executor)
            self._fill(executor)
        except ExecutorAway as exc:
            if self.machines[executor.name].why != str(exc):
                _log.warning("executor %s: %s", executor.name, exc)
            self.machines[executor.name] = Machine(name=executor.name, why=str(exc))

    def _follow(self, executor: Executor) -> None:
        with self._database.reading() as session:
            running = attempts.running(session, executor.name)
        found = executor.status([one.external for one in running]) if running else {}
        for one in running:
            status = found.get(one.external, _UNKNOWN)
            if status.state == "running":
                late = self._hears and one.silent_s > SILENT_S
                if late:
                    self._lose(one, f"not heard of for {one.silent_s:.0f} s")
                if late or one.unwanted:
                    executor.stop(one.external)
            elif status.state != "unknown" or one.silent_s > LEASE_S:
                if status.state == "preempted":
                    with self._database.writing() as session:
                        attempts.end(session, one.attempt, "preempted", status.reason)
                else:
                    self._lose(one, status.reason or "it ended without a word")
                executor.stop(one.external)
            # Else another server may be about to start it.

    def _lose(self, one: Running, reason: str) -> None:
        with self._database.writing() as session:
            attempts.end(session, one.attempt, "lost", reason)

    def _lose_silent(self) -> None:
        """Give up attempts on executors that this server does not see, as another one's machine."""
        if not self._hears:
            return
        seen = {one.name for one in self.machines.values() if not one.why}
        with self._database.reading() as session:
            running = attempts.running(session)
        for one in running:
            if one.silent_s > LEASE_S and one.executor not in seen:
                self._lose(one, f"not heard of for {one.silent_s:.0f} s, nor of its executor")

    def _fill(self, executor: Executor) -> None:
        """Start what waits, as long as there is room."""
        while True:
            with self._database.reading() as session:
                waits = bool(jobs.waiting(session, most=1))
            if not waits and self._now() - self._asked[executor.name] < ASKS_S:
                return
            found = executor.capacity()
            self._asked[executor.name] = self._now()
            self.machines[executor.name] = Machine(name=executor.name, capacities=found)
            # Of each kind the largest machine is kept free for a job that needs much of it.
            kept = {one.gpu: one for one in sorted(found, key=lambda one: (one.total, one.gpus))}
            rooms = [one if kept[one.gpu] is one else replace(one, total=0) for one in found]
            if not waits or not any(self._started(executor, one) for one in rooms):
                return

    def _started(self, executor: Executor, capacity: Capacity) -> bool:
        """Whether something was started.

        Raises:
            ExecutorAway: it does not answer. As with any other exception, nothing stays claimed.
        """
        if capacity.gpu and not capacity.gpus:
            return False
        with self._database.writing() as session:
            start = attempts.claim(session, executor.name, capacity, self._server_url)
        if start is None:
            return False
        try:
            executor.start(start)
        except Exception as exc:
            reason = str(exc)
            if not isinstance(exc, Unplaceable | ExecutorAway):
                what = f"executor {executor.name} failed ({type(exc).__name__})"
                reason = f"{what}; see the server's log"
            with self._database.writing() as session:
                attempts.put_back(session, start.attempt, reason)
            if not isinstance(exc, Unplaceable):
                raise
            return False
        return True

    def _explain(self) -> None:
        """Note why jobs wait."""
        with self._database.reading() as session:
            waiting = jobs.waiting(session)
        for job in waiting:
            reason, known = why_waits(job.gpu, job.gpus, self.machines.values())
            # Another server may know an executor that has what this one's have not.
            if reason and reason != job.reason and (known or not job.reason):
                with self._database.writing() as session:
                    jobs.explain_wait(session, [Job.id == job.id], reason)
