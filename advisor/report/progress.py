"""What `advisor tune` prints while it works: a line for each trial.

It prints between measurements only: a clock that ticks would slow down a step that the CPU limits.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from rich.console import Console

from advisor.cache.config import BATCH, Config
from advisor.cache.key import Key
from advisor.cache.record import Trial
from advisor.cache.shown import interval, tells, times
from advisor.report.text import OUTCOMES, duration, outcome, rate
from advisor.tuners.knobs import described
from advisor.tuners.search.plan import Progress

if TYPE_CHECKING:
    from advisor.tuners.measure.runner import Compared
    from advisor.tuners.measure.worker.wire import Facts
    from advisor.tuners.search.ratio import Ratio
    from advisor.tuners.search.space import Space

SILENT_S, AGAIN_S = 5.0, 30.0
"""Seconds until a line says that a dataset is still being made, and until the next such line."""
REASON_LENGTH = 60
SHOWN_WAIT = 0.05
"""Share of a run's time from which waiting for data is shown."""


class Shown(Progress):
    """Progress on a console (standard error).

    Args:
        events: a file to which each trial is appended, as a line of JSON.
    """

    def __init__(self, console: Console, *, budget_s: float, events: Path | None = None) -> None:
        self._console, self._events, self._budget_s = console, events, budget_s
        self._default, self._run, self._best = Config(), False, Config()

    def started(self, facts: Facts, key: Key, space: Space, resumed: int) -> None:
        self._default, self._run = space.default, bool(key.task.command)
        task, device = key.task, key.environment.device
        self._say(
            f"{facts.name}: {facts.parameters:,} parameters, {task.inputs}, batch {task.batch}, "
            f"{task.mode}, on {device.name}"
        )
        if resumed:
            self._say(f"continues after {resumed} visits of an earlier run")
        self._say(f"budget {duration(self._budget_s)}; Ctrl-C keeps the best config so far")

    def doing(self, config: Config, what: str, best: Config | None, left_s: float) -> None:
        if what == "building":
            self._say(f"compiling: {self._described(config)} ... {self._left(left_s)}")

    def visited(
        self, trial: Trial, ratio: Ratio, compared: Compared | None, best: Config, left_s: float
    ) -> None:
        parts = [f"trial {trial.number}:", *self._parts(trial, ratio, compared)]
        if trial.config == best and best not in (self._default, self._best) and ratio.faster:
            self._best = best
            parts.append("the best so far")
        self._say("  ".join(filter(None, [*parts, self._left(left_s)])))
        self._append(trial, ratio, compared)

    def making(self, data: str, most_s: float) -> AbstractContextManager[None]:
        def tell(seconds: float) -> None:
            self.notice(
                f"data {data!r}: making its dataset and a batch has taken "
                f"{duration(round(seconds))} so far; advisor gives up after {duration(most_s)}"
            )

        return repeating(tell, SILENT_S, AGAIN_S)

    def phase(self, what: str) -> None:
        self._say(what)

    def notice(self, text: str) -> None:
        self._say(f"advisor: {text}")

    def warning(self, text: str) -> None:
        quiet, self._console.quiet = self._console.quiet, False
        self.notice(text)
        self._console.quiet = quiet

    def output(self, text: str) -> None:
        """Print what a command prints."""
        self._console.print(text, end="", highlight=False, markup=False, soft_wrap=True)

    def _say(self, text: str) -> None:
        self.output(f"{text}\n")

    def _append(self, trial: Trial, ratio: Ratio, compared: Compared | None) -> None:
        if self._events is None:
            return
        measured = trial.measurement
        wrong = OUTCOMES.get(compared.outcome, "") if compared is not None else ""
        line = {
            "number": trial.number,
            "what": self._described(trial.config),
            "batch": trial.config.batch or None,
            "samples_per_s": measured.samples_per_s if measured.ok else 0.0,
            "ratio": ratio.mean if measured.ok else 0.0,
            "outcome": outcome(measured) or wrong,
            "origin": trial.origin,
        }
        with self._events.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _left(self, left_s: float) -> str:
        """'32 s left of 1m 00s'."""
        return f"{duration(left_s)} left of {duration(self._budget_s)}"

    def _described(self, config: Config) -> str:
        own = self._default.get(BATCH, config.batch)
        at = f" at batch {config.batch}" if config.batch != own else ""
        nothing = "your script, unmodified" if self._run else "torch default"
        return described(config, self._default, nothing=nothing) + at

    def _parts(self, trial: Trial, ratio: Ratio, compared: Compared | None) -> Iterator[str]:
        measured = trial.measurement
        yield self._described(trial.config)
        if not measured.ok:
            yield outcome(measured)
            yield shorten(measured.reason, REASON_LENGTH, placeholder=" ...")
            return
        if measured.step_s:
            yield f"{rate(1 / measured.step_s)} steps/s"
        if measured.waited >= SHOWN_WAIT:
            yield f"waits {measured.waited:.0%}"
        yield times(ratio.mean)
        notes = []
        if trial.config != self._default and tells(ratio.low, ratio.high):
            notes.append(f"({interval(ratio.low, ratio.high)})")
        if compared is not None:
            notes.append("trains like fp32" if compared.ok else compared.outcome)
        yield " ".join(notes)


@contextlib.contextmanager
def repeating(tell: Callable[[float], None], first_s: float, every_s: float) -> Iterator[None]:
    """Call `tell` from a thread with the seconds so far, after `first_s` and then each `every_s`,
    until the context ends."""
    over = threading.Event()

    def run() -> None:
        began, wait_s = time.monotonic(), first_s
        while not over.wait(wait_s):
            tell(time.monotonic() - began)
            wait_s = every_s

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
