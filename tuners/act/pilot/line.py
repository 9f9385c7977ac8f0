"""The pilot's connection to the process that tunes: a local socket, asked between two steps, and
environment variables that bring it into a process.

What only a run with training steps needs is imported late: every process of a command that loads
torch imports this module, and what starts a command needs no PyTorch.
"""

from __future__ import annotations

import contextlib
import os
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.cache.config import Config
from advisor.tuners.act.pilot.orders import Lap, Order, stopped

if TYPE_CHECKING:
    from advisor.tuners.act.pilot.seen import Seen

# Where the tuning process listens, and the secret that it shares with its children.
ADDRESS, SECRET = "ADVISOR_PILOT", "ADVISOR_PILOT_KEY"
RUN = "ADVISOR_RUN"  # the command of `advisor run`, and seconds for its tuning, as JSON
KEEP_CHECKPOINTS = "ADVISOR_KEEP_CHECKPOINTS"  # if set, checkpoints of a tuned run stay in place
MOST = 2**20  # bytes of an answer
OVER = "over"  # the outcome of a run in which nothing trains any more: no failure


def checkpoints() -> Path | None:
    """The scratch folder for checkpoints of a run that is tuned; None if they stay in place."""
    address = os.environ.get(ADDRESS)
    if not address or os.environ.get(KEEP_CHECKPOINTS):
        return None
    return Path(address).with_name("checkpoints")


def noted(address: str) -> str | None:
    """What a process failed with before its first steps; '' if none has, None if none has loaded
    torch."""
    try:
        return _note(address).read_text()
    except OSError:
        return None


def _note(address: str) -> Path:
    return Path(address).with_name("torch")


def bringing(injected: Path) -> dict[str, str]:
    """The variable that makes every Python of a command import the sitecustomize of a folder."""
    path = [str(injected), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}


class Line:
    """A Guide that asks the tuning process; without an answer the script goes on unmodified.

    Args:
        secret: that both sides know; None if the socket is in a folder of this user's alone.
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
        self._connect()
        return self._ask("seen", seen)

    def next(self, lap: Lap) -> Order:
        return self._ask("lap", lap)

    def failed(self, exc: BaseException) -> None:
        from advisor.tuners.faults import failure, plausible

        why = stopped(exc)
        if why in ("brief", "untrained"):
            return
        own = not (why or plausible(exc))
        outcome, said = failure(exc)
        if why == "over":
            outcome = OVER
        if why == "unclear":
            self._connect()
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                self._send({"failed": {"outcome": outcome, "reason": said, "own": own}})
        # It may be a process that only tries whether something works: nothing ends for it. The one
        # that started it may fail because of it, and says less.
        elif not noted(self._address):
            self._note(said)

    def ended(self, *_: object, **_named: object) -> None:
        """The tuning process hears of it by `failed`, or by the lap."""

    gave_up = lost = ended

    def _connect(self) -> None:
        """Nobody listens once all processes of the job are connected."""
        with contextlib.suppress(OSError, EOFError, AuthenticationError):
            self._pipe = Client(self._address, authkey=self._secret)

    def _ask(self, what: str, message: Seen | Lap) -> Order:
        import msgpack

        from advisor.cache.codec import from_plain, to_plain

        if self._pipe is None:
            return Order(config=Config())
        try:
            self._send({what: to_plain(message)})
            if not self._pipe.poll(self._patience_s):
                raise TimeoutError
            return from_plain(Order, msgpack.unpackb(self._pipe.recv_bytes(MOST)))
        except (OSError, EOFError):
            # If one process of a job goes on alone, the others must hear of it.
            self._pipe.close()
            self._pipe = None
            return Order(config=Config())

    def _send(self, message: dict[str, Any]) -> None:
        import msgpack

        assert self._pipe is not None
        self._pipe.send_bytes(msgpack.packb(message))

    def _note(self, said: str) -> None:
        with contextlib.suppress(OSError):
            _note(self._address).write_text(said)


def from_environment() -> Line | None:
    """The line to the tuning process that started this one, if any."""
    address = os.environ.get(ADDRESS)
    return Line(address, bytes.fromhex(os.environ[SECRET])) if address else None
