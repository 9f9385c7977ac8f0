"""Jobs: submitted tunings. Only this module and `attempts` change a job's state.

    queued ──> running ──> done | failed
      ^           │ if its attempt is lost: 'queued'; if it is preempted: 'preempted'
      └───────────┘      a job can be cancelled until it is done or failed

Every change first locks the job's row, then checks its current state.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import structs
from sqlalchemy import ColumnElement, Select, delete, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from advisor.cache.domain import line
from advisor.errors import UsageError, printable
from advisor.jobs.spec import LIVE, STATES, WAITING, JobSpec
from advisor.service import blobs, records
from advisor.service.database import DAY_S, now
from advisor.service.schema import Attempt, JobRow, Log, Study, Token, TrialRow
from advisor.service.tokens import Caller, note

MAX_LIVE = 200  # unfinished jobs of one token, at most
MAX_JOBS = 10_000
MAX_JOB_TRIALS = 10_000  # trials of one job, at most; later trials are dropped
MAX_LOG = 4 * 2**20  # characters of one job's log, at most
MAX_PIECES = 512  # rows of a log in one answer, at most; a heartbeat adds one row
LOG_KEPT_S, STUDIES_KEPT_S, ATTEMPTS_KEPT_S = 30 * DAY_S, DAY_S, 90 * DAY_S
"""Time since a job was over. Trials are kept as long as their attempts."""
_MAX_REMOVED = 1000  # attempts removed in one transaction, at most
_MAX_REASON = 500
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""Escape sequences of terminals: colours, titles."""


def submit(session: Session, asked: JobSpec, by: Caller, reason: str = "") -> tuple[JobRow, bool]:
    """Queue a job that waits for this reason. Returns (the job, True). If the same job is
    unfinished, or done and its record exists, returns (that job, False).

    Raises:
        NoCode: its archive is missing. UsageError: the token is revoked or has too many jobs.
    """
    # Locked, so that the token is not revoked before this transaction ends.
    if session.get_one(Token, by.token, with_for_update={"read": True}).revoked is not None:
        raise UsageError("the token was revoked")
    if found := _same(session, asked):
        return found, False
    at = now(session)
    if asked.archive and not blobs.use_archive(session, asked.archive, at):
        raise blobs.NoCode(f"archive {asked.archive[:12]}: unknown to the server; send it first")
    live = select(func.count()).where(JobRow.token == by.token, JobRow.state.in_(LIVE))
    if (session.scalar(live) or 0) >= MAX_LIVE:
        raise UsageError(f"this token has {MAX_LIVE} unfinished jobs; wait, or cancel some")
    job = JobRow(
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


def measure_again(session: Session, record: str, by: Caller) -> tuple[JobRow, bool]:
    """Queue again the job that made the record with this id, on the record's device. Returns and
    raises as `submit`, and UsageError if no job with a valid token made the record."""
    found = (JobRow.record == record, Token.revoked.is_(None))
    query = select(JobRow).join(Token).where(*found).order_by(JobRow.id.desc()).limit(1)
    job = session.scalar(query)
    if job is None:
        raise UsageError(
            f"record {record}: no job of this server can measure it; submit the command yourself"
        )
    asked = JobSpec.of(json.loads(job.asked))
    kept = records.newest(session, record)
    gpu = kept.device if kept and asked.gpus else ""
    return submit(session, structs.replace(asked, gpu=gpu, force=True), by)


def _same(session: Session, asked: JobSpec) -> JobRow | None:
    """An unfinished job with this key, or a done one whose record still exists."""
    query = select(JobRow).where(JobRow.key == asked.key).order_by(JobRow.id.desc())
    if live := session.scalar(query.where(JobRow.state.in_(LIVE))):
        return live
    done = None if asked.force else session.scalar(query.where(JobRow.state == "done").limit(1))
    return done if done and records.newest(session, done.record) else None


def locked(session: Session, number: int) -> JobRow | None:
    """Lock a job until the transaction ends. Returns None if there is no such job."""
    query = select(JobRow).where(JobRow.id == number).with_for_update()
    return session.scalar(query.execution_options(populate_existing=True))


def change(session: Session, job: JobRow, state: str, reason: str, by: Caller | None) -> None:
    """Change the state of a locked job, with a line in the audit log."""
    job.state, job.reason, job.changed = state, short(reason), now(session)
    note(session, by, f"job {state}", f"{job.id} {job.reason}".rstrip())


def short(reason: str) -> str:
    """A reason as one short line without control characters."""
    return line(reason)[:_MAX_REASON]


def cancel(session: Session, number: int, by: Caller) -> str | None:
    """Cancel a job that is not over, and return its state; None if there is no such job. Raises
    PermissionError if another token submitted it."""
    job = locked(session, number)
    if job is None:
        return None
    if not by.owns(job.token):
        raise PermissionError("another token submitted this job; an admin may cancel it")
    if job.state in LIVE:
        change(session, job, "cancelled", f"by {by.name}", by)
    return job.state


def revoke_token(session: Session, number: int, by: Caller) -> bool:
    """Revoke a token, and cancel its jobs, whose attempts end. Returns False if unknown."""
    token = session.get(Token, number, with_for_update=True)
    if token is None:
        return False
    if token.revoked is None:
        token.revoked = time.time()
        note(session, by, "token revoked", f"{token.id} {token.name} ({token.role})")
        theirs = select(JobRow).where(JobRow.token == number, JobRow.state.in_(LIVE))
        for job in session.scalars(theirs.order_by(JobRow.id).with_for_update()):
            change(session, job, "cancelled", "the token that submitted it was revoked", by)
    return True


def explain_wait(session: Session, which: Iterable[ColumnElement[bool]], reason: str) -> None:
    where = (*which, JobRow.state.in_(WAITING), JobRow.reason != short(reason))
    session.execute(update(JobRow).where(*where).values(reason=short(reason)))


def waiting(session: Session, most: int = 200) -> Sequence[JobRow]:
    """Waiting jobs in the order in which they start."""
    query = select(JobRow).where(JobRow.state.in_(WAITING)).order_by(JobRow.id).limit(most)
    return session.scalars(query).all()


def _columns(table: type[JobRow | Attempt | TrialRow], names: str) -> list[ColumnElement[Any]]:
    return [getattr(table, name) for name in names.split()]


_LISTED = "id state reason what gpu gpus created started changed budget_s tried speedup record"
_LINES = select(
    *_columns(JobRow, _LISTED), JobRow.attempts.label("attempt"), Token.name.label("by")
).join(Token)


def answered(session: Session, job: JobRow, new: bool) -> dict[str, Any]:
    return {**session.execute(_LINES.where(JobRow.id == job.id)).mappings().one(), "new": new}


def listed(
    session: Session, states: Iterable[str] = (), before: int | None = None, most: int = 50
) -> tuple[list[dict[str, Any]], bool]:
    """Returns (the newest jobs with numbers below `before`, whether there are more)."""
    query = _LINES.order_by(JobRow.id.desc())
    if states := list(states):
        query = query.where(JobRow.state.in_(states))
    if before is not None:
        query = query.where(JobRow.id < before)
    found = [dict(row) for row in session.execute(query.limit(most + 1)).mappings()]
    return found[:most], len(found) > most


def details(session: Session, number: int) -> dict[str, Any] | None:
    """A job with its attempts and trials; None if there is no such job."""
    found = session.execute(_LINES.where(JobRow.id == number)).mappings().first()
    if found is None:
        return None
    attempts = select(*_columns(Attempt, "number executor device state reason started ended"))
    attempts = attempts.where(Attempt.job == number).order_by(Attempt.number)
    shown = _columns(TrialRow, "number at what batch samples_per_s ratio outcome origin")
    trials = select(Attempt.number.label("attempt"), *shown).join(Attempt)
    trials = trials.where(TrialRow.job == number).limit(MAX_JOB_TRIALS)
    trials = trials.order_by(TrialRow.at, Attempt.number, TrialRow.number)
    return {
        **found,
        "attempts": [dict(row) for row in session.execute(attempts).mappings()],
        "trials": [dict(row) for row in session.execute(trials).mappings()],
    }


def log(session: Session, number: int, after: int) -> dict[str, Any] | None:
    """A job's log after row `after`, at most MAX_PIECES rows, and the next call's `after`; None if
    there is no such job."""
    state = session.scalar(select(JobRow.state).where(JobRow.id == number))
    if state is None:
        return None
    query = select(Log.id, Log.data).where(Log.job == number, Log.id > after).order_by(Log.id)
    pieces = session.execute(query.limit(MAX_PIECES)).all()
    return {
        "text": "".join(data for _, data in pieces),
        "next": pieces[-1][0] if pieces else after,
        "ended": len(pieces) < MAX_PIECES and state not in LIVE,
    }


def tail(session: Session, number: int, most: int) -> str:
    """The last `most` characters of a job's log."""
    query = select(Log.data).where(Log.job == number).order_by(Log.id.desc())
    pieces = session.scalars(query.limit(MAX_PIECES)).all()
    return "".join(reversed(pieces))[-most:]


def log_text(text: str) -> str:
    """A log without escape sequences and control characters."""
    plain = _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return printable(plain, keep="\n\t")


def tidy(session: Session) -> None:
    """Remove old data of jobs that are over: search files first, later logs, then attempts with
    their trials."""
    at = now(session)

    def over(kept_s: float) -> Select[int]:
        return select(JobRow.id).where(JobRow.state.not_in(LIVE), JobRow.changed < at - kept_s)

    session.execute(delete(Study).where(Study.job.in_(over(STUDIES_KEPT_S))))
    session.execute(delete(Log).where(Log.job.in_(over(LOG_KEPT_S))))
    old = select(Attempt.id).where(Attempt.job.in_(over(ATTEMPTS_KEPT_S))).limit(_MAX_REMOVED)
    attempts = session.scalars(old).all()
    session.execute(delete(TrialRow).where(TrialRow.attempt.in_(attempts)))
    session.execute(delete(Attempt).where(Attempt.id.in_(attempts)))


def last_for(session: Session, record: str) -> int | None:
    """The number of the last job that made a record; None if no job made it."""
    return session.scalar(select(func.max(JobRow.id)).where(JobRow.record == record))


class Counts(NamedTuple):
    """Numbers of `jobs` and `attempts` by state; `oldest_s`: age of the oldest waiting job."""

    jobs: Mapping[str, int]
    attempts: Mapping[str, int]
    oldest_s: float


def counts(session: Session) -> Counts:
    of_jobs, of_attempts = (
        dict(session.execute(select(state, func.count()).group_by(state)).all())
        for state in (JobRow.state, Attempt.state)
    )
    first = session.scalar(select(func.min(JobRow.changed)).where(JobRow.state.in_(WAITING)))
    oldest_s = 0.0 if first is None else max(0.0, now(session) - first)
    return Counts(dict.fromkeys(STATES, 0) | of_jobs, of_attempts, oldest_s)
