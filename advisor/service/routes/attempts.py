"""A worker's requests. The first one gets the attempt's own token, which the others need."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Request, Response
from pydantic import AfterValidator, Field

from advisor.cache.domain import line
from advisor.jobs.spec import MAX_REPORTED_TRIALS, MAX_STUDY, AttemptOver
from advisor.service import attempts
from advisor.service.access import OwnAttempt, ServiceDep, StartingAttempt, WorkCaller
from advisor.service.attempts import End
from advisor.service.routes.parsing import SENDS_BYTES, Binary, LargeBody, Strict, found

OneLine = Annotated[str, Field(max_length=2**16), AfterValidator(line)]
Speed = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
_OWN = "SHA-256 of a token that the worker has made."
OwnDigest = Annotated[str, Body(embed=True, pattern=r"^[0-9a-f]{64}$", description=_OWN)]
StudyKey = Annotated[str, Path(pattern=r"^[0-9A-Za-z@_.-]{1,128}$")]

api = APIRouter(tags=["attempts"], prefix="/api/attempt")


class TrialReport(Strict):
    """`what`: the config, for people; `batch`: None if unknown; `ratio`: to the baseline, 0 if
    unknown; `outcome`: '' if it ran, else why it failed."""

    number: int = Field(ge=0, lt=2**31)
    what: OneLine = ""
    batch: int | None = Field(default=None, ge=1, lt=2**63)
    samples_per_s: Speed = 0.0
    ratio: Speed = 0.0
    outcome: OneLine = ""
    origin: OneLine = ""


class Heartbeat(Strict):
    trials: list[TrialReport] = Field(default=[], max_length=MAX_REPORTED_TRIALS)
    log: str = ""
    device: OneLine = ""


class Ending(Strict):
    """`record`: the id of the new record, such as ae1bff61eea5@64; '' for none."""

    state: End
    reason: OneLine = ""
    record: str = Field(default="", pattern=r"^[0-9a-f]{12}@[1-9][0-9]{0,9}$|^$")


@api.post(
    "/begin",
    summary="Exchange the start token, which works once, for the worker's own; answers what to do",
)
def begin(
    request: Request, service: ServiceDep, attempt: StartingAttempt, digest: OwnDigest
) -> dict[str, Any]:
    own, address = bytes.fromhex(digest), service.address(request)
    instructions = service.database.write(attempts.begin, attempt.id, own, address)
    if instructions is None:
        raise AttemptOver("this start token was used before: another worker has this attempt")
    return instructions


@api.post("/beat", summary="Send a heartbeat; answers whether to continue")
def beat(service: ServiceDep, attempt: OwnAttempt, report: Heartbeat) -> dict[str, bool]:
    return {"go_on": service.database.write(attempts.beat, attempt.id, **report.model_dump())}


@api.get("/studies/{name}", summary="A file of the job's search", response_class=Binary)
def study(service: ServiceDep, attempt: OwnAttempt, name: StudyKey) -> Response:
    return Binary(found(service.database.read(attempts.study, attempt, name)))


@api.put(
    "/studies/{name}",
    summary="Store a file of the job's search",
    openapi_extra=SENDS_BYTES,
    max_body_size=MAX_STUDY,
)
def keep_study(
    service: ServiceDep, attempt: OwnAttempt, name: StudyKey, data: LargeBody
) -> dict[str, bool]:
    service.database.write(attempts.keep_study, attempt.id, name, data)
    return {"kept": True}


@api.post("/end", summary="Report how an attempt ended")
def end(
    service: ServiceDep, caller: WorkCaller, attempt: OwnAttempt, ending: Ending
) -> dict[str, str]:
    service.database.write(attempts.end, attempt.id, by=caller, **ending.model_dump())
    return {"state": ending.state}
