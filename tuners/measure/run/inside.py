"""A run that goes on after its tuning: measured with care, and never started anew."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from advisor.cache.config import Config
from advisor.errors import WorkerError
from advisor.tuners.measure.place import UNVERIFIED, Block, Compared
from advisor.tuners.measure.run.run import Run, comparison
from advisor.tuners.measure.run.session import Ended, Flight

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
    """A script that goes on: a config that fails costs a step of it, nothing else."""

    def __init__(self, running: Joined, command: Sequence[str], *, log: Path) -> None:
        super().__init__(command, injected=Path(), log=log)
        self._running = running
        self._flight: Flight | None = None

    def block(self, config: Config, steps: int, *, warm: int = 1, deadline_s: float) -> Block:
        """As `Place.block`; its deadline cannot be kept, as the script computes.

        Raises:
            ConfigFailed: the config failed. WorkerError: the script is over.
        """
        del deadline_s
        until = time.monotonic() + PATIENT_S
        try:
            return self._ensured(config, until).block(config, self.own, steps, warm, until)
        except Ended as exc:
            raise WorkerError(f"the script is over: {exc}") from exc

    def compare(self, config: Config, *, deadline_s: float) -> Compared:
        """As `Place.compare`; unverified where the run might not be the same afterwards.

        Raises:
            WorkerError: the script is over.
        """
        until = time.monotonic() + PATIENT_S
        asked = comparison(config, self.own, self.tolerance, deadline_s)
        try:
            found = self._ensured(config, until).compare(asked, self.own, until)
        except Ended as exc:
            raise WorkerError(f"the script is over: {exc}") from exc
        if found.outcome in ("ok", "wrong"):
            return found
        return Compared(UNVERIFIED, found.reason)

    def leave(self, config: Config, found: str) -> None:
        """Have the script train on with a config, as long as it likes."""
        until = time.monotonic() + PATIENT_S
        self._ensured(config, until).leave(config, self.own, found)

    def stop(self) -> None:
        """The script waits for what it is to go on with: see `leave`."""

    def _ensured(self, config: Config, until: float) -> Flight:
        if self._flight is None:
            start_s = until - time.monotonic()
            self._flight = Flight(self._running, start_s=start_s, log=self._log, real=True)
            self._sessions[self._words(config)] = self._flight
        return self._flight
