"""Tokens with their roles and expiry, browser sessions, and the audit log."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, RowMapping, delete, func, select, update
from sqlalchemy.orm import Session

from advisor.errors import UsageError
from advisor.jobs.token import ROLES, digest, made
from advisor.service.database import DAY_S
from advisor.service.schema import Attempt, Event, JobRow, Token
from advisor.service.schema import Session as Browser

SESSION_S = 12 * 3600.0
AUDIT_KEPT_S = 400 * DAY_S
ATTEMPT_S = DAY_S  # an attempt's token is valid for twice the job's budget, plus this time
TOKEN_NAME = r"^[\w.@+-][\w .@+-]{0,63}$"
NEVER = 1e11  # Unix seconds at which every token has expired


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: number, name and role of the token, and the client's address. If it was
    an `attempt`: the token that submitted the job, and the attempt's name."""

    token: int
    name: str
    role: str
    address: str = ""
    attempt: Attempt | None = None

    def may(self, role: str) -> bool:
        return ROLES.index(self.role) >= ROLES.index(role)

    def check(self, role: str) -> None:
        """Raise PermissionError if the token's role is below this one."""
        if not self.may(role):
            raise PermissionError(f"this needs role {role!r}; this token has role {self.role!r}")

    def owns(self, token: int) -> bool:
        """Whether the caller may remove data of `token`: it is their own, or they are an admin. An
        attempt removes nothing."""
        return (token == self.token and self.attempt is None) or self.may("admin")

    def check_owns(self, token: int) -> None:
        """Raise PermissionError if the caller may not remove what `token` stored."""
        if not self.owns(token):
            raise PermissionError("another token stored it; an admin may remove it")


def make(
    session: Session, name: str, role: str, expires: float | None, by: Caller | None
) -> tuple[int, str]:
    """Make a token. Returns its number and its text, which is not stored. Raises UsageError if an
    argument is invalid.

    Args:
        expires: in Unix seconds; None for never.
        by: the admin; None for `advisor token` and the first start of a server.
    """
    if role not in ROLES:
        raise UsageError(f"role {role[:40]!r}: expected one of {', '.join(ROLES)}")
    if not re.fullmatch(TOKEN_NAME, name):
        raise UsageError("name: expected 1 to 64 letters, digits, blanks and any of . _ @ + -")
    if expires is not None and not time.time() < expires < NEVER:
        raise UsageError("expires: expected a future time in Unix seconds")
    text = made()
    token = Token(digest=digest(text), name=name, role=role, created=time.time(), expires=expires)
    session.add(token)
    session.flush()
    note(session, by, "token made", f"{token.id} {name} ({role})")
    return token.id, text


def find(session: Session, text: str, address: str) -> Caller | None:
    """The caller with this token, which may be an attempt's. None if the token is unknown, expired
    or revoked, or the attempt is over."""
    if found := _caller(session, Token.digest == digest(text), address):
        return found
    runs = (Attempt.digest == digest(text), Attempt.state == "running", Token.revoked.is_(None))
    lasts = Attempt.started + 2 * JobRow.budget_s + ATTEMPT_S > time.time()
    query = select(Attempt, Token.id).join(JobRow, Attempt.job == JobRow.id).join(Token)
    row = session.execute(query.where(*runs, lasts)).first()
    return Caller(row[1], row[0].external, "worker", address, row[0]) if row else None


def logged_in(session: Session, cookie: str, address: str) -> Caller | None:
    """The caller of a browser session; None if the session or its token is no longer valid."""
    open_now = (Browser.digest == digest(cookie), Browser.expires > time.time())
    return _caller(session, Token.id.in_(select(Browser.token).where(*open_now)), address)


def _caller(session: Session, which: ColumnElement[bool], address: str) -> Caller | None:
    valid = (Token.revoked.is_(None), func.coalesce(Token.expires, NEVER) > time.time())
    found = session.scalar(select(Token).where(which, *valid))
    return Caller(found.id, found.name, found.role, address) if found else None


def note_uses(session: Session, used: Mapping[int, float]) -> None:
    """Note when tokens, by their numbers, were last used."""
    for token, at in sorted(used.items()):  # other servers note the same tokens
        session.execute(update(Token).where(Token.id == token).values(used=at))


def listed(session: Session) -> Sequence[RowMapping]:
    """All tokens without their digests, the newest first."""
    shown = (Token.id, Token.name, Token.role, Token.created, Token.expires, Token.revoked)
    query = select(*shown, Token.used).order_by(Token.id.desc())
    return session.execute(query).mappings().all()


def log_in(session: Session, caller: Caller) -> str:
    """Start a browser session. Returns the value of its cookie."""
    text = secrets.token_urlsafe(32)
    ends = time.time() + SESSION_S
    session.add(Browser(digest=digest(text), token=caller.token, expires=ends))
    note(session, caller, "logged in", "")
    return text


def log_out(session: Session, cookie: str) -> None:
    session.execute(delete(Browser).where(Browser.digest == digest(cookie)))


def tidy(session: Session) -> None:
    """Remove expired sessions, and old lines of the audit log."""
    session.execute(delete(Browser).where(Browser.expires < time.time()))
    session.execute(delete(Event).where(Event.at < time.time() - AUDIT_KEPT_S))


def note(session: Session, by: Caller | None, action: str, subject: str) -> None:
    """Add a line to the audit log, in the same transaction as the action."""
    name, address = (by.name, by.address) if by else (None, "")
    line = {"by": name, "action": action, "subject": subject[:300], "address": address}
    session.add(Event(at=time.time(), **line))


def events(session: Session, before: int | None, most: int) -> Sequence[RowMapping]:
    """Lines of the audit log with ids below `before`, newest first."""
    query = select(*Event.__table__.columns)
    if before is not None:
        query = query.where(Event.id < before)
    return session.execute(query.order_by(Event.id.desc()).limit(most)).mappings().all()
