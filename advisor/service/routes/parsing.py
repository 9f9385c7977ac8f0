"""What several routes share: parameters, and descriptions for OpenAPI."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Depends, Path, Request, Response
from pydantic import BaseModel, ConfigDict

from advisor.cache.stores.http_client import BYTES
from advisor.service.access import Here

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
    409: "The attempt is over.",
    413: "The body is too large.",
    422: "What was sent is not what is expected.",
    428: "Its code is not here; send it first.",
    429: "Too many invalid tokens; wait.",
    503: "The database or a thread does not answer.",
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Refused, "description": why} for status, why in _WHY.items()
}
KEPT: dict[int | str, dict[str, Any]] = {
    201: {"model": dict[str, str], "description": "It was not here before."}
}

Number = Annotated[int, Path(ge=1, lt=2**31)]
RecordId = Annotated[str, Path(pattern=r"^[0-9a-f]{12}@[1-9][0-9]{0,9}$")]


class Bytes(Response):
    media_type = BYTES


class Strict(BaseModel):
    """A body of nothing else."""

    model_config = ConfigDict(extra="forbid")


async def _body(request: Request) -> bytes:
    return await request.body()


async def _large_body(request: Request, here: Here) -> AsyncIterator[bytes]:
    async with here.large:
        yield await request.body()


Body = Annotated[bytes, Depends(_body)]
LargeBody = Annotated[bytes, Depends(_large_body)]
