"""How far jobs are: progress, time left, queue wait, speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from advisor.jobs.states import LIVE
from advisor.service.database import now
from advisor.service.schema import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a job is. Durations are in seconds.

    Attributes:
        budget_s: for measuring.
        waited_s: until the first attempt was started or the job was over, else until now.
        spent_s: of the budget, by the attempt that runs; 0 if none does.
        trials: configs that were tried.
        speedup: of the job's record, or of the best trial so far at the user's batch; 0 if it is
            not known.
    """

    budget_s: float
    waited_s: float
    spent_s: float
    trials: int
    speedup: float

    @property
    def share(self) -> float:
        """Of the budget that is spent."""
        return min(1.0, self.spent_s / self.budget_s)

    @property
    def left_s(self) -> float:
        return max(0.0, self.budget_s - self.spent_s)


def of_jobs(session: Session, numbers: Sequence[int]) -> dict[int, Progress]:
    """The progress of some jobs, by their numbers."""
    at = now(session)
    found = {}
    for job in session.scalars(select(Job).where(Job.id.in_(numbers))):
        until = job.started or (at if job.state in LIVE else job.changed)
        found[job.id] = Progress(
            budget_s=job.budget_s,
            waited_s=max(0.0, until - job.created),
            spent_s=max(0.0, at - job.changed) if job.state == "running" else 0.0,
            trials=job.tried,
            speedup=job.speedup,
        )
    return found
