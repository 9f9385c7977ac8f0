"""What several routes share: parameters, and descriptions for OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, HTTPException, Path, Request
from pydantic import BaseModel, ConfigDict

from advisor.cache.stores.http_client import BYTES

Responses = dict[int | str, dict[str, Any]]
SENDS_BYTES: dict[str, Any] = {"requestBody": {"required": True, "content": {BYTES: {}}}}
"""The OpenAPI description of a body that is not JSON."""


class Refused(BaseModel):
    """What is wrong, for people."""

    detail: str


_WHY = {
    400: "The body is no text.",
    401: "The token is unknown, expired or revoked.",
    403: "This token may not.",
    404: "There is no such thing.",
    408: "The body took too long.",
    409: "The attempt is over.",
    413: "The body is too large.",
    422: "What was sent is not what is expected.",
    428: "Its code is not here; send it first.",
    429: "Too often; wait.",
    503: "The database or a thread does not answer, or there is too much at once.",
}


def refusals(*statuses: int) -> Responses:
    """With which statuses a route refuses."""
    return {one: {"model": Refused, "description": _WHY[one]} for one in statuses}


def answers(kind: str, *statuses: int) -> Responses:
    """With bytes of which media type it answers, and with which statuses it refuses."""
    return {200: {"content": {kind: {}}, "description": "As asked."}, **refusals(*statuses)}


ANY = refusals(408, 413, 503)
"""Of every route."""
TOKENED = {**ANY, **refusals(400, 401, 403, 422, 429)}
"""Of every route that asks for a token."""

ANOTHERS = "another token put it there; an admin may remove it"

KEPT: Responses = {201: {"model": dict[str, str], "description": "It was not here before."}}

Number = Annotated[int, Path(ge=1, lt=2**31)]
RecordId = Annotated[str, Path(pattern=r"^[0-9a-f]{12}@[1-9][0-9]{0,9}$")]


class Strict(BaseModel):
    """A body of nothing else."""

    model_config = ConfigDict(extra="forbid")


async def _body(request: Request) -> bytes:
    return await request.body()


Body = Annotated[bytes, Depends(_body)]


def deleted(gone: bool | None, none: str) -> dict[str, bool]:
    """The answer where something was to be removed: it was there, or is not theirs (None).

    Raises:
        HTTPException: it was not, 404 with `none`, or is another's, 403.
    """
    if gone is None:
        raise HTTPException(403, ANOTHERS)
    if not gone:
        raise HTTPException(404, none)
    return {"deleted": True}
