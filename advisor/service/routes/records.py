"""Records: looked up, listed, kept, removed."""

from __future__ import annotations

from typing import Annotated, Any

import msgpack
from fastapi import APIRouter, HTTPException, Path, Query, Response
from pydantic import Field, StringConstraints

from advisor.service import records
from advisor.service.access import Here, Reads, Works
from advisor.service.records import Question
from advisor.service.routes.parsing import KEPT, SENDS_BYTES, Body, Strict

_KEY = r"^record/[0-9a-fs./]{1,200}$"

Key = Annotated[str, StringConstraints(pattern=_KEY)]
Named = Annotated[str, Path(pattern=_KEY, description="The key that a store has it by.")]

api = APIRouter(tags=["records"])


class Msgpack(Response):
    media_type = "application/vnd.msgpack"


class Keys(Strict):
    keys: list[Key] = Field(min_length=1, max_length=64)


@api.get("/api/self", summary="What this token may do")
def self_(here: Here, caller: Reads) -> dict[str, Any]:
    with here.database.reading() as session:
        there = records.any_there(session)
    return {
        "name": caller.name,
        "role": caller.role,
        "writes": caller.may("worker"),
        "records": there,
    }


@api.get(
    "/api/lookup",
    summary="The nearest records of those that are looked for, as msgpack",
    response_class=Msgpack,
)
def lookup(here: Here, _caller: Reads, question: Annotated[Question, Query()]) -> Response:
    with here.database.reading() as session:
        found = records.find(session, question)
        here.lookups.count(question, found)
        data = records.data_of(session, records.within(found.sizes, records.MOST_BYTES))
    items = [[key, data.get(key)] for key in found.sizes]
    return Msgpack(msgpack.packb({"items": items}))


@api.get("/api/records", summary="A page of the keys of all records")
def listed(
    here: Here, _caller: Reads, after: Annotated[str, Query(pattern=_KEY + "|^$")] = ""
) -> dict[str, Any]:
    with here.database.reading() as session:
        keys, more = records.listed(session, after)
    return {"keys": keys, "more": more}


@api.post(
    "/api/records",
    summary="The records of some keys, as many as go into one answer, as msgpack",
    response_class=Msgpack,
)
def fetched(here: Here, _caller: Reads, asked: Keys) -> Response:
    with here.database.reading() as session:
        found = records.fetched(session, asked.keys)
    return Msgpack(msgpack.packb({"items": [list(pair) for pair in found.items()]}))


@api.put(
    "/api/records/{key:path}",
    summary="Keep a record",
    openapi_extra=SENDS_BYTES,
    responses=KEPT,
)
def put(
    here: Here,
    caller: Works,
    key: Named,
    data: Body,
    response: Response,
) -> dict[str, str]:
    with here.database.writing() as session:
        outcome = records.put(session, here.reader, key, data, caller)
    response.status_code = 201 if outcome == "added" else 200
    return {"outcome": outcome}


@api.delete("/api/records/{key:path}", summary="Remove what one put there")
def delete(here: Here, caller: Works, key: Named) -> dict[str, bool]:
    with here.database.writing() as session:
        if not records.delete(session, key, caller):
            raise HTTPException(404, "there is nothing under this key")
    return {"deleted": True}
