"""A pilot's line to the process that tunes: a local socket, asked at the boundaries of steps.

What only a run with training steps needs is imported where it is needed: a command's every process
that loads torch gets this far.
"""

from __future__ import annotations

import contextlib
import os
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from typing import TYPE_CHECKING, Any

from advisor.cache.config import Config
from advisor.tuners.act.pilot.crew import Brief, Over, Unclear, Untrained
from advisor.tuners.act.pilot.orders import Lap, Order, plausible, told
from advisor.tuners.act.pilot.variables import ADDRESS, SECRET, note, noted

if TYPE_CHECKING:
    from advisor.tuners.act.pilot.seen import Seen

MOST = 2**20
OVER = "over"
"""What a failure is called that is none: there is no more to train."""


class Line:
    """A Guide that asks the tuning process; without it the script goes on as it is.

    Args:
        secret: that both sides know; None where the socket lies in a folder of this user's alone.
        patience_s: how long an answer may take; None: for ever.
    """

    def __init__(
        self, address: str, secret: bytes | None, *, patience_s: float | None = None
    ) -> None:
        self._address, self._secret = address, secret
        self._patience_s = patience_s
        self._pipe: Connection | None = None
        self._note("")

    def takes_over(self) -> bool:
        """As `Guide.takes_over`: an advice that the script follows is part of the script."""
        from advisor.tuners.act.following import followed
        from advisor.tuners.act.in_force import IN_FORCE

        if not followed():
            IN_FORCE.release()
        return True

    def begin(self, seen: Seen) -> Order:
        """As `Guide.begin`."""
        self._connect()
        return self._ask("seen", seen)

    def next(self, lap: Lap) -> Order:
        """As `Guide.next`."""
        return self._ask("lap", lap)

    def failed(self, exc: BaseException) -> None:
        """As `Guide.failed`."""
        if isinstance(exc, Brief | Untrained):
            return
        outcome, said = _located(exc)
        own = not (isinstance(exc, Over | Unclear) or plausible(exc))
        if isinstance(exc, Over):
            outcome, said = OVER, str(exc)
        if isinstance(exc, Unclear):
            said = str(exc)
            self._connect()
        if self._pipe is None:
            # It may be a process that only looks whether something works: nothing ends for it. What
            # started this one may fail of that too, and says less.
            if not noted(self._address):
                self._note(said)
            return
        with contextlib.suppress(OSError):
            self._send(self._pipe, {"failed": {"outcome": outcome, "reason": said, "own": own}})

    def ended(self, exc: BaseException, order: Order) -> None:
        """As `Guide.ended`: it was told that the script failed."""

    def gave_up(self, exc: BaseException) -> None:
        """As `Guide.gave_up`: the tuning process has no part in what comes after it."""

    def lost(self, exc: Exception, order: Order) -> None:
        """As `Guide.lost`: the lap says so."""

    def _connect(self) -> None:
        """Leaves no pipe where nobody listens: all processes of the job are there already."""
        with contextlib.suppress(OSError, EOFError, AuthenticationError):
            self._pipe = Client(self._address, authkey=self._secret)

    def _ask(self, what: str, message: Seen | Lap) -> Order:
        import msgpack

        from advisor.cache.codec import from_plain, to_plain

        if self._pipe is None:
            return Order(config=Config())
        try:
            self._send(self._pipe, {what: to_plain(message)})
            if not self._pipe.poll(self._patience_s):
                raise TimeoutError
            return from_plain(Order, msgpack.unpackb(self._pipe.recv_bytes(MOST)))
        except (OSError, EOFError):
            # Where one process of a job goes on alone, the others are to hear of it.
            self._close()
            return Order(config=Config())

    def _close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def _note(self, said: str) -> None:
        with contextlib.suppress(OSError):
            note(self._address).write_text(said)

    @staticmethod
    def _send(pipe: Connection, message: dict[str, Any]) -> None:
        import msgpack

        pipe.send_bytes(msgpack.packb(message))


def _located(exc: BaseException) -> tuple[str, str]:
    """(Outcome, reason) of what a script raised, with file and line."""
    from advisor.tuners import faults

    outcome, said = told(exc)
    if faults.CAUGHT.search(str(exc)):
        return outcome, faults.told(exc)
    return outcome, f"{said} ({at})" if (at := faults.where(exc)) else said


def from_environment() -> Line | None:
    """The line to the tuning process that started this one, if any."""
    address = os.environ.get(ADDRESS)
    return Line(address, bytes.fromhex(os.environ[SECRET])) if address else None
