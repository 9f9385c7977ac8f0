"""What several routes parse alike."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Path, Request
from pydantic import BaseModel, ConfigDict

BYTES = "application/octet-stream"
SENDS_BYTES: dict[str, Any] = {"requestBody": {"required": True, "content": {BYTES: {}}}}
"""What OpenAPI has to be told of a route whose body is no JSON."""

Number = Annotated[int, Path(ge=1, lt=2**31)]


class Strict(BaseModel):
    """A body of nothing else."""

    model_config = ConfigDict(extra="forbid")


async def _body(request: Request) -> bytes:
    return await request.body()


Body = Annotated[bytes, Depends(_body)]
