"""What a server does beside answering: it writes the counts of lookups, and removes what is old."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from advisor.jobs.states import LIVE
from advisor.service import archives, artifacts, jobs, lookups, tokens
from advisor.service.access import Service
from advisor.service.loop import Loop

EVERY_S = 30.0
TIDIES_S = 3600.0


@contextlib.contextmanager
def upkeep(service: Service) -> Iterator[None]:
    """Repeat it until the block ends, and write the counts a last time then."""
    tidied = -TIDIES_S

    def turn() -> None:
        nonlocal tidied
        service.lookups.flush(service.database)
        if time.monotonic() - tidied > TIDIES_S and not service.stopping.is_set():
            tidy(service)
            tidied = time.monotonic()

    loop = Loop("upkeep", EVERY_S, turn)
    loop.start()
    service.loops.append(loop)
    try:
        yield
    finally:
        service.stopping.set()
        loop.close()
        loop.once()


def tidy(service: Service) -> None:
    """Remove what is old and nobody needs."""
    with service.database.writing() as session:
        tokens.tidy(session)
        jobs.tidy(session)
        archives.tidy(session, LIVE)
        artifacts.tidy(session)
        lookups.tidy(session)
