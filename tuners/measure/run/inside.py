"""A run that goes on after its tuning: measured with care, and never started anew."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from advisor.cache.config import Config
from advisor.cache.record import Measurement
from advisor.errors import WorkerError
from advisor.tuners.measure.first_step import ANEW, Compiled
from advisor.tuners.measure.run.repeated import comparison
from advisor.tuners.measure.run.run import Run
from advisor.tuners.measure.run.session import Ended, Flight, Struck

PATIENT_S = 3600.0
"""For the steps of a config: the script computes, and cannot be interrupted."""


class Joined:
    """A script that listens to this process, as `Flight` wants it.

    Args:
        listening: a socket, on which its processes call.
    """

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening

    @property
    def ended(self) -> bool:
        """Never, as seen from here: this process ends with it."""
        return False

    def accepted(self, seconds: float) -> Connection | None:
        """The line to a pilot, if one comes within so long."""
        if not wait([self._listening], seconds):
            return None
        return Connection(self._listening.accept()[0].detach())

    @property
    def note(self) -> str:
        """It has come as far as its first steps."""
        return ""

    def whole(self) -> None:
        """Nobody else calls."""

    def obituary(self) -> tuple[int, str]:
        """How it ended is not for this process to know."""
        return 1, ""

    def end(self) -> None:
        """It is left alone."""
        self._listening.close()


class Inside(Run):
    """A Tester of a script that goes on: a config that fails costs a step of it, nothing else."""

    hangs_s = PATIENT_S

    def __init__(self, running: Joined, command: Sequence[str], *, log: Path) -> None:
        super().__init__(command, injected=Path(), log=log, deadline_s=PATIENT_S)
        self._running = running
        self._flight: Flight | None = None

    def measure(
        self,
        config: Config,
        *,
        seconds: float,
        stage: str = "compute",
        keep: bool = False,
        floor: float = 0.0,
        deadline_s: float | None = None,
    ) -> Measurement:
        """As `Runner.measure`.

        Raises:
            WorkerError: the script is over.
        """
        del stage, keep, deadline_s
        try:
            until = time.monotonic() + PATIENT_S
            return self._measured(self._ensured(config), config, seconds, floor, until)
        except Struck as exc:
            return Measurement(outcome=exc.outcome, reason=str(exc))
        except Ended as exc:
            raise WorkerError(f"the script is over: {exc}") from exc

    def verify(
        self,
        config: Config,
        *,
        against: Config,
        steps: int,
        tolerance: float,
        deadline_s: float | None = None,
    ) -> Measurement:
        """As `Run.verify`; 'failed' where the run might not be the same afterwards.

        Raises:
            WorkerError: the script is over.
        """
        del steps, deadline_s
        asked = comparison(config, against, tolerance, tf32=self.memory > 0)
        try:
            return self._compared(asked, time.monotonic() + PATIENT_S)
        except Ended as exc:
            raise WorkerError(f"the script is over: {exc}") from exc

    def start(self, config: Config, *, deadline_s: float, compiled: Compiled = ANEW) -> Measurement:
        """Cannot be told: that takes a start."""
        return Measurement(outcome="failed", reason="a run that goes on is not started anew")

    def save(self, config: Config, file: Path) -> None:
        """As `Run.save`."""
        if self._flight is not None:
            until = time.monotonic() + PATIENT_S
            with contextlib.suppress(Ended, Struck):
                self._lap(self._flight, config, 1, until, Compiled(saves=file))

    def leave(self, config: Config, found: str) -> None:
        """Have the script train on with a config, as long as it likes."""
        self._ensured(config).leave(config, self.own, found)

    def stop(self) -> None:
        """The script waits for what it is to go on with: see `leave`."""

    def _ensured(self, config: Config) -> Flight:
        del config
        if self._flight is None:
            self._flight = Flight(self._running, log=self._log, careful=True)
        return self._flight
