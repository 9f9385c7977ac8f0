"""What `advisor tune` shows while it works: a live table, or plain lines.

Drawn between measurements only: a redraw is noise to a step that is bound by the host.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from advisor.cache.config import BATCH, Config
from advisor.cache.key import Key
from advisor.cache.record import Trial
from advisor.cache.shown import interval, tells, times
from advisor.report.text import OUTCOMES, duration, outcome, rate
from advisor.report.ticking import ticking
from advisor.tuners.knobs import described
from advisor.tuners.search.plan import Progress

if TYPE_CHECKING:
    from advisor.tuners.measure.runner import Compared
    from advisor.tuners.measure.worker.wire import Facts
    from advisor.tuners.search.ratio import Ratio
    from advisor.tuners.search.space import Space

SILENT_S, AGAIN_S = 5.0, 30.0
"""Until a dataset that is being made is told of, and then again."""
TICK_S = 2.0
"""From one redraw to the next while something is compiled: what follows it is a measurement."""
SHOWN = 12
MOST_SAID = 60
"""Characters of why a visit failed."""
WAITED = 0.05
"""Share of the time that a run waits for its data from which it is shown."""


class Shown(Progress):
    """Progress on a console (standard error): live on a terminal, lines elsewhere.

    Args:
        events: a file that each visit is added to, as a line of JSON.
    """

    def __init__(self, console: Console, *, budget_s: float, events: Path | None = None) -> None:
        self._console = console
        self._events = events
        self._budget_s = budget_s
        self._live: Live | None = None
        self._default = Config()
        self._run = False
        self._rows: list[tuple[str, ...]] = []
        self._best = ""
        self._status = ""
        self._left_s, self._told = budget_s, time.monotonic()
        self._ticking = contextlib.ExitStack()

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._ticking.close()
        if self._live is not None:
            self._live.stop()

    def started(self, facts: Facts, key: Key, space: Space, resumed: int) -> None:
        self._default, self._run = space.default, bool(key.task.command)
        device = key.environment.device
        self._say(
            f"{facts.name}: {facts.parameters:,} parameters, {key.task.inputs}, batch "
            f"{key.task.batch}, {key.task.mode}, on {device.name}"
        )
        if resumed:
            self._say(f"continues after {resumed} visits of an earlier run")
        self._say(f"budget {duration(self._budget_s)}; Ctrl-C keeps the best config so far")
        self._began(self._budget_s)
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def doing(self, config: Config, what: str, best: Config | None, left_s: float) -> None:
        self._ticking.close()
        self._began(left_s)
        doing = {"building": "compiling"}.get(what, what)
        self._status = f"{doing}: {self._described(config)}"
        if self._live is None:
            if doing == "compiling":
                self._say(f"{self._status} ... {self._left()}")
            return
        self._draw()
        if doing == "compiling":
            self._ticking.enter_context(ticking(lambda _s: self._draw(), TICK_S, TICK_S))

    def visited(
        self, trial: Trial, ratio: Ratio, compared: Compared | None, best: Config, left_s: float
    ) -> None:
        self._ticking.close()
        self._began(left_s)
        self._rows.append(self._cells(trial, ratio, compared))
        if trial.config == best and best != self._default and ratio.faster:
            checked = ", verified" if compared is not None and compared.ok else ""
            self._best = f"best so far: {self._described(best)} {times(ratio.mean)}{checked}"
        self._add(trial, ratio, compared)
        if self._live is not None:
            self._draw()
            return
        parts = [f"trial {trial.number}:", *self._rows[-1], self._best, self._left()]
        self._say("  ".join(filter(None, parts)))

    def _add(self, trial: Trial, ratio: Ratio, compared: Compared | None) -> None:
        if self._events is None:
            return
        measured = trial.measurement
        struck = OUTCOMES.get(compared.outcome, "") if compared is not None else ""
        line = {
            "number": trial.number,
            "what": self._described(trial.config),
            "batch": trial.config.batch or None,
            "samples_per_s": measured.samples_per_s if measured.ok else 0.0,
            "ratio": ratio.mean if measured.ok else 0.0,
            "outcome": outcome(measured) or struck,
            "origin": trial.origin,
        }
        with self._events.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _began(self, left_s: float) -> None:
        self._left_s, self._told = left_s, time.monotonic()

    def _left(self) -> str:
        """'32 s left of 1m 00s'."""
        left_s = max(0.0, self._left_s - (time.monotonic() - self._told))
        return f"{duration(left_s)} left of {duration(self._budget_s)}"

    def making(self, data: str, most_s: float) -> AbstractContextManager[None]:
        def tell(seconds: float) -> None:
            self.notice(
                f"data {data!r}: its dataset and a batch of it are being made, for "
                f"{duration(round(seconds))} by now; given up after {duration(most_s)}"
            )

        return ticking(tell, SILENT_S, AGAIN_S)

    def phase(self, what: str) -> None:
        self._ticking.close()
        self._status = what
        if self._live is not None:
            self._draw()
        else:
            self._say(what)

    def notice(self, text: str) -> None:
        self._say(f"advisor: {text}")

    def warning(self, text: str) -> None:
        quiet, self._console.quiet = self._console.quiet, False
        self.notice(text)
        self._console.quiet = quiet

    def output(self, text: str) -> None:
        """What a command prints, above what is shown."""
        self._console.print(text, end="", highlight=False, markup=False, soft_wrap=True)

    def _say(self, text: str) -> None:
        """As it is: a record may have said part of it, and none of it is markup."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _described(self, config: Config) -> str:
        """With its batch, where that is not the user's."""
        own = self._default.get(BATCH, config.batch)
        at = f" at batch {config.batch}" if config.batch != own else ""
        nothing = "your script, unmodified" if self._run else "torch default"
        return described(config, self._default, nothing=nothing) + at

    def _cells(self, trial: Trial, ratio: Ratio, compared: Compared | None) -> tuple[str, ...]:
        measured = trial.measurement
        named = self._described(trial.config)
        if not measured.ok:
            why = shorten(measured.reason, MOST_SAID, placeholder=" ...")
            return named, outcome(measured), "", "", why
        speed = f"{rate(1 / measured.step_s)} steps/s" if measured.step_s else ""
        waits = f"waits {measured.waited:.0%}" if measured.waited >= WAITED else ""
        told = ""
        if trial.config != self._default and tells(ratio.low, ratio.high):
            told = f"({interval(ratio.low, ratio.high)})"
        if compared is not None:
            told += " trains like fp32" if compared.ok else f" {compared.outcome}"
        return named, speed, waits, times(ratio.mean), told.strip()

    def _draw(self) -> None:
        assert self._live is not None
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("tried", "speed", "data", "x yours" if self._run else "x default", ""):
            table.add_column(heading, justify="left" if heading == "tried" else "right")
        for row in self._rows[-SHOWN:]:
            table.add_row(*map(Text, row))
        lines: Sequence[str] = [self._best] if self._best else []
        status = Text(f"{self._status}  {self._left()}", "dim")
        bold = [Text(line, "bold") for line in lines]
        self._live.update(Group(table, Text(), *bold, status), refresh=True)
