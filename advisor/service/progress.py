"""How far jobs are: progress, time left, queue wait, speed-up."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from advisor.errors import UsageError
from advisor.jobs.spec import JobSpec
from advisor.jobs.states import LIVE
from advisor.service.database import now
from advisor.service.schema import Attempt, Item, Job, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a job is. Durations are in seconds.

    Attributes:
        budget_s: for measuring; 0 if it is not known.
        waited_s: until the first attempt was started or the job was over, else until now.
        spent_s: of the budget, by the attempt that runs; 0 if none does.
        trials: configs that were tried.
        speedup: of the job's record, or of the best trial so far at the user's batch; 0 if it is
            not known.
    """

    budget_s: float = 0.0
    waited_s: float = 0.0
    spent_s: float = 0.0
    trials: int = 0
    speedup: float = 0.0

    @property
    def share(self) -> float:
        """Of the budget that is spent."""
        return min(1.0, self.spent_s / self.budget_s) if self.budget_s else 0.0

    @property
    def left_s(self) -> float:
        return max(0.0, self.budget_s - self.spent_s)


def of_jobs(session: Session, numbers: Sequence[int]) -> dict[int, Progress]:
    """The progress of some jobs, by their numbers."""
    at = now(session)
    starts: dict[int, list[Attempt]] = defaultdict(list)
    attempts = select(Attempt).where(Attempt.job.in_(numbers)).order_by(Attempt.number)
    for one in session.scalars(attempts):
        starts[one.job].append(one)
    tried, speedups = _tried(session, numbers), _speedups(session, numbers)
    found = {}
    for job in session.scalars(select(Job).where(Job.id.in_(numbers))):
        theirs = starts[job.id]
        until = theirs[0].started if theirs else at if job.state in LIVE else job.changed
        runs = theirs[-1:] if job.state == "running" else []
        trials, best = tried.get(job.id, (0, 0.0))
        found[job.id] = Progress(
            budget_s=_budget_s(job),
            waited_s=max(0.0, until - job.created),
            spent_s=max(0.0, *(at - (one.begun or one.started) for one in runs), 0.0),
            trials=trials,
            speedup=speedups.get(job.id, best),
        )
    return found


def _budget_s(job: Job) -> float:
    try:
        return JobSpec.of(json.loads(job.asked)).plan.seconds
    except UsageError:  # another version of advisor took it
        return 0.0


def _tried(session: Session, numbers: Sequence[int]) -> dict[int, tuple[int, float]]:
    """How many trials each job has, and the best ratio at the batch that it tried first."""
    ratio = case((Trial.outcome == "", Trial.ratio), else_=0.0)
    sums = (func.count(), func.max(ratio), func.min(Trial.at))
    query = select(Trial.job, *sums).where(Trial.job.in_(numbers))
    first: dict[int, tuple[float, float]] = {}
    counts: dict[int, int] = defaultdict(int)
    for job, count, best, at in session.execute(query.group_by(Trial.job, Trial.batch)):
        counts[job] += count
        first[job] = min(first.get(job, (at, best)), (at, best))
    return {job: (count, first[job][1]) for job, count in counts.items()}


def _speedups(session: Session, numbers: Sequence[int]) -> dict[int, float]:
    """The speed-up of the record that each job found."""
    found = select(Job.id, Job.record).where(Job.id.in_(numbers), Job.record != "")
    records = {job: record for job, record in session.execute(found)}
    ids = [record.partition("@")[0] for record in records.values()]
    query = select(Item.id, Item.batch, Item.speedup).where(Item.id.in_(ids))
    rows = session.execute(query.order_by(Item.created))
    newest = {f"{id}@{batch}": speedup for id, batch, speedup in rows}
    return {job: newest[record] for job, record in records.items() if record in newest}
