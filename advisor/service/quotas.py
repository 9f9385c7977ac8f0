"""How many bytes one token may keep on the server, with those of the attempts at its jobs."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from advisor.cache.shown import size as shown
from advisor.errors import UsageError
from advisor.service.schema import Archive, Artifacts, Attempt, Item, Job
from advisor.service.tokens import Caller

Kept = type[Archive] | type[Artifacts] | type[Item]

QUOTAS: Mapping[Kept, int] = {Archive: 2 * 2**30, Artifacts: 16 * 2**30, Item: 2 * 2**30}
CALLED: Mapping[Kept, str] = {Archive: "archives", Artifacts: "artifacts", Item: "records"}


def check(session: Session, table: Kept, by: Caller, more: int) -> None:
    """Raise UsageError if a token has no room for so many bytes more in a table."""
    owner = select(Job.token).join(Attempt, Attempt.job == Job.id).where(Attempt.token == by.token)
    token = session.scalar(owner) or by.token
    lent = select(Attempt.token).join(Job, Attempt.job == Job.id).where(Job.token == token)
    theirs = or_(table.token == token, table.token.in_(lent))
    used = session.scalar(select(func.sum(table.size)).where(theirs)) or 0
    if used + more > QUOTAS[table]:
        raise UsageError(
            f"{CALLED[table]}: this token keeps {shown(used)} here, at most {shown(QUOTAS[table])} "
            "are allowed; delete some, or ask an admin to"
        )
