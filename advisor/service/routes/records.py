"""Routes that look up, list, store and remove records and artifacts (compiled code)."""

from __future__ import annotations

from typing import Annotated, Any

import msgpack
from fastapi import APIRouter, HTTPException, Path, Query, Response
from pydantic import Field, StringConstraints

from advisor.cache.artifacts import LABEL
from advisor.cache.codec import MAX_BYTES
from advisor.cache.settings import MAX_ARTIFACTS
from advisor.service import blobs, records
from advisor.service.access import ReadCaller, ServiceDep, WorkCaller, needs
from advisor.service.records import Question
from advisor.service.routes.parsing import Binary, Body, LargeBody, Strict, found, kept, takes_bytes
from advisor.service.schema import ArtifactsRow, Item

_KEY = r"^record/[0-9a-fs./]{1,200}$"

RecordKey = Annotated[str, StringConstraints(pattern=_KEY)]
Named = Annotated[str, Path(pattern=_KEY, description="The record's key in a store.")]
Artifact = Annotated[str, Path(pattern=f"^{LABEL}$", description="The artifacts' name.")]

api = APIRouter(tags=["records"], dependencies=[needs("read")])


class Msgpack(Response):
    media_type = "application/vnd.msgpack"


class Keys(Strict):
    keys: list[RecordKey] = Field(min_length=1, max_length=64)


@api.get("/api/self", summary="What this token may do")
def whoami(caller: ReadCaller) -> dict[str, Any]:
    return {"name": caller.name, "role": caller.role, "writes": caller.may("worker")}


@api.get(
    "/api/lookup",
    summary="The nearest records for a lookup, as msgpack",
    response_class=Msgpack,
)
def lookup(service: ServiceDep, question: Annotated[Question, Query()]) -> Response:
    with service.database.reading() as session:
        near = records.find(session, question)
        data = records.data_of(session, records.within(near.sizes, records.MAX_ANSWER_BYTES))
    service.lookups.count(question, near)
    return Msgpack(msgpack.packb({"items": [[key, data.get(key)] for key in near.sizes]}))


@api.get("/api/records", summary="A page of the keys of all records")
def listed(
    service: ServiceDep, after: Annotated[str, Query(pattern=_KEY + "|^$")] = ""
) -> dict[str, Any]:
    sizes, more = service.database.read(blobs.listed, Item, after)
    return {"keys": list(sizes), "more": more}


@api.post(
    "/api/records",
    summary="The records of some keys, as many as go into one answer, as msgpack",
    response_class=Msgpack,
)
def fetched(service: ServiceDep, asked: Keys) -> Response:
    data = service.database.read(records.fetched, asked.keys)
    return Msgpack(msgpack.packb({"items": [list(pair) for pair in data.items()]}))


@api.put("/api/records/{key:path}", summary="Store a record", **takes_bytes(MAX_BYTES))
def put(
    service: ServiceDep, caller: WorkCaller, key: Named, data: Body, response: Response
) -> dict[str, str]:
    outcome = service.database.write(records.put, service.reader, key, data, caller)
    return kept(response, outcome)


@api.delete("/api/records/{key:path}", summary="Remove your own record")
def delete(service: ServiceDep, caller: WorkCaller, key: Named) -> dict[str, bool]:
    return {"deleted": found(service.database.write(blobs.remove, Item, key, caller))}


@api.get("/api/artifacts", summary="A page of all artifacts' sizes, by name")
def artifact_sizes(
    service: ServiceDep,
    after: Annotated[str, Query(pattern=f"^{LABEL}$|^$")] = "",
    start: Annotated[str, Query(pattern=r"^[0-9a-f.-]{0,80}$")] = "",
) -> dict[str, Any]:
    page, more = service.database.read(blobs.listed, ArtifactsRow, after, start)
    return {"sizes": page, "more": more}


@api.get(
    "/api/artifacts/{label}",
    summary="The compiled code for a config of a record",
    response_class=Binary,
)
def artifacts(service: ServiceDep, label: Artifact) -> Response:
    return Binary(found(service.database.read(blobs.artifacts, label)))


@api.put("/api/artifacts/{label}", summary="Store compiled code", **takes_bytes(MAX_ARTIFACTS))
def put_artifacts(
    service: ServiceDep, caller: WorkCaller, label: Artifact, data: LargeBody, response: Response
) -> dict[str, str]:
    if not data:
        raise HTTPException(400, "the body is empty: send the artifacts in it")
    new = service.database.write(blobs.keep_artifacts, label, data, caller)
    return kept(response, "added" if new else "replaced")


@api.delete("/api/artifacts/{label}", summary="Remove your own artifacts")
def delete_artifacts(service: ServiceDep, caller: WorkCaller, label: Artifact) -> dict[str, bool]:
    return {"deleted": found(service.database.write(blobs.remove, ArtifactsRow, label, caller))}
