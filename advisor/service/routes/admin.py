"""Health, metrics, tokens and the audit log."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import PlainTextResponse
from sqlalchemy import select

from advisor.service import jobs, records, tokens
from advisor.service.access import AdminCaller, ReadCaller, Reading, ServiceDep
from advisor.service.roles import Role
from advisor.service.routes.parsing import Before, Number, Strict, found
from advisor.service.schema import Token

MAX_EVENTS = 200
"""Lines of the audit log on one page."""

api = APIRouter(tags=["admin"])


@api.get("/healthz", summary="Whether the server and its threads run")
def healthz(service: ServiceDep) -> dict[str, str]:
    if service.troubles:
        raise HTTPException(503, "; ".join(service.troubles))
    return {"status": "ok"}


@api.get("/readyz", summary="Whether the database answers too")
def readyz(service: ServiceDep, session: Reading) -> dict[str, str]:
    session.execute(select(Token.id).limit(1))
    return healthz(service)


@api.get("/metrics", summary="Metrics for Prometheus", response_class=PlainTextResponse)
def metrics(service: ServiceDep, _caller: ReadCaller, session: Reading) -> Response:
    text = service.metrics.text(records.count(session), jobs.counts(session))
    return Response(text, media_type="text/plain; version=0.0.4")


class NewToken(Strict):
    """The arguments of `tokens.make`."""

    name: str
    role: Role
    expires: float | None = None


@api.get("/api/tokens", summary="All tokens, without their text")
def list_tokens(_caller: AdminCaller, session: Reading) -> dict[str, Any]:
    return {"tokens": [dict(one) for one in tokens.listed(session)]}


@api.post("/api/tokens", summary="A new token", status_code=201)
def make(service: ServiceDep, caller: AdminCaller, new: NewToken) -> dict[str, Any]:
    with service.database.writing() as session:
        token, text = tokens.make(session, new.name, new.role, new.expires, caller)
        return {"id": token.id, "token": text}


@api.delete("/api/tokens/{number}", summary="Revoke a token")
def revoke(service: ServiceDep, caller: AdminCaller, number: Number) -> dict[str, bool]:
    with service.database.writing() as session:
        return {"revoked": found(jobs.revoke_token(session, number, caller), "such token")}


@api.get("/api/audit", summary="A page of the audit log, the newest first")
def audit(_caller: AdminCaller, session: Reading, before: Before = None) -> dict[str, Any]:
    return {"events": [dict(one) for one in tokens.events(session, before, MAX_EVENTS)]}
