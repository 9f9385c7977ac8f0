"""Jobs: submitted, listed, cancelled; and the archives of their code."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request, Response
from msgspec.json import schema_components
from sqlalchemy.orm import Session

from advisor.errors import UsageError
from advisor.jobs.code_archive import MAX_PACKED
from advisor.jobs.spec import JobSpec
from advisor.jobs.states import State
from advisor.service import archives, jobs
from advisor.service.access import Here, Reads, Service, Submits, Works
from advisor.service.machines import why_waits
from advisor.service.routes.parsing import KEPT, SENDS_BYTES, Bytes, LargeBody, Number, RecordId
from advisor.service.schema import Job

Digest = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of its bytes.")]

_SPEC = schema_components((JobSpec,))[1]["JobSpec"]
SPEC: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": _SPEC}}}
}
BEFORE: dict[int | str, dict[str, Any]] = {
    200: {"model": dict[str, Any], "description": "It was asked for before."}
}

api = APIRouter(tags=["jobs"])


@api.put(
    "/api/archives/{digest}",
    summary="Keep the code of a job",
    openapi_extra=SENDS_BYTES,
    responses=KEPT,
    max_body_size=MAX_PACKED,
)
def keep(
    here: Here, caller: Submits, digest: Digest, data: LargeBody, response: Response
) -> dict[str, str]:
    with here.database.writing() as session:
        new = archives.keep(session, digest, data, caller)
    response.status_code = 201 if new else 200
    return {"outcome": "added" if new else "known"}


@api.get(
    "/api/archives/{digest}",
    summary="The code of a job, for its own attempts",
    response_class=Bytes,
)
def archive(here: Here, caller: Works, digest: Digest) -> Response:
    with here.database.reading() as session:
        data = archives.data_of(session, digest, caller)
    if data is None:
        raise HTTPException(404, "there is no such archive")
    return Bytes(data)


async def _spec(request: Request) -> JobSpec:
    try:
        plain = json.loads(await request.body())
    except (ValueError, RecursionError) as exc:
        raise UsageError("job: expected JSON") from exc
    if not isinstance(plain, dict):
        raise UsageError("job: expected a map in JSON")
    return JobSpec.of(plain)


@api.post(
    "/api/jobs", summary="Submit a job", status_code=201, openapi_extra=SPEC, responses=BEFORE
)
def submit(
    here: Here, caller: Submits, asked: Annotated[JobSpec, Depends(_spec)], response: Response
) -> dict[str, Any]:
    reason, _known = why_waits(asked.gpu, asked.gpus, list(here.machines.values()))
    return _submitted(here, response, lambda session: jobs.submit(session, asked, caller, reason))


@api.post(
    "/api/measure/{record}",
    summary="Measure a record again, as the job that found it did",
    status_code=201,
    responses=BEFORE,
)
def measure_again(
    here: Here, caller: Submits, record: RecordId, response: Response
) -> dict[str, Any]:
    return _submitted(here, response, lambda session: jobs.measure_again(session, record, caller))


def _submitted(
    here: Service, response: Response, submit: Callable[[Session], tuple[Job, bool]]
) -> dict[str, Any]:
    with here.database.writing() as session:
        job, new = submit(session)
        answer = jobs.answered(session, job, new)
    response.status_code = 201 if new else 200
    return answer


@api.get("/api/jobs", summary="A page of jobs, the newest first")
def listed(
    here: Here,
    _caller: Reads,
    state: Annotated[list[State] | None, Query()] = None,
    before: Annotated[int | None, Query(ge=1, lt=2**31)] = None,
    most: Annotated[int, Query(ge=1, le=jobs.MAX_LISTED)] = 50,
) -> dict[str, Any]:
    with here.database.reading() as session:
        found, more = jobs.listed(session, state or (), before, most)
    return {"jobs": found, "more": more}


def there(found: Any, number: int) -> Any:
    """What was found of a job; raises HTTPException for None."""
    if found is None:
        raise HTTPException(404, f"there is no job {number}")
    return found


@api.get("/api/jobs/{number}", summary="A job with its attempts and trials")
def told(here: Here, _caller: Reads, number: Number) -> dict[str, Any]:
    with here.database.reading() as session:
        found: dict[str, Any] = there(jobs.details(session, number), number)
    return found


@api.get("/api/jobs/{number}/log", summary="What a job printed, behind a place")
def log(
    here: Here,
    _caller: Reads,
    number: Number,
    after: Annotated[int, Query(ge=0, lt=2**63)] = 0,
) -> dict[str, Any]:
    with here.database.reading() as session:
        found = there(jobs.log(session, number, after), number)
    return {"text": found.text, "next": found.next, "ended": found.ended}


@api.post("/api/jobs/{number}/cancel", summary="Cancel one's own job")
def cancel(here: Here, caller: Submits, number: Number) -> dict[str, str]:
    with here.database.writing() as session:
        return {"state": there(jobs.cancel(session, number, caller), number)}
