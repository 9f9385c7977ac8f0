"""A job as it goes on, as server-sent events. They come out of the database, which every server
asks each second: whoever wrote it, and wherever the job runs."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from advisor.jobs.states import LIVE
from advisor.service import jobs
from advisor.service.access import Service
from advisor.service.database import Database

EVERY_S = 1.0
MOST_STREAMS = 200
"""Of one server at once."""
LASTS_S = 600.0
"""Of one stream: a browser asks again where it ended, and goes on there."""
_SEEN = re.compile(r"([0-9]{1,9})-([0-9]{1,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """How far somebody has read: trials, the place in the log, the state."""

    trials: int = 0
    log: int = 0
    state: str = ""

    @classmethod
    def of(cls, text: str) -> Seen:
        """From the id of the last event that a browser got; from the start where it is none."""
        found = _SEEN.fullmatch(text)
        return cls(trials=int(found[1]), log=int(found[2])) if found else cls()

    @property
    def id(self) -> str:
        return f"{self.trials}-{self.log}"


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """Events by name, with their data, since somebody last read; and how far they have read now.
    `ended`: nothing will follow."""

    events: list[tuple[str, Any]]
    seen: Seen
    ended: bool


def news(database: Database, number: int, seen: Seen) -> News | None:
    """What is new of a job; None where there is none."""
    with database.reading() as session:
        state = jobs.state(session, number)
        if state is None:
            return None
        tried = jobs.trials(session, number, skip=seen.trials)
        text = jobs.log(session, number, seen.log)
    assert text is not None
    events: list[tuple[str, Any]] = [("trial", one) for one in tried]
    if text.text:
        events.append(("log", {"text": text.text, "next": text.next}))
    shown = f"{state['state']} {state['reason']}"
    if shown != seen.state and (text.ended or state["state"] in LIVE):
        events.append(("state", state))
    now = Seen(trials=seen.trials + len(tried), log=text.next, state=shown)
    return News(events=events, seen=now, ended=text.ended)


async def stream(service: Service, number: int, first: News) -> AsyncIterator[str]:
    """The text of the events, until the job is over, the server stops or it lasted long enough."""
    until = time.monotonic() + LASTS_S
    found: News | None = first
    while found is not None:
        for name, data in found.events:
            yield f"event: {name}\ndata: {json.dumps(data)}\n\n"
        if found.events:
            yield f"id: {found.seen.id}\n\n"  # what came before it has come whole
        if found.ended:
            yield "event: end\ndata: {}\n\n"  # so that nobody asks again
        if found.ended or service.stopping.is_set() or time.monotonic() > until:
            return
        await asyncio.sleep(EVERY_S)
        yield ": \n\n"  # so that whoever hung up is noticed
        found = await run_in_threadpool(news, service.database, number, found.seen)


def answer(service: Service, number: int, last: str) -> StreamingResponse:
    """Raises HTTPException where there is no such job, or too many look."""
    first = news(service.database, number, Seen.of(last))
    if first is None:
        raise HTTPException(404, "there is no such job")
    return streaming(service, stream(service, number, first))


def streaming(service: Service, parts: AsyncIterator[str]) -> StreamingResponse:
    """An answer that goes on; raises HTTPException where too many look."""
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
