"""Stale records that are in use are measured again by the server itself: the most used first, one
job a record, within a budget of GPU minutes a day."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from advisor.errors import UsageError
from advisor.jobs.asked import Asked
from advisor.jobs.states import LIVE
from advisor.service import archives, coverage, jobs, tokens
from advisor.service.coverage import Wanted
from advisor.service.database import DAY_S, Database, now
from advisor.service.executors import Executor, ExecutorAway, Room
from advisor.service.schema import Attempt, Job, Token
from advisor.service.tokens import Caller

RESTS_S: Mapping[str, float] = {"failed": DAY_S, "done": 7 * DAY_S, "cancelled": 7 * DAY_S}
"""How long a job for a record was over, before there is another for the same."""
_NEXT = "is next, as far as the budget goes"
_MOST = 1000
"""Stale records that are looked at, and jobs."""
_log = logging.getLogger("advisor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stale:
    """A stale record that is in use.

    Attributes:
        asked: how it is measured again; None where it is not, now.
        job: the server's last one for it, 0 for none.
        why: what becomes of it, for people.
    """

    wanted: Wanted
    asked: Asked | None = None
    job: int = 0
    why: str


class Retuning:
    """Of one server.

    Args:
        executors: what jobs can be started on.
        minutes: GPU minutes a day; 0: nothing is measured again.
    """

    def __init__(self, executors: Sequence[Executor] = (), minutes: int = 0) -> None:
        self._executors, self.minutes = executors, minutes
        self._rooms: Sequence[Room] = ()

    def turn(self, database: Database) -> None:
        """Ask for what is next, as far as the budget goes; one server at a time does.

        Raises:
            StoreError: the database does not answer.
        """
        if not (self.minutes and self._executors):
            return
        self._rooms = [room for executor in self._executors for room in _rooms(executor)]
        with database.reading() as session:
            if not any(one.asked for one in self.stale(session)):
                return
        with database.writing() as session:
            self._ask(session, tokens.itself(session))

    def _ask(self, session: Session, by: Caller) -> None:
        left = self.minutes - used(session)
        for one in self.stale(session):
            if one.asked is None:
                continue
            minutes = _minutes(one.asked)
            if minutes > left:
                return
            try:
                if jobs.submit(session, one.asked, by).new:
                    left -= minutes
            except UsageError as exc:  # its code went meanwhile, or there are too many
                _log.warning("record %s is not measured again: %s", one.wanted.record, exc)

    def stale(self, session: Session, most: int = _MOST) -> list[Stale]:
        """What becomes of each stale record that is in use, the most used first."""
        wanted = coverage.outdated(session, most)
        makers = _makers(session, [one.record for one in wanted])
        asked = {one.record: self._asked(session, one, makers.get(one.record)) for one in wanted}
        keys = [one.key for one in asked.values() if isinstance(one, Asked)]
        last, at = _last(session, keys), now(session)
        return [self._stale(one, asked[one.record], last, at) for one in wanted]

    def _asked(self, session: Session, wanted: Wanted, maker: Job | None) -> Asked | str:
        """How a record is measured again, or why it is not."""
        if maker is None:
            return "no job of this server measured it: tune it again by hand"
        if not _is_wanted(session, maker):
            return f"the token that asked for job {maker.id} was revoked"
        try:
            asked = Asked.of(json.loads(maker.asked))
            asked = dataclasses.replace(asked, gpu=wanted.device if asked.gpus else "", force=True)
        except UsageError as exc:
            return f"job {maker.id} cannot be asked for again: {exc}"
        if asked.archive and not archives.known(session, asked.archive):
            return f"the code of job {maker.id} is not here any more: submit it again"
        if _minutes(asked) > self.minutes:
            return f"takes {_minutes(asked):.0f} GPU minutes, more than a day's budget"
        if asked.gpus and not any(room.could(asked) for room in self._rooms):
            return "no executor of this server has its device now"
        return asked

    def _stale(
        self, wanted: Wanted, asked: Asked | str, last: Mapping[str, Job], at: float
    ) -> Stale:
        if isinstance(asked, str):
            return Stale(wanted=wanted, why=asked)
        job = last.get(asked.key)
        if job is None:
            return Stale(wanted=wanted, asked=asked, why=_NEXT)
        if job.state in LIVE:
            return Stale(wanted=wanted, job=job.id, why=f"job {job.id} is {job.state}")
        until = job.changed + RESTS_S[job.state]
        if at < until:
            day = time.strftime("%Y-%m-%d %H:%M", time.gmtime(until))
            why = f"job {job.id} is {job.state}; not again before {day} UTC"
            return Stale(wanted=wanted, job=job.id, why=why)
        return Stale(wanted=wanted, asked=asked, job=job.id, why=_NEXT)


def _rooms(executor: Executor) -> Sequence[Room]:
    try:
        return executor.room()
    except ExecutorAway:  # the reconciler says so
        return []


def _makers(session: Session, records: Sequence[str]) -> dict[str, Job]:
    """Of each record the last job that found it."""
    last = select(func.max(Job.id)).where(Job.record.in_(records)).group_by(Job.record)
    query = select(Job).where(Job.id.in_(last.correlate(None)))
    return {job.record: job for job in session.scalars(query)}


def _is_wanted(session: Session, job: Job) -> bool:
    """Whether somebody whose token was not revoked asked for the same with the same code."""
    theirs = (Token.digest != tokens.ITSELF, Token.revoked.is_(None))
    same = (Job.archive == job.archive, Job.what == job.what)
    query = select(Job.id).join(Token, Job.token == Token.id).where(*theirs, *same).limit(1)
    return session.scalar(query) is not None


def _last(session: Session, keys: Sequence[str]) -> dict[str, Job]:
    """Of each key the last job of the server's own, or whosever is not over."""
    counts = or_(Token.digest == tokens.ITSELF, Job.state.in_(LIVE))
    query = select(Job).join(Token, Job.token == Token.id).where(Job.key.in_(keys), counts)
    return {job.key: job for job in session.scalars(query.order_by(Job.id))}


def used(session: Session) -> float:
    """GPU minutes that the server's own jobs took within a day, and that those which are not over
    may take."""
    at = now(session)
    since = at - DAY_S
    query = (
        select(Job, Attempt)
        .join(Token, Job.token == Token.id)
        .join(Attempt, Attempt.job == Job.id, isouter=True)
        .where(Token.digest == tokens.ITSELF)
        .where(or_(Job.state.in_(LIVE), Attempt.ended > since, Attempt.state == "running"))
    )
    taken: dict[Job, float] = {}
    for job, one in session.execute(query):
        seconds = 0.0
        if one is not None:
            seconds = max(0.0, (one.ended or at) - max(one.started, since))
        taken[job] = taken.get(job, 0.0) + _devices(job.gpus) * seconds / 60
    return sum(max(minutes, _planned(job)) for job, minutes in taken.items())


def lately(session: Session, most: int = 10) -> Sequence[Job]:
    """The server's own jobs that changed within a day, the newest first."""
    query = select(Job).join(Token, Job.token == Token.id).where(Token.digest == tokens.ITSELF)
    query = query.where(Job.changed > now(session) - DAY_S)
    return session.scalars(query.order_by(Job.id.desc()).limit(most)).all()


def _planned(job: Job) -> float:
    """GPU minutes that a job which is not over may take."""
    if job.state not in LIVE:
        return 0.0
    try:
        return _minutes(Asked.of(json.loads(job.asked)))
    except UsageError:  # another version of advisor took it
        return 0.0


def _minutes(asked: Asked) -> float:
    """GPU minutes of measuring."""
    return _devices(asked.gpus) * asked.plan.seconds / 60


def _devices(gpus: int) -> int:
    """That a job has for itself: a CPU counts as a GPU."""
    return max(gpus, 1)
