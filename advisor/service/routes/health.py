"""Whether the server runs, and how it does."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import PlainTextResponse

from advisor.service import jobs, records
from advisor.service.access import Here, Reads

api = APIRouter(tags=["health"])


@api.get("/healthz", summary="Whether the server and its threads run")
def healthz(here: Here) -> dict[str, str]:
    if here.troubles:
        raise HTTPException(503, "; ".join(here.troubles))
    return {"status": "ok"}


@api.get("/readyz", summary="Whether its database answers too")
def readyz(here: Here) -> dict[str, str]:
    here.database.check()
    return healthz(here)


@api.get("/metrics", summary="For Prometheus", response_class=PlainTextResponse)
def metrics(here: Here, _caller: Reads) -> Response:
    with here.database.reading() as session:
        text = here.metrics.text(records.count(session), jobs.counts(session))
    return Response(text, media_type="text/plain; version=0.0.4")
