"""Tokens and the audit log."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query

from advisor.service import jobs, tokens
from advisor.service.access import Administers, Here
from advisor.service.roles import Role
from advisor.service.routes.parsing import Number, Strict

EVENTS = 200
"""Lines of the audit log on one page."""

api = APIRouter(tags=["admin"])


class NewToken(Strict):
    """See `tokens.make`."""

    name: str
    role: Role
    expires: float | None = None


@api.get("/api/tokens", summary="All tokens, without their text")
def tokens_(here: Here, _caller: Administers) -> dict[str, Any]:
    with here.database.reading() as session:
        return {"tokens": [dict(one) for one in tokens.listed(session)]}


@api.post("/api/tokens", summary="A new token", status_code=201)
def make(here: Here, caller: Administers, asked: NewToken) -> dict[str, Any]:
    with here.database.writing() as session:
        token, text = tokens.make(session, asked.name, asked.role, asked.expires, caller)
        return {"id": token.id, "token": text}


@api.delete("/api/tokens/{number}", summary="Revoke a token")
def revoke(here: Here, caller: Administers, number: Number) -> dict[str, bool]:
    with here.database.writing() as session:
        if not jobs.revoke_token(session, number, caller):
            raise HTTPException(404, "there is no such token")
    return {"revoked": True}


@api.get("/api/audit", summary="A page of the audit log, the newest first")
def audit(
    here: Here, _caller: Administers, before: Annotated[int | None, Query(ge=1, lt=2**31)] = None
) -> dict[str, Any]:
    with here.database.reading() as session:
        return {"events": [dict(one) for one in tokens.events(session, before, EVENTS)]}
