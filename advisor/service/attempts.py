"""Attempts: starts of jobs on executors. The reconciler claims a job and follows its attempt. The
attempt's worker reports with a token of its own, which it gets in exchange for a start token."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from advisor.errors import UsageError
from advisor.jobs.spec import JobSpec, gpu_matches
from advisor.jobs.states import WAITING
from advisor.jobs.token import digest, made
from advisor.service import jobs, records, tokens
from advisor.service.database import DAY_S, now
from advisor.service.executors import Capacity, Start
from advisor.service.schema import Attempt, Job, Log, Study, Token, Trial
from advisor.service.tokens import Caller, note

LEASE_S = 60.0
"""An attempt without a heartbeat for so long may be lost."""
MAX_LOST = 5
"""Lost attempts after which a job fails."""
PAUSE_S = 60.0
"""Before a job that no executor took is claimed again."""
REST_S, MAX_REST_S = 30.0, 600.0
"""Before a job whose worker could not begin is claimed again: the first pause, which doubles each
time, and the longest."""
PATIENCE_S = 600.0
"""How long later, smaller jobs may overtake a job."""
MAX_STUDIES = 16
"""Files of one search."""
_TOKEN_S = DAY_S
"""How long an attempt's token is valid beyond twice its budget."""
_CUT = "\n[advisor: the log ends here: it is too long]\n"

End = Literal["done", "failed", "preempted"]
"""How a worker may end its attempt. Other states: running, lost, cancelled."""
Exchange = Literal["begun", "taken", "over"]
"""The result of an exchange: the sender has the attempt, another has it, or it is over."""


def claim(
    session: Session, executor: str, capacity: Capacity, server_url: str = ""
) -> Start | None:
    """Claim the first job that fits; None if none does.

    Args:
        capacity: with a `total`, it is kept free for a job that has waited long for more of it.
    """
    at = now(session)
    while (job := _first(session, capacity, at)) is not None:
        try:
            asked = JobSpec.of(json.loads(job.asked))
        except UsageError as exc:  # another version of advisor took it
            jobs.change(session, job, "failed", f"this server cannot read it: {exc}", None)
        else:
            return _claimed(session, job, asked, executor, server_url)
    return None


def _first(session: Session, capacity: Capacity, at: float) -> Job | None:
    """The first job that fits, locked; none if one that waits for more GPUs goes first."""
    kinds = session.scalars(select(Job.gpu).where(Job.state.in_(WAITING)).distinct())
    fitting = [kind for kind in kinds if gpu_matches(kind, capacity.gpu)]
    due = (Job.state.in_(WAITING), Job.due <= at, Job.gpu.in_(fitting))
    fits = Job.gpus.between(1, capacity.gpus) if capacity.gpus else Job.gpus == 0
    query = select(Job).where(*due, fits).order_by(Job.id).limit(1)
    large = (Job.gpus.between(capacity.gpus + 1, capacity.total), Job.changed <= at - PATIENCE_S)
    first = session.scalar(select(func.min(Job.id)).where(*due, *large))
    if first is not None:
        query = query.where(Job.id < first)
    job = session.scalar(query.with_for_update(skip_locked=True))
    if job is None and first is not None:
        jobs.explain_wait(session, [*due, fits, Job.id > first], f"lets job {first} go first")
    return job


def _claimed(session: Session, job: Job, asked: JobSpec, executor: str, server_url: str) -> Start:
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
    job.started = job.started or at
    jobs.change(session, job, "running", f"attempt {attempt.number} on {executor}", None)
    return Start(
        attempt=attempt.id,
        job=job.id,
        number=attempt.number,
        external=external,
        server_url=server_url,
        token=start,
        asked=asked,
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
    job.started = job.started if job.attempts else None
    job.due = now(session) + PAUSE_S
    if job.state == "running":
        jobs.change(session, job, "queued", reason, None)
    return True


class Running(NamedTuple):
    """A running attempt. `unwanted`: its job was cancelled."""

    attempt: int
    external: str
    executor: str
    silent_s: float
    unwanted: bool


def running(session: Session, executor: str = "") -> list[Running]:
    """Attempts of one executor, or of all."""
    silent_s, unwanted = now(session) - Attempt.beat, Job.state != "running"
    query = select(Attempt.id, Attempt.external, Attempt.executor, silent_s, unwanted)
    query = query.join(Job, Attempt.job == Job.id).where(Attempt.state == "running")
    if executor:
        query = query.where(Attempt.executor == executor)
    return [Running(*row) for row in session.execute(query.order_by(Attempt.id))]


def end(
    session: Session,
    attempt: int,
    state: End | Literal["lost"],
    reason: str,
    record: str = "",
    by: Caller | None = None,
) -> bool:
    """End an attempt, and change its job's state. If the job was cancelled, so is the attempt.

    Args:
        by: the attempt's worker; None if its executor says so.

    Returns:
        Whether the attempt was running.

    Raises:
        UsageError: it is done, and did not store this record.
    """
    found = _locked(session, attempt)
    if found is None:
        return False
    job, one = found
    if job.state != "running":
        _close(session, one, "cancelled", job.reason)
        return True
    if state == "done":
        speedup = records.speedup_of(session, record, one.token)
        if speedup is None:
            raise UsageError(f"record {record[:40]!r}: this attempt did not put it here")
        job.record, job.speedup = record, speedup
    _close(session, one, state, reason)
    if state == "lost":
        _queue_again(session, job, one, reason)
    else:
        jobs.change(session, job, state, reason, by)
        if state == "preempted" and by is not None and not _began(one):
            _rest(session, job)
    return True


def _queue_again(session: Session, job: Job, one: Attempt, reason: str) -> None:
    """Queue a job whose attempt was lost; after MAX_LOST of them it has failed."""
    lost = select(Attempt.reason).where(Attempt.job == job.id, Attempt.state == "lost")
    reasons = session.scalars(lost.order_by(Attempt.number)).all()
    if len(reasons) < MAX_LOST:
        jobs.change(session, job, "queued", f"attempt {one.number} was lost: {reason}", None)
    else:
        every = "; ".join(dict.fromkeys(reasons))
        jobs.change(session, job, "failed", f"{len(reasons)} attempts were lost: {every}", None)


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
    job.due = now(session) + min(REST_S * 2 ** (len(list(idle)) - 1), MAX_REST_S)
    until = time.strftime("%H:%M:%S", time.gmtime(job.due))
    job.reason = jobs.short(f"waits until {until} UTC: {job.reason}")


def _close(session: Session, one: Attempt, state: str, reason: str) -> None:
    """End an attempt and its token. Earlier reasons stay."""
    every = "; ".join(filter(None, (one.reason, reason)))
    one.state, one.reason, one.ended = state, jobs.short(every), now(session)
    session.get_one(Token, one.token).revoked = time.time()
    note(session, None, f"attempt {state}", f"{one.external} {one.reason}".rstrip())
    session.flush()


def _locked(session: Session, attempt: int) -> tuple[Job, Attempt] | None:
    """A running attempt and its job, both locked; the job first, as everywhere."""
    number = session.scalar(select(Attempt.job).where(Attempt.id == attempt))
    job = None if number is None else jobs.locked(session, number)
    one = session.get(Attempt, attempt, populate_existing=True)
    return (job, one) if job and one and one.state == "running" else None


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


def instructions(session: Session, attempt: Attempt) -> dict[str, Any]:
    """What a worker needs: the job, the names of its search's files."""
    job = session.get_one(Job, attempt.job)
    names = select(Study.name).where(Study.job == job.id).order_by(Study.name)
    return {
        "job": job.id,
        "number": attempt.number,
        "asked": json.loads(job.asked),
        "studies": list(session.scalars(names)),
    }


def beat(
    session: Session, attempt: int, trials: Sequence[Mapping[str, Any]], log: str, device: str
) -> bool:
    """Note a heartbeat and a worker's report; whether the attempt is to go on.

    Args:
        trials: as rows of their table; a worker that got no answer sends them again.
        log: what was printed.
    """
    found = _locked(session, attempt)
    if found is None:
        return False
    job, one = found
    one.beat = now(session)
    if device:
        one.device = jobs.short(device)
    new = {trial["number"]: trial for trial in trials}
    known = select(Trial.number).where(Trial.attempt == one.id, Trial.number.in_(new))
    for number in session.scalars(known):
        del new[number]
    for trial in itertools.islice(new.values(), max(0, jobs.MAX_TRIALS - job.tried)):
        session.add(Trial(attempt=one.id, job=job.id, at=one.beat, **trial))
        job.batch = job.batch if job.tried else trial["batch"]
        job.tried += 1
        if trial["batch"] == job.batch and not trial["outcome"]:
            job.speedup = max(job.speedup, trial["ratio"])
    text, left = jobs.log_text(log), jobs.MAX_LOG - job.logged
    if text and left > 0:
        data = text if len(text) < left else text[:left] + _CUT
        session.add(Log(job=job.id, attempt=one.id, data=data))
        job.logged += len(data)
    return job.state == "running"


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
    number = found[0].id
    there = session.get(Study, (number, name))
    if there is not None:
        there.data = data
        return True
    count = session.scalar(select(func.count()).where(Study.job == number)) or 0
    if count >= MAX_STUDIES:
        raise UsageError(f"studies: expected at most {MAX_STUDIES}")
    session.add(Study(job=number, name=name, data=data))
    return True
