"""What several routes share: parameters, answers, and descriptions for OpenAPI."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, TypeVar

from fastapi import Depends, HTTPException, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from advisor.cache.stores.http_client import BYTES

Thing = TypeVar("Thing")
MAX_LARGE = 4  # large request bodies in memory at once, at most
SENDS_BYTES: dict[str, Any] = {"requestBody": {"required": True, "content": {BYTES: {}}}}
"""The OpenAPI description of a body that is not JSON."""


class Refusal(BaseModel):
    detail: str = Field(description="What is wrong, for people.")


REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Refusal} for status in (400, 401, 403, 404, 409, 413, 422, 428, 429, 503)
}
"""The answers of a route to a request that it refuses, for OpenAPI."""

RowNumber = Annotated[int, Path(ge=1, lt=2**31)]
Before = Annotated[int | None, Query(ge=1, lt=2**31)]
RecordId = Annotated[str, Path(pattern=r"^[0-9a-f]{12}@[1-9][0-9]{0,9}$")]


class Binary(Response):
    media_type = BYTES


class Strict(BaseModel):
    """A body in JSON. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


def takes_bytes(most: int) -> dict[str, Any]:
    """Options of a route that stores a body of at most `most` bytes."""
    new = {201: {"model": dict[str, str], "description": "It is new."}}
    return {"openapi_extra": SENDS_BYTES, "responses": new, "max_body_size": most}


def kept(response: Response, outcome: str) -> dict[str, str]:
    """The answer to a PUT: 201 if the thing is new."""
    response.status_code = 201 if outcome == "added" else 200
    return {"outcome": outcome}


def found(thing: Thing | None, what: str = "such thing") -> Thing:
    """Return `thing`. Raises HTTPException if it is None or False."""
    if thing is None or thing is False:
        raise HTTPException(404, f"there is no {what}")
    return thing


async def _body(request: Request) -> AsyncIterator[bytes]:
    yield await request.body()


Body = Annotated[bytes, Depends(_body)]
LargeBody = Annotated[bytes, Depends(_body, max_concurrency=MAX_LARGE)]
"""A body that is held in memory with at most MAX_LARGE - 1 others."""
