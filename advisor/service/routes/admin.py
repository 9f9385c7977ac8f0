"""Health, metrics, tokens and the audit log."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import PlainTextResponse

from advisor.jobs.token import Role
from advisor.service import jobs, records, tokens
from advisor.service.access import AdminCaller, ReadCaller, ServiceDep
from advisor.service.routes.parsing import Before, RowNumber, Strict, found

MAX_EVENTS = 200  # lines of the audit log on one page

api = APIRouter(tags=["admin"])


@api.get("/healthz", summary="Whether the server and its threads run")
def healthz(service: ServiceDep) -> dict[str, str]:
    if service.troubles:
        raise HTTPException(503, "; ".join(service.troubles))
    return {"status": "ok"}


@api.get("/readyz", summary="Whether the database answers too")
def readyz(service: ServiceDep) -> dict[str, str]:
    service.database.read(records.count)
    return healthz(service)


@api.get("/metrics", summary="Metrics for Prometheus", response_class=PlainTextResponse)
def metrics(service: ServiceDep, _caller: ReadCaller) -> Response:
    read = service.database.read
    text = service.metrics.text(read(records.count), read(jobs.counts))
    return Response(text, media_type="text/plain; version=0.0.4")


class NewToken(Strict):
    """The arguments of `tokens.make`."""

    name: str
    role: Role
    expires: float | None = None


@api.get("/api/tokens", summary="All tokens, without their text")
def list_tokens(service: ServiceDep, _caller: AdminCaller) -> dict[str, Any]:
    return {"tokens": [dict(one) for one in service.database.read(tokens.listed)]}


@api.post("/api/tokens", summary="A new token", status_code=201)
def make(service: ServiceDep, caller: AdminCaller, new: NewToken) -> dict[str, Any]:
    number, text = service.database.write(tokens.make, new.name, new.role, new.expires, caller)
    return {"id": number, "token": text}


@api.delete("/api/tokens/{number}", summary="Revoke a token")
def revoke(service: ServiceDep, caller: AdminCaller, number: RowNumber) -> dict[str, bool]:
    revoked = service.database.write(jobs.revoke_token, number, caller)
    return {"revoked": found(revoked, "such token")}


@api.get("/api/audit", summary="A page of the audit log, the newest first")
def audit(service: ServiceDep, _caller: AdminCaller, before: Before = None) -> dict[str, Any]:
    page = service.database.read(tokens.events, before, MAX_EVENTS)
    return {"events": [dict(one) for one in page]}
