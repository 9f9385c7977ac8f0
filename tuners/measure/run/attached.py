"""A run that goes on after its tuning: measured with care, and never started anew."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from advisor.cache.config import Config
from advisor.errors import WorkerError
from advisor.tuners.measure.place import UNVERIFIED, Block, Compared
from advisor.tuners.measure.run.command import AttachedScript
from advisor.tuners.measure.run.run import Run, comparison
from advisor.tuners.measure.run.session import Ended, Flight

PATIENT_S = 3600.0
"""For the steps of a config: the script computes, and cannot be interrupted."""
T = TypeVar("T")


class AttachedRun(Run):
    """A script that goes on: a config that fails costs a step of it, nothing else."""

    def __init__(self, script: AttachedScript, command: Sequence[str], *, log: Path) -> None:
        super().__init__(command, injected=Path(), log=log)
        self._script = script
        self._flight: Flight | None = None

    def block(self, config: Config, steps: int, *, warm: int = 1, deadline_s: float) -> Block:
        """As `Place.block`; the script computes, so the deadline cannot be kept.

        Raises:
            ConfigFailed: the config failed. WorkerError: the script is over.
        """
        del deadline_s
        return self._while_it_runs(
            config, lambda flight, until: flight.block(config, self.own, steps, warm, until)
        )

    def compare(self, config: Config, *, deadline_s: float) -> Compared:
        """As `Place.compare`; unverified where the run might not be the same afterwards.

        Raises:
            WorkerError: the script is over.
        """
        asked = comparison(config, self.own, self.tolerance, deadline_s)
        found = self._while_it_runs(
            config, lambda flight, until: flight.compare(asked, self.own, until)
        )
        if found.outcome in ("ok", "wrong"):
            return found
        return Compared(UNVERIFIED, found.reason)

    def leave(self, config: Config, found: str) -> None:
        """Have the script train on with a config, as long as it likes."""
        self._ensured(config, time.monotonic() + PATIENT_S).leave(config, self.own, found)

    def stop(self) -> None:
        """The script waits for what it is to go on with: see `leave`."""

    def _while_it_runs(self, config: Config, act: Callable[[Flight, float], T]) -> T:
        until = time.monotonic() + PATIENT_S
        try:
            return act(self._ensured(config, until), until)
        except Ended as exc:
            raise WorkerError(f"the script is over: {exc}") from exc

    def _ensured(self, config: Config, until: float) -> Flight:
        if self._flight is None:
            start_s = until - time.monotonic()
            self._flight = Flight(self._script, start_s=start_s, log=self._log, real=True)
            self._sessions[self._words(config)] = self._flight
        return self._flight
