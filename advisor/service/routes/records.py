"""Records and marks: looked up, listed, kept, removed."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgpack
from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request, Response
from pydantic import Field, StringConstraints

from advisor.cache.domain import LONGEST, is_line
from advisor.cache.key import are_whole, as_fields, completed
from advisor.service import records
from advisor.service.access import Here, Reads, Works
from advisor.service.records import Question
from advisor.service.routes.parsing import (
    KEPT,
    SENDS_BYTES,
    Body,
    Strict,
    answers,
    deleted,
    refusals,
)

MSGPACK = "application/vnd.msgpack"
_KEY = r"^(record|mark)/[0-9a-fs./]{1,200}$"

Key = Annotated[str, StringConstraints(pattern=_KEY)]
Named = Annotated[str, Path(pattern=_KEY, description="The key that a store has it by.")]
Part = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12}$|^$")]
Batch = Annotated[int | None, Field(ge=0, lt=10**10)]
Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12}$")]

api = APIRouter(tags=["records"])


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


class Looked(Strict):
    """What a lookup is narrowed and ordered by; see `cache.reader.RecordFilter.questions`."""

    model: str = Field("", pattern=r"^[0-9a-f]{12,128}$|^$")
    target: Part = ""
    origins: list[Hex] | None = Field(None, max_length=1000)
    file: str = Field("", max_length=LONGEST)
    command: Part = ""
    id: str = Field("", pattern=r"^[0-9a-f]{0,12}$")
    batch: Batch = None
    code: str = Field("", pattern=r"^[0-9a-f]{0,128}$")
    origin: Part = ""
    family: str | None = Field(None, pattern=r"^[0-9a-f]{0,128}$")
    near: Batch = None
    wanted: str = Field("{}", max_length=2**15, description="A key's fields, as JSON")


async def _question(asked: Annotated[Looked, Query()]) -> Question:
    try:
        stated = json.loads(asked.wanted)
    except (ValueError, RecursionError):
        stated = None
    if not isinstance(stated, dict):
        raise HTTPException(422, "wanted: expected a map in JSON")
    wanted = as_fields(stated)
    if asked.family is not None:
        wanted = completed(wanted)
    device = wanted.get("device.name", "")
    if not all(isinstance(text, str) and is_line(text) for text in (asked.file, device)):
        raise HTTPException(422, "file, device.name: expected a line of printable text")
    if asked.family is not None and not are_whole(wanted):
        raise HTTPException(422, "wanted: expected all fields of a key, to tell its kin")
    question = Question(**asked.model_dump(exclude={"wanted"}), wanted=wanted)
    if wanted and not question.narrows:
        raise HTTPException(422, "expected what narrows: a model, target, file, command or id")
    return question


@api.get(
    "/api/lookup",
    summary="The nearest records of those that are looked for, as msgpack",
    response_class=Response,
    responses=answers(MSGPACK) | {304: {"description": "As If-None-Match has it."}},
)
def lookup(
    here: Here, _caller: Reads, question: Annotated[Question, Depends(_question)], request: Request
) -> Response:
    with here.database.reading() as session:
        found = records.look(session, question)
        here.lookups.count(question, found)
        headers = {"ETag": found.etag, "Cache-Control": "private, no-cache"}
        if request.headers.get("if-none-match", "").removeprefix("W/") == found.etag:
            return Response(status_code=304, headers=headers)
        data = records.data_of(session, found.sent)
    items = [[key, data.get(key)] for key in found.sizes]
    return Response(msgpack.packb({"items": items}), media_type=MSGPACK, headers=headers)


@api.get("/api/records", summary="A page of the keys of all records and marks")
def listed(
    here: Here, _caller: Reads, after: Annotated[str, Query(pattern=_KEY + "|^$")] = ""
) -> dict[str, Any]:
    with here.database.reading() as session:
        keys, more = records.listed(session, after)
    return {"keys": keys, "more": more}


@api.post(
    "/api/records",
    summary="The records of some keys, as many as go into one answer, as msgpack",
    response_class=Response,
    responses=answers(MSGPACK),
)
def fetched(here: Here, _caller: Reads, asked: Keys) -> Response:
    with here.database.reading() as session:
        found = records.fetched(session, asked.keys)
    items = [list(pair) for pair in found.items()]
    return Response(msgpack.packb({"items": items}), media_type=MSGPACK)


@api.put(
    "/api/records/{key:path}",
    summary="Keep a record or a mark",
    openapi_extra=SENDS_BYTES,
    responses=KEPT | refusals(404),
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


@api.delete("/api/records/{key:path}", summary="Remove what one put there", responses=refusals(404))
def delete(here: Here, caller: Works, key: Named) -> dict[str, bool]:
    with here.database.writing() as session:
        gone = records.delete(session, key, caller)
    return deleted(gone, "there is nothing under this key")
