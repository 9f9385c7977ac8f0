"""The process that searches while a script trains: started by `advisor.finding.conducted`.

    python -m advisor.conducting < pipe

The first line of its input says what to do; once the input ends, the script has, and so does this.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.cache.config import Config, Value
from advisor.cache.record import PILOT, WITHIN, Provenance
from advisor.errors import AdvisorError
from advisor.finding.answer import gain
from advisor.opening import open_records
from advisor.tuners import knobs
from advisor.tuners.decisions import WORTH
from advisor.tuners.measure.run.run import AttachedRun
from advisor.tuners.measure.run.session import AttachedScript
from advisor.tuners.search.plan import Plan, Progress
from advisor.tuning import OfRun

if TYPE_CHECKING:
    from advisor.tuners.measure.worker.wire import Facts
    from advisor.tuners.search.space import Space
    from advisor.tuners.search.tuner import SearchOptions
    from advisor.tuning import Subject


class _OfRunInside(OfRun):
    """A run that goes on: nothing is tried that could end it, and nothing started anew."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        given = {name: _hashable(value) for name, value in told["given"].items()}
        plan = Plan.of({"budget": told["tune_s"]})
        records = open_records(told["cache"], fallback=True)
        super().__init__(told["command"], given, plan, records, _Said())
        listening = socket.socket(fileno=told["socket"])
        log = Path(told["folder"]) / "log"
        self.inside = AttachedRun(AttachedScript(listening), self._command, log=log)

    def begun(self) -> AttachedRun:
        return self.inside

    def space(self, situation: knobs.SearchContext) -> Space:
        found = super().space(situation)
        found.leave_out(_replays)
        return found

    def _without(self, space: Space) -> list[Config]:
        """Nothing: a real run keeps its own settings."""
        return []

    def _scope(self, subject: Subject, near: Sequence[Config], folder: Path) -> SearchOptions:
        """Only visits are made that the rest of the run pays for: it is taken to last as long again
        as it may be tuned, and what compiles to save a third of that."""
        scope = super()._scope(subject, near, folder)
        return dataclasses.replace(scope, most_s=WORTH * self._plan.seconds)

    def _provenance(self, facts: Facts, study: str, trials: int, seconds: float) -> Provenance:
        made = super()._provenance(facts, study, trials, seconds)
        return dataclasses.replace(made, effort=WITHIN)

    def search(self) -> None:
        """Find what is best, keep it, and have the script go on with it."""
        record = self.run().record
        self.inside.leave(record.winner(PILOT).config, gain(record, PILOT))


def _replays(name: str, value: Value) -> bool:
    """Whether a value captures: what reads a replay's outputs too late raises in the script."""
    return value in knobs.BY_NAME[name].graphs


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class _Said(Progress):
    """Into the log."""

    def notice(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")

    def warning(self, text: str) -> None:
        self.notice(text)


def _end_with_script(folder: str) -> None:
    """The script removes the folder where it goes on; what is there of a failure is for people."""
    sys.stdin.read()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main() -> int:
    told = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_script, args=[told["folder"]], daemon=True).start()
    try:
        _OfRunInside(told).search()
    except AdvisorError as exc:
        sys.stderr.write(f"advisor: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
