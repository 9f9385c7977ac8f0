"""Jobs: submitted, listed, cancelled; and the archives of their code."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from msgspec.json import schema_components
from sqlalchemy.orm import Session

from advisor.jobs.code_archive import MAX_PACKED
from advisor.jobs.spec import JobSpec, State
from advisor.service import blobs, jobs
from advisor.service.access import ReadCaller, ServiceDep, SubmitCaller, WorkCaller
from advisor.service.executors import why_waits
from advisor.service.routes.parsing import (
    Before,
    Binary,
    LargeBody,
    RecordId,
    RowNumber,
    found,
    kept,
    takes_bytes,
)
from advisor.service.schema import JobRow

Digest = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of its bytes.")]

_SPEC = schema_components((JobSpec,))[1]["JobSpec"]
_SENDS_SPEC = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": _SPEC}}}
}
_QUEUES: dict[str, Any] = {
    "status_code": 201,
    "responses": {200: {"model": dict[str, Any], "description": "The same job exists."}},
}

api = APIRouter(tags=["jobs"])


@api.put("/api/archives/{digest}", summary="Store the code of a job", **takes_bytes(MAX_PACKED))
def keep(
    service: ServiceDep, caller: SubmitCaller, digest: Digest, data: LargeBody, response: Response
) -> dict[str, str]:
    new = service.database.write(blobs.keep_archive, digest, data, caller)
    return kept(response, "added" if new else "known")


@api.get(
    "/api/archives/{digest}",
    summary="The code of a job, for its own attempts",
    response_class=Binary,
)
def archive(service: ServiceDep, caller: WorkCaller, digest: Digest) -> Response:
    return Binary(found(service.database.read(blobs.archive, digest, caller)))


@api.post("/api/jobs", summary="Submit a job", openapi_extra=_SENDS_SPEC, **_QUEUES)
def submit(
    service: ServiceDep, caller: SubmitCaller, job: dict[str, Any], response: Response
) -> dict[str, Any]:
    asked = JobSpec.of(job)
    reason, _known = why_waits(asked.gpu, asked.gpus, list(service.machines.values()))
    with service.database.writing() as session:
        return _queued(session, response, *jobs.submit(session, asked, caller, reason))


@api.post("/api/measure/{record}", summary="Measure a record again, with its job", **_QUEUES)
def measure_again(
    service: ServiceDep, caller: SubmitCaller, record: RecordId, response: Response
) -> dict[str, Any]:
    with service.database.writing() as session:
        return _queued(session, response, *jobs.measure_again(session, record, caller))


def _queued(session: Session, response: Response, job: JobRow, new: bool) -> dict[str, Any]:
    response.status_code = 201 if new else 200
    return jobs.answered(session, job, new)


@api.get("/api/jobs", summary="A page of jobs, the newest first")
def listed(
    service: ServiceDep,
    _caller: ReadCaller,
    state: Annotated[list[State] | None, Query()] = None,
    before: Before = None,
    most: Annotated[int, Query(ge=1, le=jobs.MAX_JOBS)] = 50,
) -> dict[str, Any]:
    page, more = service.database.read(jobs.listed, state or (), before, most)
    return {"jobs": page, "more": more}


@api.get("/api/jobs/{number}", summary="A job with its attempts and trials")
def details(service: ServiceDep, _caller: ReadCaller, number: RowNumber) -> dict[str, Any]:
    return found(service.database.read(jobs.details, number), f"job {number}")


@api.get("/api/jobs/{number}/log", summary="A job's log, after a row")
def log(
    service: ServiceDep,
    _caller: ReadCaller,
    number: RowNumber,
    after: Annotated[int, Query(ge=0, lt=2**63)] = 0,
) -> dict[str, Any]:
    return found(service.database.read(jobs.log, number, after), f"job {number}")


@api.post("/api/jobs/{number}/cancel", summary="Cancel your own job")
def cancel(service: ServiceDep, caller: SubmitCaller, number: RowNumber) -> dict[str, str]:
    return {"state": found(service.database.write(jobs.cancel, number, caller), f"job {number}")}
