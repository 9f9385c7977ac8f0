"""What a server does beside answering: it writes what was counted, removes what is old, and has
measured again what is stale."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator

from advisor.errors import StoreError
from advisor.jobs.states import LIVE
from advisor.service import archives, jobs, lookups
from advisor.service.access import Service

EVERY_S = 30.0
TIDIES_S, RETUNES_S = 3600.0, 600.0
_log = logging.getLogger("advisor")


@contextlib.contextmanager
def upkeep(service: Service) -> Iterator[None]:
    """From now on until it is left, and a last time then."""
    thread = threading.Thread(target=_keep_up, args=(service,), name="upkeep", daemon=True)
    thread.start()
    try:
        yield
    finally:
        service.stopping.set()
        thread.join()


def _keep_up(service: Service) -> None:
    chores = {tidy: TIDIES_S, retune: RETUNES_S}
    done, stopping = dict.fromkeys(chores, -math.inf), False
    while not stopping:
        stopping = service.stopping.wait(EVERY_S)
        try:
            service.lookups.flush(service.database)
            for chore, every_s in chores.items():
                if not stopping and time.monotonic() - done[chore] > every_s:
                    chore(service)
                    done[chore] = time.monotonic()
        except StoreError as exc:
            _log.warning("upkeep: %s", exc)


def tidy(service: Service) -> None:
    """Remove what is old and nobody needs."""
    with service.database.writing() as session:
        jobs.tidy(session)
        archives.tidy(session, LIVE)
        lookups.tidy(session)


def retune(service: Service) -> None:
    """Have stale records that are in use measured again."""
    service.retuning.turn(service.database)
