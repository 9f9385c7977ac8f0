"""Answers that go on, as server-sent events. They come out of the database, which every server asks
each second: whoever wrote it, and wherever a job runs."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import HTTPException
from fastapi.responses import StreamingResponse

from advisor.service.access import Service

EVERY_S = 1.0
MOST_STREAMS = 200
"""Of one server at once."""
LASTS_S = 600.0
"""Of one stream: a browser asks again where it ended, and goes on there."""


def streaming(service: Service, parts: AsyncIterator[str]) -> StreamingResponse:
    """Raises HTTPException where too many look."""
    if service.streams >= MOST_STREAMS:
        raise HTTPException(429, "too many are looking; ask again later", {"Retry-After": "10"})

    async def counted() -> AsyncIterator[str]:
        service.streams += 1
        try:
            async for text in parts:
                yield text
        finally:
            service.streams -= 1

    return StreamingResponse(counted(), media_type="text/event-stream")
