"""Tokens: who may do what, for how long; and the log of who did what."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete, exists, select
from sqlalchemy.orm import Session

from advisor.errors import UsageError
from advisor.jobs.token import PREFIX, digest, made
from advisor.service import schema
from advisor.service.roles import ROLES

SESSION_S = 12 * 3600.0
AUDIT_KEPT_S = 400 * 86_400.0
_USE_NOTED_S = 60.0
NAME = r"^[\w.@+-][\w .@+-]{0,63}$"
NEVER = 1e11
"""Unix seconds that no token outlives."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: number, name and role of the token, and the address. `unseen`: the last
    noted use is long ago."""

    token: int
    name: str
    role: str
    address: str = ""
    unseen: bool = False

    def may(self, role: str) -> bool:
        return ROLES.index(self.role) >= ROLES.index(role)

    def owns(self, token: int) -> bool:
        """Whether they may remove what a token stored: it is their own, or they are an admin."""
        return token == self.token or self.may("admin")


def make(
    session: Session, name: str, role: str, expires: float | None, by: Caller | None
) -> tuple[schema.Token, str]:
    """A new token and its text, which is not stored.

    Args:
        expires: in Unix seconds; None for never.
        by: None if it is made with the database at hand.

    Raises:
        UsageError: the name or the role is invalid.
    """
    if role not in ROLES:
        raise UsageError(f"role {role[:40]!r}: expected one of {', '.join(ROLES)}")
    if not re.fullmatch(NAME, name):
        raise UsageError("name: expected 1 to 64 letters, digits, blanks and any of . _ @ + -")
    if expires is not None and not time.time() < expires < NEVER:
        raise UsageError("expires: expected a time to come, in Unix seconds")
    token, text = _add(session, name, role, expires)
    note(session, by, "token made", f"{token.id} {name} ({role})")
    return token, text


def lend(session: Session, name: str, expires: float) -> schema.Token:
    """A worker's token for one attempt, which nobody can use before `given`."""
    return _add(session, name, "worker", expires)[0]


def given(session: Session, token: schema.Token, own: bytes) -> None:
    """Give a lent token the digest of what its worker has made.

    Raises:
        UsageError: that one is another's.
    """
    if session.scalar(select(schema.Token.id).where(schema.Token.digest == own)) is not None:
        raise UsageError("token: is in use; make a new one")
    token.digest = own


def _add(session: Session, name: str, role: str, expires: float | None) -> tuple[schema.Token, str]:
    text = made()
    token = schema.Token(
        digest=digest(text), name=name, role=role, created=time.time(), expires=expires
    )
    session.add(token)
    session.flush()
    return token, text


def find(session: Session, text: str, address: str) -> Caller | None:
    """The caller of a token; None if it is unknown, expired or revoked."""
    if not text.startswith(PREFIX):
        return None
    query = select(schema.Token).where(schema.Token.digest == digest(text))
    return _caller(session.scalar(query), address)


def note_use(session: Session, caller: Caller) -> None:
    if token := session.get(schema.Token, caller.token):
        token.used = time.time()


def listed(session: Session) -> Sequence[schema.Token]:
    """All but those that were lent to attempts, the newest first."""
    lent = exists().where(schema.Attempt.token == schema.Token.id)
    query = select(schema.Token).where(~lent)
    return session.scalars(query.order_by(schema.Token.id.desc())).all()


def log_in(session: Session, caller: Caller) -> str:
    """A browser's session; what its cookie holds."""
    text = secrets.token_urlsafe(32)
    ends = time.time() + SESSION_S
    session.add(schema.Session(digest=digest(text), token=caller.token, expires=ends))
    note(session, caller, "logged in", "")
    return text


def logged_in(session: Session, cookie: str, address: str) -> Caller | None:
    """The caller of a session; None if the session or its token is no longer valid."""
    there = session.get(schema.Session, digest(cookie))
    if there is None or there.expires < time.time():
        return None
    return _caller(session.get(schema.Token, there.token), address)


def log_out(session: Session, cookie: str) -> None:
    if there := session.get(schema.Session, digest(cookie)):
        session.delete(there)


def tidy(session: Session) -> None:
    """Remove sessions that are over, and old lines of the audit log."""
    session.execute(delete(schema.Session).where(schema.Session.expires < time.time()))
    session.execute(delete(schema.Event).where(schema.Event.at < time.time() - AUDIT_KEPT_S))


def form_key(cookie: str) -> str:
    """The hidden key of this session's forms; no other site knows it."""
    return hashlib.sha256(b"advisor form\n" + cookie.encode()).hexdigest()


def note(session: Session, by: Caller | None, action: str, subject: str) -> None:
    """Add a line to the audit log, in the transaction of what it reports."""
    session.add(
        schema.Event(
            at=time.time(),
            token=by.token if by else None,
            action=action,
            subject=subject[:300],
            address=by.address if by else "",
        )
    )


def events(
    session: Session, before: int | None, most: int
) -> Sequence[tuple[schema.Event, str | None]]:
    """Lines of the audit log below a number, newest first, with the names of the tokens."""
    query = (
        select(schema.Event, schema.Token.name)
        .join(schema.Token, schema.Event.token == schema.Token.id, isouter=True)
        .order_by(schema.Event.id.desc())
        .limit(most)
    )
    if before is not None:
        query = query.where(schema.Event.id < before)
    return [(event, name) for event, name in session.execute(query)]


def _caller(token: schema.Token | None, address: str) -> Caller | None:
    now = time.time()
    if token is None or token.revoked is not None:
        return None
    if token.expires is not None and token.expires <= now:
        return None
    unseen = token.used is None or token.used < now - _USE_NOTED_S
    return Caller(token.id, token.name, token.role, address, unseen)
