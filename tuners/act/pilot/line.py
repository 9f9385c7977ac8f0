"""A pilot's line to the process that tunes: a local socket, asked at the boundaries of steps.

What only a run with training steps needs is imported where it is needed: a command's every process
that loads torch gets this far.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from advisor.cache.config import Config
from advisor.tuners.act.pilot.orders import Lap, Order, told

if TYPE_CHECKING:
    from advisor.tuners.act.pilot.seen import Seen

ADDRESS, SECRET = "ADVISOR_PILOT", "ADVISOR_PILOT_KEY"
"""Environment variables: where the tuning process listens, and what it knows its children by."""
RUN = "ADVISOR_RUN"
"""The same: the command that `advisor run` started, and seconds for its tuning, as JSON."""
MOST = 2**20


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
        self._pipe: Any = None

    def takes_over(self) -> bool:
        """As `Guide.takes_over`: an advice that the script follows is part of the script."""
        from advisor.tuners.act.following import followed
        from advisor.tuners.act.in_force import IN_FORCE

        if not followed():
            IN_FORCE.release()
        return True

    def begin(self, seen: Seen) -> Order:
        """As `Guide.begin`."""
        from multiprocessing.connection import Client

        self._pipe = Client(self._address, authkey=self._secret)
        return self._ask("seen", seen)

    def next(self, lap: Lap) -> Order:
        """As `Guide.next`."""
        return self._ask("lap", lap)

    def failed(self, exc: BaseException) -> None:
        """As `Guide.failed`."""
        outcome, reason = told(exc)
        self._send({"failed": {"outcome": outcome, "reason": reason}})

    def _ask(self, what: str, message: Seen | Lap) -> Order:
        import msgpack

        from advisor.cache.codec import from_plain, to_plain

        try:
            self._send({what: to_plain(message)})
            if self._pipe is None or not self._pipe.poll(self._patience_s):
                raise TimeoutError
            return from_plain(Order, msgpack.unpackb(self._pipe.recv_bytes(MOST)))
        except (OSError, EOFError):
            return Order(config=Config(), own=Config())

    def _send(self, message: dict[str, Any]) -> None:
        import msgpack

        if self._pipe is not None:
            self._pipe.send_bytes(msgpack.packb(message))


def from_environment() -> Line | None:
    """The line to the tuning process that started this one, if any."""
    address = os.environ.get(ADDRESS)
    return Line(address, bytes.fromhex(os.environ[SECRET])) if address else None
