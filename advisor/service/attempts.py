"""Attempts: starts of jobs on executors. The reconciler claims a job and follows its attempt. The
attempt's worker reports with a token of its own, which it gets in exchange for a start token."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from advisor.errors import UsageError
from advisor.jobs.spec import JobSpec, is_meant
from advisor.jobs.states import WAITING
from advisor.jobs.token import digest, made
from advisor.service import jobs, records, tokens
from advisor.service.database import DAY_S, now
from advisor.service.executors import Room
from advisor.service.schema import Attempt, Job, Log, Study, Token, Trial
from advisor.service.tokens import Caller, note

LEASE_S = 60.0
"""An attempt without a heartbeat for so long may be lost."""
MOST_LOST = 5
"""Lost attempts after which a job fails."""
PAUSE_S = 60.0
"""Before a job that no executor took is claimed again."""
REST_S, MOST_REST_S = 30.0, 600.0
"""Before a job whose worker could not begin is claimed again: the first pause, which doubles each
time, and the longest."""
PATIENCE_S = 600.0
"""How long later, smaller jobs may overtake a job."""
MOST_STUDIES = 16
"""Files of one search."""
_TOKEN_S = DAY_S
"""How long an attempt's token is valid beyond twice its budget."""
_CUT = "\n[advisor: the log ends here: it is too long]\n"

End = Literal["done", "failed", "preempted"]
"""How a worker may end its attempt. Other states: running, lost, cancelled."""
Exchange = Literal["begun", "taken", "over"]
"""The result of an exchange: the sender has the attempt, another has it, or it is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """An attempt to start now. `token`: its start token, which works once and is not stored; see
    `begin`."""

    attempt: int
    job: int
    number: int
    external: str
    asked: JobSpec
    token: str


def claim(session: Session, executor: str, room: Room) -> Claimed | None:
    """Claim the first job that fits a room; None if none does.

    Args:
        room: with a `total`, it is kept free for a job that has waited long for more of it.
    """
    at = now(session)
    while (job := _first(session, room, at)) is not None:
        try:
            asked = JobSpec.of(json.loads(job.asked))
        except UsageError as exc:  # another version of advisor took it
            jobs.change(session, job, "failed", f"this server cannot read it: {exc}", None)
        else:
            return _claimed(session, job, asked, executor)
    return None


def _first(session: Session, room: Room, at: float) -> Job | None:
    """The first job that fits a room, locked; none if one that waits for more of it goes first."""
    kinds = session.scalars(select(Job.gpu).where(Job.state.in_(WAITING)).distinct())
    fitting = [kind for kind in kinds if is_meant(kind, room.gpu)]
    due = (Job.state.in_(WAITING), Job.due <= at, Job.gpu.in_(fitting))
    fits = Job.gpus.between(1, room.gpus) if room.gpus else Job.gpus == 0
    query = select(Job).where(*due, fits).order_by(Job.id).limit(1)
    large = (Job.gpus > room.gpus, Job.gpus <= room.total, Job.changed <= at - PATIENCE_S)
    first = session.scalar(select(func.min(Job.id)).where(*due, *large))
    if first is not None:
        query = query.where(Job.id < first)
    job = session.scalar(query.with_for_update(skip_locked=True))
    if job is None and first is not None:
        jobs.because(session, [*due, fits, Job.id > first], f"lets job {first} go first")
    return job


def _claimed(session: Session, job: Job, asked: JobSpec, executor: str) -> Claimed:
    """A new attempt at a locked job."""
    job.attempts += 1
    # Another database may count its jobs on the same executor, or have done so before.
    external = f"advisor-{job.id}-{job.attempts}-{secrets.token_hex(4)}"
    expires = time.time() + 2 * asked.plan.seconds + _TOKEN_S
    token, start, at = tokens.lend(session, external, expires), made(), now(session)
    attempt = Attempt(
        job=job.id,
        number=job.attempts,
        executor=executor,
        external=external,
        state="running",
        started=at,
        beat=at,
        token=token.id,
        start=digest(start),
    )
    session.add(attempt)
    session.flush()
    jobs.change(session, job, "running", f"attempt {attempt.number} on {executor}", None)
    return Claimed(
        attempt=attempt.id,
        job=job.id,
        number=attempt.number,
        external=external,
        asked=asked,
        token=start,
    )


def put_back(session: Session, attempt: int, reason: str) -> bool:
    """Undo a claim that no executor took; False if its worker has begun. A worker that was started
    although the executor did not answer is refused when it begins."""
    found = _locked(session, attempt)
    if found is None or found[1].begun is not None:
        return False
    job, one = found
    token = session.get_one(Token, one.token)
    session.delete(one)
    session.flush()
    session.delete(token)
    job.attempts -= 1
    job.due = now(session) + PAUSE_S
    if job.state == "running":
        jobs.change(session, job, "queued", reason, None)
    return True


def placed(session: Session, attempt: int, device: str) -> bool:
    """Note an attempt's device; whether the attempt still runs."""
    if (found := _locked(session, attempt)) is None:
        return False
    found[1].device = jobs.said(device)
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A running attempt. `unwanted`: its job was cancelled."""

    attempt: int
    job: int
    external: str
    executor: str
    silent_s: float
    unwanted: bool


def running(session: Session, executor: str = "") -> list[Running]:
    """Attempts of one executor, or of all."""
    query = (
        select(Attempt, Job.state)
        .join(Job, Attempt.job == Job.id)
        .where(Attempt.state == "running")
        .order_by(Attempt.id)
    )
    if executor:
        query = query.where(Attempt.executor == executor)
    at = now(session)
    return [
        Running(
            attempt=one.id,
            job=one.job,
            external=one.external,
            executor=one.executor,
            silent_s=at - one.beat,
            unwanted=state != "running",
        )
        for one, state in session.execute(query)
    ]


def lose(session: Session, attempt: int, reason: str) -> bool:
    """End an attempt that disappeared. Its job is queued again, or fails after MOST_LOST of them.
    Whether the attempt was running."""
    found = _locked(session, attempt)
    if found is None:
        return False
    job, one = found
    _close(session, one, "lost", reason)
    if job.state == "running":
        lost = select(Attempt.reason).where(Attempt.job == job.id, Attempt.state == "lost")
        reasons = session.scalars(lost.order_by(Attempt.number)).all()
        if len(reasons) < MOST_LOST:
            jobs.change(session, job, "queued", f"attempt {one.number} was lost: {reason}", None)
        else:
            told = "; ".join(dict.fromkeys(reasons))
            jobs.change(session, job, "failed", f"{len(reasons)} attempts were lost: {told}", None)
    return True


def preempt(session: Session, attempt: int, reason: str) -> bool:
    """End an attempt that had to make room; whether it was running."""
    found = _locked(session, attempt)
    if found is None:
        return False
    _ended(session, *found, "preempted", reason, None)
    return True


def stopped(session: Session, attempt: int) -> bool:
    """End the attempt of a cancelled job; whether it was running."""
    found = _locked(session, attempt)
    if found is None or found[0].state == "running":
        return False
    _close(session, found[1], "cancelled", found[0].reason)
    return True


def of_token(session: Session, token: int) -> Attempt | None:
    """The attempt that a token was lent to."""
    return session.scalar(select(Attempt).where(Attempt.token == token))


def of_start(session: Session, text: str) -> Attempt | None:
    """The attempt that a start token is for."""
    return session.scalar(select(Attempt).where(Attempt.start == digest(text)))


def begin(session: Session, attempt: int, own: bytes, address: str) -> Exchange:
    """Exchange an attempt's start token for a token that only its worker has: others may have read
    what the executor was given. Repeating an exchange changes nothing; an exchange by somebody else
    is noted in the attempt's reason.

    Args:
        own: the digest of the token that the worker has made.
        address: the worker's.

    Raises:
        UsageError: that token is in use.
    """
    found = _locked(session, attempt)
    if found is None:
        return "over"
    one, token = found[1], session.get_one(Token, found[1].token)
    by = Caller(token.id, token.name, token.role, address)
    if one.begun is None:
        tokens.given(session, token, own)
        one.begun = one.beat = now(session)
        note(session, by, "attempt begun", one.external)
        return "begun"
    if token.digest == own:
        return "begun"
    if not one.reason:
        one.reason = f"its start token was used a second time, from {address}"
        note(session, by, "attempt begun twice", one.external)
    return "taken"


def told(session: Session, attempt: Attempt) -> dict[str, Any]:
    """What a worker needs: the job, its studies."""
    job = session.get_one(Job, attempt.job)
    names = select(Study.name).where(Study.job == job.id).order_by(Study.name)
    return {
        "job": job.id,
        "number": attempt.number,
        "asked": json.loads(job.asked),
        "studies": list(session.scalars(names)),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A worker's report: trials as rows of their table, and what was printed."""

    trials: Sequence[Mapping[str, Any]] = ()
    log: str = ""
    device: str = ""


def beat(session: Session, attempt: int, said: Beat) -> bool:
    """Note a heartbeat and its report; whether the attempt is to go on."""
    found = _locked(session, attempt)
    if found is None:
        return False
    job, one = found
    one.beat = now(session)
    if said.device:
        one.device = jobs.said(said.device)
    _add_trials(session, one, said.trials)
    _add_log(session, job, one, jobs.log_text(said.log))
    return job.state == "running"


def _add_trials(session: Session, one: Attempt, trials: Sequence[Mapping[str, Any]]) -> None:
    """Add trials that are new: a worker that got no answer sends them again."""
    numbers = [trial["number"] for trial in trials]
    there = select(Trial.number).where(Trial.attempt == one.id, Trial.number.in_(numbers))
    known = set(session.scalars(there))
    count = session.scalar(select(func.count()).where(Trial.job == one.job)) or 0
    for trial in trials:
        if trial["number"] not in known and count < jobs.MOST_TRIALS:
            session.add(Trial(attempt=one.id, job=one.job, at=one.beat, **trial))
            known.add(trial["number"])
            count += 1


def _add_log(session: Session, job: Job, one: Attempt, text: str) -> None:
    left = jobs.MOST_LOG - job.logged
    if not text or left <= 0:
        return
    data = text if len(text) < left else text[:left] + _CUT
    session.add(Log(job=job.id, attempt=one.id, data=data))
    job.logged += len(data)


def end(session: Session, attempt: int, state: End, reason: str, record: str, by: Caller) -> bool:
    """End an attempt as its worker reports; False if it was over before.

    Raises:
        UsageError: it is done, and did not store this record.
    """
    found = _locked(session, attempt)
    if found is None:
        return False
    job, one = found
    if state == "done" and job.state == "running":
        if not records.known(session, record, one.token):
            raise UsageError(f"record {record[:40]!r}: this attempt did not put it here")
        job.record = record
    _ended(session, job, one, state, reason, by)
    if job.state == "preempted" and not _began(one):
        _rest(session, job)
    return True


def _began(one: Attempt) -> bool:
    """Whether its worker has begun to tune: its heartbeat starts then."""
    return one.beat > (one.started if one.begun is None else one.begun)


def _rest(session: Session, job: Job) -> None:
    """Let a job wait whose worker could not begin, as when others use its GPU. The pause doubles
    with each such attempt in a row."""
    last = select(Attempt).where(Attempt.job == job.id).order_by(Attempt.number.desc()).limit(8)
    idle = itertools.takewhile(
        lambda one: one.state == "preempted" and not _began(one), session.scalars(last)
    )
    job.due = now(session) + min(REST_S * 2 ** (len(list(idle)) - 1), MOST_REST_S)
    until = time.strftime("%H:%M:%S", time.gmtime(job.due))
    job.reason = jobs.said(f"waits until {until} UTC: {job.reason}")


def _ended(
    session: Session, job: Job, one: Attempt, state: End, reason: str, by: Caller | None
) -> None:
    if job.state == "running":
        _close(session, one, state, reason)
        jobs.change(session, job, state, reason, by)
    else:
        _close(session, one, "cancelled", job.reason)


def _close(session: Session, one: Attempt, state: str, reason: str) -> None:
    """End an attempt and its token. Earlier reasons stay."""
    told = "; ".join(filter(None, (one.reason, reason)))
    one.state, one.reason, one.ended = state, jobs.said(told), now(session)
    session.get_one(Token, one.token).revoked = time.time()
    note(session, None, f"attempt {state}", f"{one.external} {one.reason}".rstrip())
    session.flush()


def _locked(session: Session, attempt: int) -> tuple[Job, Attempt] | None:
    """A running attempt and its job, both locked; the job first, as everywhere."""
    number = session.scalar(select(Attempt.job).where(Attempt.id == attempt))
    job = None if number is None else jobs.locked(session, number)
    one = session.get(Attempt, attempt, populate_existing=True)
    return (job, one) if job and one and one.state == "running" else None


def study(session: Session, attempt: Attempt, name: str) -> bytes | None:
    """A file of the job's search; None if there is none."""
    where = (Study.job == attempt.job, Study.name == name)
    return session.scalar(select(Study.data).where(*where))


def keep_study(session: Session, attempt: int, name: str, data: bytes) -> bool:
    """Store a file of the search; whether the attempt still runs.

    Raises:
        UsageError: there are too many of them.
    """
    found = _locked(session, attempt)
    if found is None:
        return False
    job, _one = found
    there = session.get(Study, (job.id, name))
    if there is not None:
        there.data = data
        return True
    count = session.scalar(select(func.count()).where(Study.job == job.id)) or 0
    if count >= MOST_STUDIES:
        raise UsageError(f"studies: expected at most {MOST_STUDIES}")
    session.add(Study(job=job.id, name=name, data=data))
    return True
