"""What was compiled for records: listed, fetched, kept, removed."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Query, Response

from advisor.cache.artifacts import LABEL
from advisor.cache.settings import MAX_ARTIFACTS
from advisor.service import artifacts
from advisor.service.access import Here, Reads, Works
from advisor.service.routes.parsing import KEPT, SENDS_BYTES, Bytes, LargeBody

_LABEL = f"^{LABEL}$"
_NONE = "there are no such artifacts"

Named = Annotated[str, Path(pattern=_LABEL, description="What they are for.")]

api = APIRouter(tags=["artifacts"], prefix="/api/artifacts")


@api.get("", summary="A page of the sizes of all, by their names")
def sizes(
    here: Here,
    _caller: Reads,
    after: Annotated[str, Query(pattern=_LABEL + "|^$")] = "",
    start: Annotated[str, Query(pattern=r"^[0-9a-f.-]{0,80}$")] = "",
) -> dict[str, Any]:
    with here.database.reading() as session:
        found, more = artifacts.sizes(session, after, start)
    return {"sizes": found, "more": more}


@api.get("/{label}", summary="What was compiled for a config of a record", response_class=Bytes)
def fetched(here: Here, _caller: Reads, label: Named) -> Response:
    with here.database.reading() as session:
        data = artifacts.data_of(session, label)
    if data is None:
        raise HTTPException(404, _NONE)
    return Bytes(data)


@api.put(
    "/{label}",
    summary="Keep what was compiled",
    openapi_extra=SENDS_BYTES,
    responses=KEPT,
    max_body_size=MAX_ARTIFACTS,
)
def put(
    here: Here, caller: Works, label: Named, data: LargeBody, response: Response
) -> dict[str, str]:
    if not data:
        raise HTTPException(400, "the body is empty: what was compiled is sent in it")
    with here.database.writing() as session:
        new = artifacts.put(session, label, data, caller)
    response.status_code = 201 if new else 200
    return {"outcome": "added" if new else "replaced"}


@api.delete("/{label}", summary="Remove what one put there")
def delete(here: Here, caller: Works, label: Named) -> dict[str, bool]:
    with here.database.writing() as session:
        if not artifacts.delete(session, label, caller):
            raise HTTPException(404, _NONE)
    return {"deleted": True}
