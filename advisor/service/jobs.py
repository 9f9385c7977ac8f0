"""Jobs: submitted tunings. Every change of a job's state is here or in `attempts`.

    queued ──> running ──> done | failed
      ^           │ lost: queued again; preempted: waits as such
      └───────────┘      each of them can be cancelled until it is done or failed

A change begins by locking the job's row, and looks at the state that it changes.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs
from sqlalchemy import ColumnElement, Select, delete, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from advisor.cache.domain import line
from advisor.errors import UsageError
from advisor.jobs.spec import JobSpec
from advisor.jobs.states import LIVE, STATES, WAITING
from advisor.service import archives, records
from advisor.service.database import DAY_S, now
from advisor.service.schema import Artifacts, Attempt, Event, Item, Job, Log, Study, Token, Trial
from advisor.service.schema import Session as Browser
from advisor.service.tokens import Caller, note

MAX_LIVE = 200
"""Of one token."""
MAX_LISTED = 200
MAX_TRIALS = 10_000
"""Of one job; later ones are dropped."""
MAX_LOG = 4 * 2**20
"""Characters of one job's log."""
MAX_TEXT = 2**19
"""Characters of a log in one answer."""
LOG_KEPT_S, STUDIES_KEPT_S, ATTEMPTS_KEPT_S = 30 * DAY_S, DAY_S, 90 * DAY_S
"""Since a job was over; attempts with their trials and tokens."""
_MAX_REMOVED = 1000
"""Attempts in one transaction."""
_MAX_REASON = 500
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""Escape sequences of terminals: colours, titles."""


def submit(session: Session, asked: JobSpec, by: Caller, reason: str = "") -> tuple[Job, bool]:
    """Queue a job, or find the live one that is the same, or the done one whose record is here; and
    whether it is new.

    Args:
        reason: why a new job has to wait, for people.

    Raises:
        NoCode: its archive is not here. UsageError: the token is revoked or has too many jobs.
    """
    # Locked, so that the token is not revoked before this transaction ends.
    held = select(Token.revoked).where(Token.id == by.token).with_for_update(read=True)
    if session.scalar(held) is not None:
        raise UsageError("the token was revoked")
    if found := _same(session, asked):
        return found, False
    at = now(session)
    if asked.archive and not archives.use(session, asked.archive, at):
        raise archives.NoCode(f"archive {asked.archive[:12]}: is not here; send it first")
    live = select(func.count()).where(Job.token == by.token, Job.state.in_(LIVE))
    if (session.scalar(live) or 0) >= MAX_LIVE:
        raise UsageError(f"{MAX_LIVE} jobs of this token are not done yet; wait, or cancel some")
    job = Job(
        key=asked.key,
        state="queued",
        reason=short(reason),
        what=asked.what,
        asked=json.dumps(asked.plain),
        archive=asked.archive,
        gpu=asked.gpu,
        gpus=asked.gpus,
        budget_s=asked.plan.seconds,
        token=by.token,
        created=at,
        changed=at,
    )
    try:
        with session.begin_nested():
            session.add(job)
            session.flush()
            note(session, by, "job submitted", f"{job.id} {job.what}")
    except IntegrityError:  # another server was first
        if found := _same(session, asked):
            return found, False
        raise
    return job, True


def measure_again(session: Session, record: str, by: Caller) -> tuple[Job, bool]:
    """Queue the job that found a record once more: the same code, on the record's device.

    Args:
        record: its id, as people type it.

    Raises:
        UsageError: no job whose token still holds found it, or this token has too many jobs.
        NoCode: the job's code is not here any more.
    """
    found = (Job.record == record, Token.revoked.is_(None))
    query = select(Job).join(Token, Job.token == Token.id).where(*found)
    job = session.scalar(query.order_by(Job.id.desc()).limit(1))
    if job is None:
        raise UsageError(f"record {record}: no job here can measure it again; submit its command")
    asked = JobSpec.of(json.loads(job.asked))
    gpu = records.device_of(session, record) if asked.gpus else ""
    return submit(session, structs.replace(asked, gpu=gpu, force=True), by)


def _same(session: Session, asked: JobSpec) -> Job | None:
    """A live job with this key, or a done one whose record is still here."""
    query = select(Job).where(Job.key == asked.key).order_by(Job.id.desc())
    if live := session.scalar(query.where(Job.state.in_(LIVE))):
        return live
    done = None if asked.force else session.scalar(query.where(Job.state == "done").limit(1))
    return done if done and records.known(session, done.record) else None


def locked(session: Session, number: int) -> Job | None:
    """A job, locked until the transaction ends."""
    query = select(Job).where(Job.id == number).with_for_update()
    return session.scalar(query.execution_options(populate_existing=True))


def change(session: Session, job: Job, state: str, reason: str, by: Caller | None) -> None:
    """Change the state of a locked job, with a line in the audit log."""
    job.state, job.reason, job.changed = state, short(reason), now(session)
    note(session, by, f"job {state}", f"{job.id} {job.reason}".rstrip())


def short(reason: str) -> str:
    """A reason as one short line without control characters."""
    return line(reason)[:_MAX_REASON]


def cancel(session: Session, number: int, by: Caller) -> str | None:
    """Cancel a job that is not over, and return its state; None if there is no such job.

    Raises:
        PermissionError: it is another's.
    """
    job = locked(session, number)
    if job is None:
        return None
    if not by.owns(job.token):
        raise PermissionError("another token asked for it; an admin may cancel it")
    if job.state in LIVE:
        change(session, job, "cancelled", f"by {by.name}", by)
    return job.state


def revoke_token(session: Session, number: int, by: Caller) -> bool:
    """End a token, its jobs and their attempts' tokens; whether there is such a token."""
    token = session.get(Token, number, with_for_update=True)
    if token is None:
        return False
    if token.revoked is None:
        token.revoked = time.time()
        note(session, by, "token revoked", f"{token.id} {token.name} ({token.role})")
        theirs = select(Job).where(Job.token == number, Job.state.in_(LIVE)).order_by(Job.id)
        for job in session.scalars(theirs.with_for_update()):
            change(session, job, "cancelled", "the token that asked for it was revoked", by)
    attempts = select(Attempt.token).join(Job, Attempt.job == Job.id).where(Job.token == number)
    lent = update(Token).where(Token.id.in_(attempts), Token.revoked.is_(None))
    session.execute(lent.values(revoked=time.time()))
    return True


def explain_wait(session: Session, which: Iterable[ColumnElement[bool]], reason: str) -> None:
    """Set the reason of waiting jobs."""
    where = (*which, Job.state.in_(WAITING), Job.reason != short(reason))
    session.execute(update(Job).where(*where).values(reason=short(reason)))


def waiting(session: Session, most: int = MAX_LISTED) -> Sequence[Job]:
    """Waiting jobs in the order in which they start."""
    query = select(Job).where(Job.state.in_(WAITING)).order_by(Job.id).limit(most)
    return session.scalars(query).all()


_SHOWN = ("id", "state", "reason", "what", "gpu", "gpus", "created", "changed", "record")
_WITH_OWNER = select(Job, Token.name).join(Token, Job.token == Token.id)


def _fields(row: object, *names: str) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


def _line(job: Job, by: str) -> dict[str, Any]:
    return {**_fields(job, *_SHOWN), "by": by, "attempt": job.attempts}


def answered(session: Session, job: Job, new: bool) -> dict[str, Any]:
    """A submitted job as JSON."""
    return {**_line(job, session.get_one(Token, job.token).name), "new": new}


def listed(
    session: Session, states: Iterable[str] = (), before: int | None = None, most: int = 50
) -> tuple[list[dict[str, Any]], bool]:
    """Jobs, the newest first, from before a number; and whether there are more."""
    query = _WITH_OWNER.order_by(Job.id.desc())
    if states := list(states):
        query = query.where(Job.state.in_(states))
    if before is not None:
        query = query.where(Job.id < before)
    found = [_line(job, by) for job, by in session.execute(query.limit(most + 1))]
    return found[:most], len(found) > most


def details(session: Session, number: int) -> dict[str, Any] | None:
    """A job with its attempts and trials; None if there is no such job."""
    found = session.execute(_WITH_OWNER.where(Job.id == number)).first()
    if found is None:
        return None
    names = ("number", "executor", "device", "state", "reason", "started", "ended")
    attempts = select(Attempt).where(Attempt.job == number).order_by(Attempt.number)
    return {
        **_line(*found),
        "attempts": [_fields(one, *names) for one in session.scalars(attempts)],
        "trials": _trials(session, number),
    }


def _trials(session: Session, number: int) -> list[dict[str, Any]]:
    """A job's trials in the order in which they came."""
    names = ("number", "at", "what", "batch", "samples_per_s", "ratio", "outcome", "origin")
    query = select(Trial, Attempt.number).join(Attempt, Trial.attempt == Attempt.id)
    query = query.where(Trial.job == number).order_by(Trial.at, Attempt.number, Trial.number)
    found = session.execute(query.limit(MAX_TRIALS))
    return [{"attempt": attempt, **_fields(one, *names)} for one, attempt in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """A part of a job's log. `next`: where the following part begins."""

    text: str
    next: int
    ended: bool


def log(session: Session, number: int, after: int) -> LogPart | None:
    """A job's log from a place on, as much as one answer takes; None if there is no such job."""
    state = session.scalar(select(Job.state).where(Job.id == number))
    if state is None:
        return None
    query = select(Log.id, Log.data).where(Log.job == number, Log.id > after).order_by(Log.id)
    pieces, whole = _read(session, query, MAX_TEXT)
    return LogPart(
        text="".join(data for _, data in pieces),
        next=pieces[-1][0] if pieces else after,
        ended=whole and state not in LIVE,
    )


def tail(session: Session, number: int, most: int) -> LogPart:
    """The end of a job's log, of so many characters or one piece more."""
    query = select(Log.id, Log.data).where(Log.job == number).order_by(Log.id.desc())
    pieces, _whole = _read(session, query, most)
    text = "".join(data for _, data in reversed(pieces))
    return LogPart(text=text, next=pieces[0][0] if pieces else 0, ended=False)


def _read(
    session: Session, query: Select[int, str], most: int
) -> tuple[list[tuple[int, str]], bool]:
    """Pieces of a log until they have so many characters; and whether these are all."""
    pieces: list[tuple[int, str]] = []
    size = 0
    with session.execute(query.execution_options(yield_per=64)) as rows:
        for id, data in rows:
            if size >= most:
                return pieces, False
            pieces.append((id, data))
            size += len(data)
    return pieces, True


def log_text(text: str) -> str:
    """A log without escape sequences and control characters."""
    plain = _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in plain)


def tidy(session: Session) -> None:
    """Remove old data of jobs that are over: files of searches, later logs, then attempts."""
    at = now(session)
    for kept_s, table in ((STUDIES_KEPT_S, Study), (LOG_KEPT_S, Log)):
        over = select(Job.id).where(Job.state.not_in(LIVE), Job.changed < at - kept_s)
        session.execute(delete(table).where(table.job.in_(over)))
    _remove_attempts(session, at - ATTEMPTS_KEPT_S)


def _remove_attempts(session: Session, before: float) -> None:
    """Remove old attempts, their trials and their tokens. What these tokens stored then belongs to
    the token that asked for the job."""
    ended = (Job.state.not_in(LIVE), Job.changed < before)
    old = select(Attempt).join(Job, Attempt.job == Job.id).where(*ended).limit(_MAX_REMOVED)
    attempts = session.scalars(old).all()
    lent = [one.token for one in attempts]
    for table in (Item, Artifacts, Event):
        owner = select(Job.token).join(Attempt, Attempt.job == Job.id)
        owners = owner.where(Attempt.token == table.token).scalar_subquery()
        session.execute(update(table).where(table.token.in_(lent)).values(token=owners))
    session.execute(delete(Browser).where(Browser.token.in_(lent)))
    session.execute(delete(Trial).where(Trial.attempt.in_([one.id for one in attempts])))
    session.execute(delete(Attempt).where(Attempt.token.in_(lent)))
    session.execute(delete(Token).where(Token.id.in_(lent)))


def last_for(session: Session, record: str) -> int | None:
    """The last job that found a record; None for one that was measured otherwise."""
    return session.scalar(select(func.max(Job.id)).where(Job.record == record))


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """`jobs` and `attempts` by state; `oldest_s`: the longest wait of a job."""

    jobs: Mapping[str, int]
    attempts: Mapping[str, int]
    oldest_s: float


def counts(session: Session) -> Counts:
    of_jobs = session.execute(select(Job.state, func.count()).group_by(Job.state))
    of_attempts = session.execute(select(Attempt.state, func.count()).group_by(Attempt.state))
    first = session.scalar(select(func.min(Job.changed)).where(Job.state.in_(WAITING)))
    return Counts(
        jobs={**dict.fromkeys(STATES, 0), **dict(of_jobs.all())},
        attempts=dict(of_attempts.all()),
        oldest_s=0.0 if first is None else max(0.0, now(session) - first),
    )
