"""A server's background loops, each in a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from advisor.errors import StoreError

LATE_PERIODS, LATE_LOOP_S = 5, 120.0
"""A loop is late after this many periods, but not before this many seconds."""
MAX_LOOP_PAUSE_S = 300.0  # the longest pause after failures; each failure in a row doubles it
_log = logging.getLogger("advisor")


class Loop(threading.Thread):
    """Repeats a function, with pauses of `every_s`. An exception is logged, and the next turn comes
    after a longer pause. A StoreError is logged once as long as it stays the same. `now` is a clock
    in seconds."""

    def __init__(
        self,
        name: str,
        every_s: float,
        turn: Callable[[], None],
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._every_s, self._turn, self._now = every_s, turn, now
        self._closing = threading.Event()
        self._last_turn, self.pause_s = now(), every_s
        self._store_error = self._failure = ""

    def run(self) -> None:
        while not self._closing.is_set():
            self.once()
            self._closing.wait(self.pause_s)

    def close(self) -> None:
        """Wait for the current turn, and start no other."""
        self._closing.set()
        if self.is_alive():
            self.join()

    @property
    def trouble(self) -> str:
        """What is wrong with this loop, for people; '' if nothing is."""
        if self._closing.is_set():
            return ""
        if self._failure:
            return f"the {self.name} failed ({self._failure}); see the server's log"
        late_s = self._now() - self._last_turn
        if late_s > max(LATE_PERIODS * self._every_s, LATE_LOOP_S):
            return f"the {self.name} has not finished a turn for {late_s:.0f} s"
        return ""

    def once(self) -> None:
        """Run one turn; log an exception instead of raising it."""
        store_error = failure = ""
        try:
            self._turn()
        except StoreError as exc:
            store_error = str(exc)
            if store_error != self._store_error:
                _log.warning("%s: %s", self.name, store_error)
        except Exception as exc:
            failure = type(exc).__name__
            _log.exception("the %s failed", self.name)
        self._store_error, self._failure = store_error, failure
        longer_s = min(2 * self.pause_s, MAX_LOOP_PAUSE_S) if failure else 0.0
        self.pause_s = max(self._every_s, longer_s)
        self._last_turn = self._now()
