"""What a worker asks and says, with its attempt's own token; first of all it gets that."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Request, Response
from pydantic import AfterValidator, Field

from advisor.cache.domain import line
from advisor.jobs.bounds import MAX_STUDY, MAX_TRIALS
from advisor.service import attempts
from advisor.service.access import Here, Own, Starts, Works
from advisor.service.attempts import End
from advisor.service.routes.parsing import SENDS_BYTES, Bytes, LargeBody, Strict

OVER = "this attempt is over"
TAKEN = "this start token was exchanged before; another has this attempt"

OneLine = Annotated[str, Field(max_length=2**16), AfterValidator(line)]
Speed = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Name = Annotated[str, Path(pattern=r"^[0-9A-Za-z@_.-]{1,128}$")]

api = APIRouter(tags=["attempts"], prefix="/api/attempt")


class Exchanged(Strict):
    """`digest`: the SHA-256 of a token that the worker has made."""

    digest: str = Field(pattern=r"^[0-9a-f]{64}$")


class Tried(Strict):
    """A trial: `what`: the config, for people; `batch`: None where it is not known; `ratio`: to the
    baseline, 0 where it is not known; `outcome`: '' where it ran, else why it failed."""

    number: int = Field(ge=0, lt=2**31)
    what: OneLine = ""
    batch: int | None = Field(default=None, ge=1, lt=2**63)
    samples_per_s: Speed = 0.0
    ratio: Speed = 0.0
    outcome: OneLine = ""
    origin: OneLine = ""


class Said(Strict):
    trials: list[Tried] = Field(default=[], max_length=MAX_TRIALS)
    log: str = ""
    device: OneLine = ""


class Last(Strict):
    """`record`: the id of what was found, as ae1bff61eea5@64; '' for none."""

    state: End
    reason: OneLine = ""
    record: str = Field(default="", pattern=r"^[0-9a-f]{12}@[1-9][0-9]{0,9}$|^$")


@api.post("/begin", summary="Exchange a start token, which is good once, for the attempt's own")
def begin(request: Request, here: Here, attempt: Starts, own: Exchanged) -> dict[str, int]:
    digest = bytes.fromhex(own.digest)
    with here.database.writing() as session:
        became = attempts.begin(session, attempt.id, digest, here.address(request))
    if became != "begun":
        raise HTTPException(409, OVER if became == "over" else TAKEN)
    return {"number": attempt.number}


@api.get("", summary="What an attempt is to do")
def told(here: Here, attempt: Own) -> dict[str, Any]:
    with here.database.reading() as session:
        return attempts.instructions(session, attempt)


@api.post("/beat", summary="An attempt is alive; whether it is to go on")
def beat(here: Here, attempt: Own, said: Said) -> dict[str, bool]:
    with here.database.writing() as session:
        return {"go_on": attempts.beat(session, attempt.id, **said.model_dump())}


@api.get("/studies/{name}", summary="A file of the job's search", response_class=Bytes)
def study(here: Here, attempt: Own, name: Name) -> Response:
    with here.database.reading() as session:
        data = attempts.study(session, attempt, name)
    if data is None:
        raise HTTPException(404, "there is no such file")
    return Bytes(data)


@api.put(
    "/studies/{name}",
    summary="Keep a file of the job's search",
    openapi_extra=SENDS_BYTES,
    max_body_size=MAX_STUDY,
)
def keep_study(here: Here, attempt: Own, name: Name, data: LargeBody) -> dict[str, bool]:
    with here.database.writing() as session:
        if not attempts.keep_study(session, attempt.id, name, data):
            raise HTTPException(409, OVER)
    return {"kept": True}


@api.post("/end", summary="What became of an attempt")
def end(here: Here, caller: Works, attempt: Own, last: Last) -> dict[str, str]:
    found = (last.state, last.reason, last.record)
    with here.database.writing() as session:
        if not attempts.end(session, attempt.id, *found, caller):
            raise HTTPException(409, OVER)
    return {"state": last.state}
