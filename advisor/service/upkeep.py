"""What a server does beside answering: it writes what was counted, removes what is old, and has
measured again what is stale."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator

from advisor.jobs.states import LIVE
from advisor.service import archives, artifacts, jobs, lookups, tokens
from advisor.service.access import Service
from advisor.service.loop import Loop

EVERY_S = 30.0
TIDIES_S, RETUNES_S = 3600.0, 600.0

Chore = Callable[[Service], None]


@contextlib.contextmanager
def upkeep(service: Service) -> Iterator[None]:
    """From now on until it is left, and a last time then."""
    loop = Loop("upkeep", EVERY_S, functools.partial(_turn, service, {}))
    loop.start()
    service.loops.append(loop)
    try:
        yield
    finally:
        service.stopping.set()
        loop.close()
        loop.once()


def _turn(service: Service, done: dict[Chore, float]) -> None:
    """Do what is due; `done`: each chore's last time."""
    service.lookups.flush(service.database)
    for chore, every_s in ((tidy, TIDIES_S), (retune, RETUNES_S)):
        due = time.monotonic() - done.get(chore, -math.inf) > every_s
        if due and not service.stopping.is_set():
            chore(service)
            done[chore] = time.monotonic()


def tidy(service: Service) -> None:
    """Remove what is old and nobody needs."""
    with service.database.writing() as session:
        tokens.tidy(session)
        jobs.tidy(session)
        archives.tidy(session, LIVE)
        artifacts.tidy(session)
        lookups.tidy(session)


def retune(service: Service) -> None:
    """Have stale records that are in use measured again."""
    service.retuning.turn(service.database)
