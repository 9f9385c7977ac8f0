"""The reconciler starts waiting jobs on free devices, and follows their attempts. The database has
the true state.

Several servers may do this on one database: only one server claims a job, and every change first
checks the current state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from advisor.errors import StoreError
from advisor.jobs.spec import AttemptOver
from advisor.service import attempts, jobs
from advisor.service.attempts import LEASE_S, Running
from advisor.service.database import Database
from advisor.service.executors import (
    Capacity,
    Executor,
    ExecutorAway,
    Machine,
    Unplaceable,
    why_waits,
)
from advisor.service.schema import JobRow

EVERY_S = 2.0
ASKS_S = 5.0  # time between two requests for an executor's capacity if no job waits
SILENT_S = 5 * LEASE_S
"""An attempt without a heartbeat for this long is lost even if its executor sees it run."""
_log = logging.getLogger("advisor")


class Reconciler:
    """Runs the jobs of one server. `machines` has the executors by name, as they last answered;
    workers find a server of this database at `server_url`; `now` is a clock in seconds."""

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
        """Close the executors. Workers on this machine save their search, report 'preempted', and
        end."""
        for executor in self._executors:
            executor.close()

    def turn(self) -> None:
        """Visit every executor once, and update attempts and jobs. Raises StoreError if the
        database does not answer."""
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
        """Whether workers had time to report since the server or its database was last down."""
        return self._now() - self._since > LEASE_S

    def _end(self, one: Running, state: str, reason: str) -> None:
        with suppress(AttemptOver):
            self._database.write(attempts.end, one.attempt, state, reason)

    def _visit(self, executor: Executor) -> None:
        """Follow an executor's attempts, and start waiting jobs that fit."""
        try:
            self._follow(executor)
            while self._fill(executor):
                pass
        except ExecutorAway as exc:
            if self.machines[executor.name].why != str(exc):
                _log.warning("executor %s: %s", executor.name, exc)
            self.machines[executor.name] = Machine(name=executor.name, why=str(exc))

    def _follow(self, executor: Executor) -> None:
        every = self._database.read(attempts.running)
        running = [one for one in every if one.executor == executor.name]
        found = executor.status([one.external for one in running])
        for one in running:
            status = found[one.external]
            if status.state == "running":
                late = self._hears and one.silent_s > SILENT_S
                if late:
                    self._end(one, "lost", f"no heartbeat for {one.silent_s:.0f} s")
                if late or one.cancelled:
                    executor.stop(one.external)
            elif status.state != "unknown" or one.silent_s > LEASE_S:
                state = "preempted" if status.state == "preempted" else "lost"
                self._end(one, state, status.reason or "the attempt ended without a report")
                executor.stop(one.external)
            # Else another server may be about to start this attempt.

    def _lose_silent(self) -> None:
        """End silent attempts whose executor is away or belongs to another server."""
        seen = {one.name for one in self.machines.values() if not one.why}
        for one in self._database.read(attempts.running) if self._hears else ():
            if one.silent_s > LEASE_S and one.executor not in seen:
                why = f"no heartbeat for {one.silent_s:.0f} s, and no answer from its executor"
                self._end(one, "lost", why)

    def _fill(self, executor: Executor) -> bool:
        """Start a waiting job. Returns False if no job waits or none fits."""
        waits = bool(self._database.read(jobs.waiting, most=1))
        if not waits and self._now() - self._asked[executor.name] < ASKS_S:
            return False
        found = executor.capacity()
        self._asked[executor.name] = self._now()
        self.machines[executor.name] = Machine(name=executor.name, capacities=found)
        # The largest machine of each kind may be kept free for a job that needs many GPUs.
        kept = {one.gpu: one for one in sorted(found, key=lambda one: (one.total, one.gpus))}
        capacities = [one if kept[one.gpu] is one else replace(one, total=0) for one in found]
        return waits and any(self._started(executor, one) for one in capacities)

    def _started(self, executor: Executor, capacity: Capacity) -> bool:
        """Start the first job that fits. Returns whether there was one. Raises ExecutorAway if the
        executor does not answer; after any exception, the claim is undone."""
        if capacity.gpu and not capacity.gpus:
            return False
        write, name = self._database.write, executor.name
        start = write(attempts.claim, name, capacity, self._server_url)
        if start is None:
            return False
        try:
            executor.start(start)
        except Exception as exc:
            reason = str(exc) if isinstance(exc, Unplaceable) else f"executor {name}: {exc}"
            if not isinstance(exc, Unplaceable | ExecutorAway):
                reason = f"executor {name} failed ({type(exc).__name__}); see the server's log"
            with suppress(AttemptOver):
                write(attempts.put_back, start.attempt, reason)
            if not isinstance(exc, Unplaceable):
                raise
            return False
        return True

    def _explain(self) -> None:
        for job in self._database.read(jobs.waiting):
            reason, known = why_waits(job.gpu, job.gpus, self.machines.values())
            # Another server may have an executor with such devices.
            if reason and reason != job.reason and (known or not job.reason):
                self._database.write(jobs.explain_wait, [JobRow.id == job.id], reason)
