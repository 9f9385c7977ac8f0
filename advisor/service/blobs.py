"""What clients store under a key: quotas, pages of keys and removal, also of records; and code
archives and artifacts (compiled code). A client loads only artifacts that its own keys signed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping

from sqlalchemy import delete, exists, func, or_, select, update
from sqlalchemy.orm import Session

from advisor.cache.shown import size as shown
from advisor.errors import UsageError
from advisor.jobs.spec import LIVE
from advisor.service.database import DAY_S, now
from advisor.service.schema import Archive, ArtifactsRow, Item, JobRow, Stored
from advisor.service.tokens import Caller, note

QUOTAS: Mapping[type[Stored], int] = {Archive: 2 * 2**30, ArtifactsRow: 16 * 2**30, Item: 2 * 2**30}
"""Bytes of one token in a table."""
MAX_KEYS = 10_000  # keys on one page
ARCHIVES_KEPT_S, ARTIFACTS_KEPT_S = 7 * DAY_S, DAY_S
"""How long archives are kept after their last job was submitted, and artifacts without a record."""
_GZIP = b"\x1f\x8b\x08"


class NoCode(UsageError):
    """The server does not have a job's archive."""


def check_quota(session: Session, table: type[Stored], by: Caller, more: int) -> None:
    """Raise UsageError if `more` bytes in this table exceed the token's quota. Data of its jobs'
    attempts counts too."""
    used = session.scalar(select(func.sum(table.size)).where(table.token == by.token)) or 0
    if used + more > QUOTAS[table]:
        raise UsageError(
            f"{table.__tablename__}: this token stores {shown(used)}, at most "
            f"{shown(QUOTAS[table])} are allowed; delete some, or ask an admin to"
        )


def listed(
    session: Session, table: type[Stored], after: str, start: str = ""
) -> tuple[dict[str, int], bool]:
    """Returns (sizes of keys above `after` that begin with `start`, whether there are more)."""
    query = select(table.key, table.size).where(table.key > after)
    query = query.where(table.key.startswith(start, autoescape=True))
    found = session.execute(query.order_by(table.key).limit(MAX_KEYS + 1)).all()
    return {key: size for key, size in found[:MAX_KEYS]}, len(found) > MAX_KEYS


def remove(session: Session, table: type[Stored], key: str, by: Caller) -> bool:
    """Remove a row if the caller owns it. Returns whether there was one."""
    found = session.get(table, key)
    if found is None:
        return False
    by.check_owns(found.token)
    session.delete(found)
    note(session, by, f"{table.__tablename__} deleted", key)
    return True


def keep_archive(session: Session, digest: str, data: bytes, by: Caller) -> bool:
    """Store an archive. Returns whether it is new. Raises UsageError if `data` is no archive, has
    another digest, or exceeds the token's quota."""
    if hashlib.sha256(data).hexdigest() != digest:
        raise UsageError("archive: does not match its SHA-256; send it again")
    if not data.startswith(_GZIP):
        raise UsageError("archive: expected a tar.gz")
    at = now(session)
    if use_archive(session, digest, at):
        return False
    check_quota(session, Archive, by, len(data))
    session.add(Archive(key=digest, size=len(data), data=data, token=by.token, used=at))
    note(session, by, "archive kept", f"{digest} {len(data)} bytes")
    return True


def use_archive(session: Session, digest: str, at: float) -> bool:
    """Note that an archive is needed, so that it is kept. Returns whether there is one."""
    noted = update(Archive).where(Archive.key == digest).values(used=at)
    return session.execute(noted.returning(Archive.key)).first() is not None


def archive(session: Session, digest: str, by: Caller) -> bytes | None:
    """An archive, for attempts of jobs with this code and admins; None if it is missing."""
    job = session.get(JobRow, by.attempt.job) if by.attempt else None
    if not by.may("admin") and (job is None or job.archive != digest):
        raise PermissionError("only attempts of a job with this code may fetch it")
    return session.scalar(select(Archive.data).where(Archive.key == digest))


def keep_artifacts(session: Session, label: str, data: bytes, by: Caller) -> bool:
    """Store artifacts, replacing the caller's own of the same label. Returns whether the label is
    new. Raises UsageError if they exceed the token's quota."""
    there = session.get(ArtifactsRow, label)
    if there is not None:
        by.check_owns(there.token)
    check_quota(session, ArtifactsRow, by, len(data) - (there.size if there else 0))
    record_key = "/".join(label.split("-")[:3])
    made = {"data": data, "size": len(data), "token": by.token, "stored": time.time()}
    session.merge(ArtifactsRow(key=label, record_key=record_key, **made))
    note(session, by, "artifacts put", label)
    return there is None


def artifacts(session: Session, label: str) -> bytes | None:
    """The artifacts with this label; None if there are none."""
    return session.scalar(select(ArtifactsRow.data).where(ArtifactsRow.key == label))


def tidy(session: Session) -> None:
    """Remove artifacts whose record is gone, and archives that no recent job needed, except those
    of unfinished jobs and those that can measure a record again."""
    alone = ~exists().where(Item.record_key == ArtifactsRow.record_key)
    old = ArtifactsRow.stored < time.time() - ARTIFACTS_KEPT_S
    session.execute(delete(ArtifactsRow).where(old, alone))
    last = select(func.max(JobRow.id)).where(JobRow.record != "").group_by(JobRow.record)
    here = exists().where(Item.id == func.substr(JobRow.record, 1, 12))
    needs = or_(JobRow.state.in_(LIVE), JobRow.id.in_(last.correlate(None)) & here)
    needed = exists().where(JobRow.archive == Archive.key, needs)
    unused = Archive.used < now(session) - ARCHIVES_KEPT_S
    session.execute(delete(Archive).where(unused, ~needed))
