"""What a tuning reports to a function that a caller gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from advisor.arguments import OnEvent
from advisor.cache.config import Config
from advisor.cache.record import Trial
from advisor.tuners.search.plan import Progress

if TYPE_CHECKING:
    from advisor.tuners.measure.runner import Compared
    from advisor.tuners.search.ratio import Ratio


class Events(Progress):
    """Calls a function with each event."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event

    def visited(
        self, trial: Trial, ratio: Ratio, compared: Compared | None, best: Config, left_s: float
    ) -> None:
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
    """What calls the function; silent where there is none."""
    return Events(on_event) if on_event is not None else Progress()
