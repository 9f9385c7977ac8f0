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
from advisor.cache.record import Measurement, Trial
from advisor.cache.shown import times
from advisor.report.text import duration, outcome, over, rate
from advisor.report.ticking import ticking
from advisor.tuners.knobs import described
from advisor.tuners.search.plan import Progress, parts

if TYPE_CHECKING:
    from advisor.tuners.measure.worker.wire import Facts
    from advisor.tuners.search.space import Space

SILENT_S, AGAIN_S = 5.0, 30.0
"""Until a dataset that is being made is told of, and then again."""
TICK_S = 2.0
"""From one redraw to the next while something is compiled: what follows it is a measurement."""
SHOWN = 12
MOST_SAID = 60
"""Characters of why a trial failed."""
WAITED = 0.05
"""Share of the time that a run waits for its data from which it is shown."""


class Shown(Progress):
    """Progress on a console (standard error): live on a terminal, lines elsewhere.

    Args:
        events: a file that each trial is added to, as a line of JSON.
    """

    def __init__(self, console: Console, *, budget_s: float, events: Path | None = None) -> None:
        self._console = console
        self._events = events
        self._budget_s = budget_s
        self._live: Live | None = None
        self._default = Config()
        self._run = False
        self._baseline: Measurement | None = None
        self._trials: list[Trial] = []
        self._best: dict[bool, Trial] = {}
        self._status = ""
        self._building: tuple[Config, ...] = ()
        self._began = time.monotonic()
        self._spent_s, self._tried = 0.0, self._began
        self._ticking = contextlib.ExitStack()

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._ticking.close()
        if self._live is not None:
            self._live.stop()

    def started(self, facts: Facts, key: Key, space: Space, resumed: int) -> None:
        self._default, self._run = space.default, bool(key.task.command)
        self._began = time.monotonic()
        device = key.environment.device
        self._say(
            f"{facts.name}: {facts.parameters:,} parameters, {key.task.inputs}, batch "
            f"{key.task.batch}, {key.task.mode}, on {device.name}"
        )
        if resumed:
            self._say(f"going on after {resumed} trials of an earlier run")
        planned = parts(self._budget_s, loads=bool(space.inputs)).items()
        listed = ", ".join(f"{what} {duration(round(seconds, 1))}" for what, seconds in planned)
        self._say(f"{duration(self._budget_s)}: {listed}; what one leaves, the next have")
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def tried(self, trial: Trial, spent_s: float) -> None:
        self._ticking.close()
        self._spent_s, self._tried = spent_s, time.monotonic()
        measured = trial.measurement
        if trial.config == self._default:
            self._baseline = measured
        self._trials.append(trial)
        if measured.ok:
            at_batch = trial.config.batch == self._default.batch
            held = self._best.get(at_batch)
            if held is None or measured.samples_per_s > held.measurement.samples_per_s:
                self._best[at_batch] = trial
        self._add(trial)
        self._status = self._left()
        if self._live is not None:
            self._draw()
        else:
            self._say("  ".join([f"trial {trial.number}:", *self._cells(trial)[1:], self._status]))

    def _add(self, trial: Trial) -> None:
        if self._events is None:
            return
        measured = trial.measurement
        line = {
            "number": trial.number,
            "what": self._described(trial),
            "batch": trial.config.batch or None,
            "samples_per_s": measured.samples_per_s if measured.ok else 0.0,
            "ratio": self._ratio(measured),
            "outcome": outcome(measured),
            "origin": trial.origin,
        }
        with self._events.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _left(self) -> str:
        """'32 s left of 1m 00s'."""
        spent_s = self._spent_s + time.monotonic() - self._tried
        left_s = max(0.0, self._budget_s - spent_s)
        return f"{duration(left_s)} left of {duration(self._budget_s)}"

    def building(self, configs: Sequence[Config], seconds: float) -> None:
        self._ticking.close()
        before, self._building = self._building, tuple(configs)
        self._told_of_building(seconds)
        if self._live is None and before != self._building:
            self._say(self._status)
        if self._live is not None and len(configs) == 1:  # of several each second is told
            self._ticking.enter_context(ticking(self._told_of_building, TICK_S, TICK_S))

    def _told_of_building(self, seconds: float) -> None:
        listed = "; ".join(map(self._built, self._building))
        at_once = f" {len(self._building)} configs at once" if len(self._building) > 1 else ""
        self._status = f"compiling{at_once}: {listed}"
        if seconds >= 1:
            self._status += f" ... {seconds:.0f} s, {self._left()}"
        if self._live is not None:
            self._draw()

    def _built(self, config: Config) -> str:
        """With its batch, where that is not the user's."""
        own = self._default.get(BATCH, config.batch)
        at = f" at batch {config.batch}" if config.batch != own else ""
        return described(config, self._default) + at

    def making(self, data: str, most_s: float) -> AbstractContextManager[None]:
        def tell(seconds: float) -> None:
            self.notice(
                f"data {data!r}: its dataset and a batch of it are being made, for "
                f"{duration(round(seconds))} by now; given up after {duration(most_s)}"
            )

        return ticking(tell, SILENT_S, AGAIN_S)

    def phase(self, what: str) -> None:
        self._ticking.close()
        so_far = duration(time.monotonic() - self._began)
        self._status = f"{what} (after {so_far})"
        if self._live is not None:
            self._draw()
        else:
            self._say(self._status)

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

    def _cells(self, trial: Trial) -> tuple[str, ...]:
        measured = trial.measurement
        ratio = self._ratio(measured)
        against = times(ratio) if ratio else ""
        if not measured.ok:
            against = shorten(measured.reason, MOST_SAID, placeholder=" ...")
        where = f"batch {trial.config.batch}"
        if self._run:
            # The batch is the script's; what its own data leaves of a step is worth more to see.
            ran = measured.ok and measured.step_s > 0
            where = f"{rate(1 / measured.step_s)} steps/s" if ran else ""
            where += f", waits {measured.waited:.0%}" if measured.waited >= WAITED else ""
        return (
            str(trial.number),
            self._described(trial),
            where,
            f"{rate(measured.samples_per_s)}/s" if measured.ok else outcome(measured),
            against,
        )

    def _described(self, trial: Trial) -> str:
        nothing = "as it is" if self._run else "torch default"
        return described(trial.config, self._default, nothing=nothing)

    def _ratio(self, measured: Measurement) -> float:
        """To the baseline's throughput; 0 where that is not known."""
        return over(measured, self._baseline)

    def _draw(self) -> None:
        assert self._live is not None
        table = Table(box=None, pad_edge=False, header_style="bold")
        headings = ("trial", "tried", "batch", "samples/s", "x default")
        if self._run:
            headings = ("trial", "tried", "steps/s", "samples/s", "x as it is")
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "tried" else "right")
        for trial in self._trials[-SHOWN:]:
            number, tried, batch, speed, against = self._cells(trial)
            leads = trial in self._best.values()
            cells = (
                number,
                tried,
                batch.removeprefix("batch ").replace(" steps/s", ""),
                speed.removesuffix("/s"),
                against,
            )
            table.add_row(*map(Text, cells), style="green" if leads else "")
        lines: list[Text] = []
        for at_batch, name in ((True, "best at your batch"), (False, "best at another batch")):
            held = self._best.get(at_batch)
            if held is not None:
                lines.append(Text(f"{name}: " + "  ".join(self._cells(held)[1:]), "bold"))
        lines.append(Text(self._status, "dim"))
        self._live.update(Group(table, Text(), *lines), refresh=True)
