"""The progress of `advisor tune`: a line for each trial.

Lines are printed only between measurements: a ticking clock would slow down a CPU-bound step.
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import shorten
from typing import TYPE_CHECKING

from rich.console import Console

from advisor.arguments import Events, OnEvent, trial_event
from advisor.cache.config import Config
from advisor.cache.shown import interval, tells, times
from advisor.report.text import WRONG, duration, outcome, rate

if TYPE_CHECKING:
    from advisor.tuners.search.journal import JournaledTrial

SHOWN_WAIT = 0.05  # a smaller share of time spent waiting for data is not shown


class Shown(Events):
    """Progress on a console (standard error).

    Args:
        events: called with each event of `advisor.tune`; a trial has more fields.
    """

    def __init__(
        self, console: Console, *, budget_s: float, events: OnEvent = lambda _event: None
    ) -> None:
        super().__init__(events)
        self._console, self._budget_s, self._best = console, budget_s, Config()

    def visited(self, done: JournaledTrial, what: str, best: Config, left_s: float) -> None:
        parts = [f"trial {done.trial.number}:", what, *_result(done)]
        if done.trial.config == best != self._best and done.ratio.faster:
            self._best = best
            parts.append("the best so far")
        parts.append(f"{duration(left_s)} left of {duration(self._budget_s)}")
        self.output("  ".join(filter(None, parts)) + "\n")
        self.events(trial_event(done, best, left_s) | _more(done, what))

    def phase(self, what: str) -> None:
        self.output(f"{what}\n")
        super().phase(what)

    def notice(self, text: str) -> None:
        self.output(f"advisor: {text}\n")
        super().notice(text)

    def warning(self, text: str) -> None:
        self.loud(f"advisor: {text}\n")
        super().warning(text)

    def output(self, text: str) -> None:
        self._console.print(text, end="", highlight=False, markup=False, soft_wrap=True)

    def loud(self, text: str) -> None:
        """As `output`, also on a quiet console."""
        quiet, self._console.quiet = self._console.quiet, False
        self.output(text)
        self._console.quiet = quiet


def _result(done: JournaledTrial) -> Iterator[str]:
    """Generator: yields the parts of a trial's line."""
    measured, ratio, compared = done.trial.measurement, done.ratio, done.compared
    if not measured.ok:
        yield outcome(measured)
        yield shorten(measured.reason, 60, placeholder=" ...")
        return
    if measured.step_s:
        yield f"{rate(1 / measured.step_s)} steps/s"
    if measured.waited >= SHOWN_WAIT:
        yield f"waits {measured.waited:.0%}"
    notes = []
    if done.trial.origin != "baseline" and tells(ratio.low, ratio.high):
        notes.append(f"({interval(ratio.low, ratio.high)})")
    if compared is not None:
        notes.append("trains like fp32" if compared.ok else compared.outcome)
    yield f"{times(ratio.mean)}  {' '.join(notes)}".rstrip()


def _more(done: JournaledTrial, what: str) -> dict[str, object]:
    """What the event of a trial has in the file of --events; `outcome`: '', or why it failed."""
    trial, measured = done.trial, done.trial.measurement
    wrong = WRONG if done.compared and done.compared.outcome == "wrong" else ""
    return {
        "what": what,
        "batch": trial.config.batch or None,
        "samples_per_s": measured.samples_per_s if measured.ok else 0.0,
        "ratio": done.ratio.mean if measured.ok else 0.0,
        "outcome": outcome(measured) or wrong,
        "compared": done.compared.outcome if done.compared else None,
        "origin": trial.origin,
    }
