"""What a pilot is told in an ordinary run: the advice for the model that it sees there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from advisor.cache.config import Config
from advisor.cache.match import Query
from advisor.cache.record import PILOT
from advisor.finding.lookups import Lookup, served, set_up_logging
from advisor.finding.request import Request
from advisor.opening import Cache
from advisor.tuners import knobs
from advisor.tuners.act.pilot.orders import Lap, Order
from advisor.tuners.act.pilot.seen import Seen

_log = logging.getLogger("advisor")


class Found:
    """A Guide that looks up, and then says nothing more.

    Args:
        command: of the run, for what is printed.
        given: fields of a Task that the user permits.
    """

    def __init__(
        self, command: Sequence[str], *, cache: Cache = None, given: dict[str, Any] | None = None
    ) -> None:
        self._command = tuple(command)
        self._cache = cache
        self._given = given or {}

    def begin(self, seen: Seen) -> Order:
        """As `Guide.begin`; never raises."""
        set_up_logging()
        lookup = _OfRun(seen, self._command, self._given, self._cache)
        advice = served(lookup, device=seen.device)
        if advice.record is None:
            return Order(config=Config())
        own = advice.record.baseline.config.without(*_not_the_pilots())
        config = Config({name: advice.config.get(name, own[name]) for name in own})
        _log.info("in force: %s", knobs.described(config, own))
        return Order(config=config, own=own)

    def next(self, lap: Lap) -> Order:
        """Never asked: there is nothing to say but the first order."""
        raise NotImplementedError

    def failed(self, exc: BaseException) -> None:
        """As `Guide.failed`."""
        _log.info("the pilot ends: %s", exc)


def _not_the_pilots() -> list[str]:
    """Knobs that a run has no place for, as those of a loop alone."""
    return [knob.name for knob in knobs.KNOBS if knob.stage != knobs.COMPUTE]


class _OfRun(Lookup):
    """A lookup with the model in hand, of which a running script shows what makes its key."""

    def __init__(
        self, seen: Seen, command: tuple[str, ...], given: dict[str, Any], cache: Cache
    ) -> None:
        super().__init__(None, {})
        self._seen, self._command, self._given, self._cache = seen, command, given, cache

    def _requested(self) -> Request:
        task = self._seen.task(self._command, self._given)
        shown = ("command", "shapes", "dtype", "mode", "optimizer", "processes", "others", "script")
        return Request(
            target=None,
            given={**{name: getattr(task, name) for name in shown}, **self._given},
            batch=None,
            free=False,
            use=PILOT,
            device=self._seen.device,
            cache=self._cache,
        )

    def _queried(self, request: Request) -> Query:
        from advisor.tuners.environment import detect

        return Query(
            environment=detect(request.device),
            given=request.given,
            model=self._seen.model,
            threads=self._seen.threads if request.device == "cpu" else 0,
        )
