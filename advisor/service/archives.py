"""Archives: the code of jobs, as it was sent."""

from __future__ import annotations

import hashlib

from sqlalchemy import delete, exists, func, or_, select, update
from sqlalchemy.orm import Session

from advisor.errors import UsageError
from advisor.service import quotas
from advisor.service.database import DAY_S, now
from advisor.service.schema import Archive, Attempt, Item, Job
from advisor.service.tokens import Caller, note

KEPT_S = 7 * DAY_S
"""Since a job last asked for it."""
_GZIP = b"\x1f\x8b\x08"


class NoCode(UsageError):
    """An archive that is asked for is not here."""


def keep(session: Session, digest: str, data: bytes, by: Caller) -> bool:
    """Keep an archive; whether it is new.

    Raises:
        UsageError: it is no archive, not of this digest, or beyond the token's quota.
    """
    if hashlib.sha256(data).hexdigest() != digest:
        raise UsageError("archive: is not what its digest says; send it again")
    if not data.startswith(_GZIP):
        raise UsageError("archive: expected a tar.gz")
    at = now(session)
    if use(session, digest, at):
        return False
    quotas.check(session, Archive, by, len(data))
    archive = Archive(digest=digest, size=len(data), data=data, token=by.token, created=at, used=at)
    session.add(archive)
    note(session, by, "archive kept", f"{digest} {len(data)} bytes")
    return True


def use(session: Session, digest: str, at: float) -> bool:
    """Note that an archive is asked for, so that it is not removed; whether it is there."""
    noted = update(Archive).where(Archive.digest == digest).values(used=at)
    return session.execute(noted.returning(Archive.digest)).first() is not None


def data_of(session: Session, digest: str, by: Caller) -> bytes | None:
    """An archive, for attempts of jobs with this code and admins; None if it is not there."""
    theirs = select(Attempt.id).join(Job, Attempt.job == Job.id)
    theirs = theirs.where(Attempt.token == by.token, Job.archive == digest)
    if not by.may("admin") and session.scalar(theirs) is None:
        raise PermissionError("this code is for the attempts of its own job")
    return session.scalar(select(Archive.data).where(Archive.digest == digest))


def tidy(session: Session, live: tuple[str, ...]) -> None:
    """Remove what no job asked for in a while, no live one needs, and no record that is here could
    be measured again with."""
    last = select(func.max(Job.id)).where(Job.record != "").group_by(Job.record).correlate(None)
    here = exists().where(Item.id == func.substr(Job.record, 1, 12))
    needs = or_(Job.state.in_(live), Job.id.in_(last) & here)
    needed = exists().where(Job.archive == Archive.digest, needs)
    old = Archive.used < now(session) - KEPT_S
    session.execute(delete(Archive).where(old, ~needed))
