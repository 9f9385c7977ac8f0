"""Report the events of a tuning to the caller's `on_event` function."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import TYPE_CHECKING

from advisor.arguments import OnEvent
from advisor.cache.config import Config
from advisor.errors import check_type
from advisor.tuners.search.plan import Progress

if TYPE_CHECKING:
    from advisor.tuners.search.journal import JournaledTrial


class Events(Progress):
    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event

    def visited(self, done: JournaledTrial, what: str, best: Config, left_s: float) -> None:
        trial, ratio, compared = done
        measured = trial.measurement
        self._on_event(
            {
                "event": "trial",
                "number": trial.number,
                "config": dict(trial.config),
                "outcome": compared.outcome if compared else measured.outcome,
                "samples_per_s": measured.samples_per_s,
                "ratio": ratio.mean,
                "low": ratio.low,
                "high": ratio.high,
                "best": dict(best),
                "left_s": left_s,
            }
        )

    def phase(self, what: str) -> None:
        self._on_event({"event": "phase", "text": what})

    def notice(self, text: str) -> None:
        self._on_event({"event": "notice", "text": text})

    def warning(self, text: str) -> None:
        self._on_event({"event": "warning", "text": text})


def progress_of(on_event: OnEvent | None) -> Progress:
    """The Progress that calls `on_event`, or a silent one for None. Raises UsageError if
    `on_event` is not callable."""
    check_type("on_event", on_event, (Callable, NoneType), "a function that takes a dictionary")
    return Events(on_event) if on_event is not None else Progress()
