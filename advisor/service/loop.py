"""What a server does again and again beside answering, in a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from advisor.errors import StoreError

PERIODS, LEAST_S = 5, 120.0
"""After so many periods, and not before so long, a loop is late: an executor may take its time to
say that it is away."""
_log = logging.getLogger("advisor")


class Loop:
    """A database that is away it survives; an error that nobody foresaw ends it, and is seen.

    Args:
        name: for people.
        every_s: its period, which begins when a turn is done.
        turn: may raise StoreError, which is told once as long as it stays the same.
        now: a clock in seconds.
    """

    def __init__(
        self,
        name: str,
        every_s: float,
        turn: Callable[[], None],
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self._every_s, self._turn, self._now = name, every_s, turn, now
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._came = now()
        self._told = ""

    def start(self) -> None:
        self._came = self._now()
        self._thread.start()

    def close(self) -> None:
        """The turn that it is in is its last."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def trouble(self) -> str:
        """Why nobody should rely on it, for people; '' where it comes round."""
        if self._closing.is_set():
            return ""
        if not self._thread.is_alive():
            return f"the {self.name} has ended; the server's log says why"
        late_s = self._now() - self._came
        if late_s > max(PERIODS * self._every_s, LEAST_S):
            return f"the {self.name} has not come round for {late_s:.0f} s"
        return ""

    def once(self) -> None:
        """One turn."""
        told = ""
        try:
            self._turn()
        except StoreError as exc:
            told = str(exc)
            if told != self._told:
                _log.warning("%s: %s", self.name, told)
        self._told = told
        self._came = self._now()

    def _run(self) -> None:
        while not self._closing.is_set():
            self.once()
            self._closing.wait(self._every_s)
