"""An attempt is one start of a job on an executor. The reconciler claims jobs and follows attempts.
An attempt's worker exchanges its start token for a token of its own, and reports with that."""

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
from advisor.jobs.spec import WAITING, AttemptOver, JobSpec, gpu_matches
from advisor.jobs.token import digest, made
from advisor.service import jobs, records
from advisor.service.database import now
from advisor.service.executors import Capacity, Start
from advisor.service.schema import Attempt, Item, JobRow, Log, Study, Token, TrialRow
from advisor.service.tokens import Caller, note

LEASE_S = 60.0
"""An attempt without a heartbeat for this long is lost, unless its executor sees it run."""
MAX_LOST = 5  # a job fails after this many lost attempts
PAUSE_S, MAX_PAUSE_S = 30.0, 600.0
"""First and longest pause of a job that no executor started, or whose worker could not begin. The
pause doubles each time."""
OVERTAKE_S = 600.0  # later, smaller jobs may overtake a waiting job for this long
MAX_STUDIES = 16  # search files of one job, at most
_CUT = "\n[advisor: the log ends here: it is too long]\n"

End = Literal["done", "failed", "preempted"]
"""States in which a worker may end its attempt. Other states: running, lost, cancelled."""


def claim(
    session: Session, executor: str, capacity: Capacity, server_url: str = ""
) -> Start | None:
    """Claim the first job that fits, and add its attempt. Returns None if no job fits. A capacity
    whose `total` is not 0 is kept free for a job that has waited long for more GPUs."""
    at = now(session)
    while (job := _first(session, capacity, at)) is not None:
        try:
            asked = JobSpec.of(json.loads(job.asked))
        except UsageError as exc:  # another version of advisor accepted it
            jobs.change(session, job, "failed", f"this server cannot read the job: {exc}", None)
            continue
        job.attempts += 1
        job.started = job.started or at
        # Random digits: another database may use the same job numbers on this executor.
        external = f"advisor-{job.id}-{job.attempts}-{secrets.token_hex(4)}"
        start = made()
        attempt = Attempt(
            job=job.id,
            number=job.attempts,
            executor=executor,
            external=external,
            state="running",
            started=at,
            beat=at,
            start=digest(start),
        )
        session.add(attempt)
        session.flush()
        jobs.change(session, job, "running", f"attempt {attempt.number} on {executor}", None)
        return Start(
            attempt=attempt.id,
            job=job.id,
            external=external,
            gpu=capacity.gpu,
            server_url=server_url,
            token=start,
            asked=asked,
        )
    return None


def _first(session: Session, capacity: Capacity, at: float) -> JobRow | None:
    """Lock the first job that fits. Returns None if a job that waits for more GPUs goes first."""
    kinds = session.scalars(select(JobRow.gpu).where(JobRow.state.in_(WAITING)).distinct())
    fitting = [kind for kind in kinds if gpu_matches(kind, capacity.gpu)]
    due = (JobRow.state.in_(WAITING), JobRow.due <= at, JobRow.gpu.in_(fitting))
    fits = JobRow.gpus.between(1, capacity.gpus) if capacity.gpus else JobRow.gpus == 0
    query = select(JobRow).where(*due, fits).order_by(JobRow.id).limit(1)
    large = (
        JobRow.gpus.between(capacity.gpus + 1, capacity.total),
        JobRow.changed <= at - OVERTAKE_S,
    )
    first = session.scalar(select(func.min(JobRow.id)).where(*due, *large))
    if first is not None:
        query = query.where(JobRow.id < first)
    job = session.scalar(query.with_for_update(skip_locked=True))
    if job is None and first is not None:
        jobs.explain_wait(session, [*due, fits, JobRow.id > first], f"lets job {first} go first")
    return job


def put_back(session: Session, attempt: int, reason: str) -> None:
    """Undo a claim whose attempt did not start, unless the attempt's worker has begun. If an
    executor started the worker but did not answer, the server refuses that worker."""
    job, one = _locked(session, attempt)
    if one.begun is not None:
        return
    session.delete(one)
    session.flush()
    job.attempts -= 1
    job.started = job.started if job.attempts else None
    if job.state == "running":
        jobs.change(session, job, "queued", reason, None)
        _pause(session, job)


class Running(NamedTuple):
    """`silent_s`: time since the last heartbeat; `cancelled`: whether the job was cancelled."""

    attempt: int
    external: str
    executor: str
    silent_s: float
    cancelled: bool


def running(session: Session) -> list[Running]:
    """The running attempts of all servers."""
    silent_s, cancelled = now(session) - Attempt.beat, JobRow.state != "running"
    query = select(Attempt.id, Attempt.external, Attempt.executor, silent_s, cancelled)
    query = query.join(JobRow, Attempt.job == JobRow.id).where(Attempt.state == "running")
    return [Running(*row) for row in session.execute(query.order_by(Attempt.id))]


def end(
    session: Session,
    attempt: int,
    state: str,
    reason: str,
    record: str = "",
    by: Caller | None = None,
) -> None:
    """End an attempt, and change its job's state. If the job was cancelled, so is the attempt. A
    lost attempt's job is queued again, after MAX_LOST of them it fails.

    Args:
        state: an `End`, or 'lost'.
        by: the attempt's worker; None if the reconciler ends the attempt.

    Raises:
        AttemptOver: the attempt is not running.
        UsageError: `state` is 'done', but the attempt did not store the record.
    """
    job, one = _locked(session, attempt)
    cancelled, becomes = job.state != "running", state
    if cancelled:
        state, reason = "cancelled", job.reason
    elif state == "done":
        own = (Item.token == job.token, Item.stored >= one.begun)
        kept = records.newest(session, record, *own)
        if kept is None:
            raise UsageError(f"record {record[:40]!r}: this attempt did not store it")
        job.record, job.speedup = record, kept.speedup
    one.reason = jobs.short("; ".join(filter(None, (one.reason, reason))))
    one.state, one.ended = state, now(session)
    note(session, None, f"attempt {state}", f"{one.external} {one.reason}".rstrip())
    session.flush()
    if cancelled:
        return
    if state == "lost":
        lost = select(Attempt.reason).where(Attempt.job == job.id, Attempt.state == "lost")
        reasons = session.scalars(lost.order_by(Attempt.number)).all()
        becomes, reason = "queued", f"attempt {one.number} was lost: {reason}"
        if len(reasons) >= MAX_LOST:
            every = "; ".join(dict.fromkeys(reasons))
            becomes, reason = "failed", f"{len(reasons)} attempts were lost: {every}"
    jobs.change(session, job, becomes, reason, by)
    if by is not None and state == "preempted" and one.beat == one.begun:  # it never began to tune
        _pause(session, job)


def _pause(session: Session, job: JobRow) -> None:
    """Delay a job that could not begin, such as on a busy GPU. The delay doubles each time."""
    job.pause = min(max(PAUSE_S, 2 * job.pause), MAX_PAUSE_S)
    job.due = now(session) + job.pause
    until = time.strftime("%H:%M:%S", time.gmtime(job.due))
    job.reason = jobs.short(f"waits until {until} UTC: {job.reason}")


def _locked(session: Session, attempt: int) -> tuple[JobRow, Attempt]:
    """Lock an attempt's job, and read both. Raises AttemptOver if the attempt is not running."""
    number = session.scalar(select(Attempt.job).where(Attempt.id == attempt))
    job = None if number is None else jobs.locked(session, number)
    one = session.get(Attempt, attempt, populate_existing=True)
    if job is None or one is None or one.state != "running":
        raise AttemptOver("this attempt is over")
    return job, one


def begin(session: Session, attempt: int, own: bytes, address: str) -> dict[str, Any] | None:
    """Exchange the start token, which others may have read, for a token that only the worker has.
    Returns the worker's instructions: the job, and the names of its search files.

    A worker may repeat the exchange. If somebody else tries it, returns None, and the attempt's
    reason says so.

    Args:
        own: the digest of the token that the worker has made.
        address: the worker's address.

    Raises:
        AttemptOver: the attempt is not running. UsageError: another token has the digest `own`.
    """
    job, one = _locked(session, attempt)
    by = Caller(job.token, one.external, "worker", address, one)
    if one.begun is None:
        if session.scalar(select(Token.id).where(Token.digest == own)) is not None:
            raise UsageError("token: already in use; make a new one")
        one.digest = own
        one.begun = one.beat = now(session)
        note(session, by, "attempt begun", one.external)
    elif one.digest != own and not one.reason:
        one.reason = f"its start token was used a second time, from {address}"
        note(session, by, "attempt begun twice", one.external)
    if one.digest != own:
        return None
    names = select(Study.name).where(Study.job == job.id).order_by(Study.name)
    return {"asked": json.loads(job.asked), "studies": list(session.scalars(names))}


def beat(
    session: Session, attempt: int, trials: Sequence[Mapping[str, Any]], log: str, device: str
) -> bool:
    """Store a worker's heartbeat and report. Returns whether the attempt should continue.

    Args:
        trials: as table rows; a worker that got no answer sends the same trials again.
        log: new output.
    """
    job, one = _locked(session, attempt)
    one.beat, job.pause = now(session), 0.0
    if device:
        one.device = jobs.short(device)
    new = {trial["number"]: trial for trial in trials}
    known = select(TrialRow.number).where(TrialRow.attempt == one.id, TrialRow.number.in_(new))
    for number in session.scalars(known):
        del new[number]
    for trial in itertools.islice(new.values(), max(0, jobs.MAX_JOB_TRIALS - job.tried)):
        session.add(TrialRow(attempt=one.id, job=job.id, at=one.beat, **trial))
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
    """A search file of the attempt's job; None if there is no such file."""
    where = (Study.job == attempt.job, Study.name == name)
    return session.scalar(select(Study.data).where(*where))


def keep_study(session: Session, attempt: int, name: str, data: bytes) -> None:
    """Store a search file of the job. Raises UsageError if the job has too many."""
    number = _locked(session, attempt)[0].id
    others = select(func.count()).where(Study.job == number, Study.name != name)
    if (session.scalar(others) or 0) >= MAX_STUDIES:
        raise UsageError(f"studies: the job already has {MAX_STUDIES}, the maximum")
    session.merge(Study(job=number, name=name, data=data))
