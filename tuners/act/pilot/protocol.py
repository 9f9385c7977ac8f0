"""What the pilot and its guide exchange, and the local socket to a guide in another process.

What only a run with training steps needs is imported late: every process of a command that loads
torch imports this module, and what starts a command needs no PyTorch.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from advisor.cache.config import Config
from advisor.cache.domain import Bytes, Count, Seconds, Share

if TYPE_CHECKING:
    from advisor.tuners.act.pilot.script_facts import ScriptFacts

# Where the tuning process listens, and the secret that it shares with its children.
ADDRESS, SECRET = "ADVISOR_PILOT", "ADVISOR_PILOT_KEY"
RUN = "ADVISOR_RUN"  # the command of `advisor run`, and seconds for its tuning, as JSON
KEEP_CHECKPOINTS = "ADVISOR_KEEP_CHECKPOINTS"  # if set, checkpoints of a tuned run stay in place
MAX_MESSAGE_BYTES = 2**20  # bytes of an answer
TRAINING_OVER = "over"  # the outcome of a run in which nothing trains any more: no failure


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest:
    """A candidate to compare with strict fp32, within `left_s` seconds. `plain` has only its number
    format; `tolerance` is the fraction of fp32's loss that is always allowed."""

    fp32: Config
    plain: Config
    candidate: Config
    tolerance: Seconds
    left_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRequest:
    """Train on with a config. The pilot asks again after `steps` steps; after 0 it never does."""

    config: Config
    steps: Count = 0
    warm: Count = 0  # untimed steps before them
    # The script's own; empty: it is left alone.
    own: Config = Config()  # noqa: RUF009 # immutable
    needs_room: bool = False  # set the config only if memory is free for it
    compare: CompareRequest | None = None  # if need be on unmodified steps
    forget: Config | None = None  # free its compiled code first
    found: str = ""  # what was measured of the last request's config
    saves: str = ""  # a file for the artifacts of compilation


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockResult:
    """The timed steps of one request."""

    steps: Count = 0
    samples: Count = 0  # of this process
    seconds: Seconds = 0.0  # wall clock, including the device's work
    first_s: Seconds = 0.0  # of the untimed steps, if the request switched to another config
    waited_s: Seconds = 0.0  # for data
    peak_bytes: Bytes = 0
    compiled: Count = 0  # graphs that torch.compile made
    drained_share: Share = 0.0  # by which the backlog of the loader's workers grew
    prefetched: Count = 0  # batches that workers are asked for at a time
    outcome: str = "ok"  # or how the config failed, without which the script then went on
    reason: str = ""
    blames: str = ""  # as in `Compared`, whose result a comparison has here


class Guide(Protocol):
    """Decides which config is next; the same one in all processes of a job."""

    def takes_over(self) -> bool:
        """Whether to act on a script, which may follow advice by itself. Resets advice's flags."""

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        """The first request."""

    def next(self, result: BlockResult) -> BlockRequest:
        """The next request, once the steps of the last are over."""

    def failed(self, exc: BaseException) -> None:
        """The script, or the pilot, ends with this."""

    def script_failed(self, exc: BaseException, request: BlockRequest) -> None:
        """The script has ended with this under a request's config, and it was printed."""

    def config_dropped(self, exc: BaseException) -> None:
        """The config that was to stay has raised this; the script goes on without it."""

    def backward_failed(self, exc: Exception, request: BlockRequest) -> None:
        """Backward has raised this under a request's config; the script gets it, and may end."""


def checkpoints() -> Path | None:
    """The scratch folder for checkpoints of a run that is tuned; None if they stay in place."""
    address = os.environ.get(ADDRESS)
    if not address or os.environ.get(KEEP_CHECKPOINTS):
        return None
    return Path(address).with_name("checkpoints")


def startup_failure(address: str) -> str | None:
    """What a process failed with before its first steps; '' if none has, None if none has loaded
    torch."""
    try:
        return _note(address).read_text()
    except OSError:
        return None


def _note(address: str) -> Path:
    return Path(address).with_name("torch")


def injection_environment(injected: Path) -> dict[str, str]:
    """The variable that makes every Python of a command import the sitecustomize of a folder."""
    path = [str(injected), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}


class PilotClient:
    """A Guide that asks the tuning process; without an answer the script goes on unmodified.
    `secret`: that both sides know; None if the socket is in a folder of this user's alone.
    `patience_s`: how long an answer may take; None: for ever."""

    def __init__(
        self, address: str, secret: bytes | None, *, patience_s: float | None = None
    ) -> None:
        self._address, self._secret = address, secret
        self._patience_s = patience_s
        self._pipe: Connection | None = None
        self._note("")

    def takes_over(self) -> bool:
        """As `Guide.takes_over`: an advice that the script follows is part of the script."""
        from advisor.tuners.act.advice_usage import is_followed
        from advisor.tuners.act.process_flags import PROCESS_FLAGS

        if not is_followed():
            PROCESS_FLAGS.release()
        return True

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        self._connect()
        return self._ask("seen", seen)

    def next(self, result: BlockResult) -> BlockRequest:
        return self._ask("lap", result)

    def failed(self, exc: BaseException) -> None:
        from advisor.tuners.faults import failure, may_be_config_error, stopped

        why = stopped(exc)
        if why in ("brief", "untrained"):
            return
        own = not (why or may_be_config_error(exc))
        outcome, said = failure(exc)
        if why == "over":
            outcome = TRAINING_OVER
        if why == "unclear":
            self._connect()
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                self._send({"failed": {"outcome": outcome, "reason": said, "own": own}})
        # It may be a process that only tries whether something works: nothing ends for it. The one
        # that started it may fail because of it, and says less.
        elif not startup_failure(self._address):
            self._note(said)

    def script_failed(self, *_: object, **_named: object) -> None:
        """The tuning process hears of it by `failed`, or by the result."""

    config_dropped = backward_failed = script_failed

    def _connect(self) -> None:
        """Nobody listens once all processes of the job are connected."""
        with contextlib.suppress(OSError, EOFError, AuthenticationError):
            self._pipe = Client(self._address, authkey=self._secret)

    def _ask(self, what: str, message: ScriptFacts | BlockResult) -> BlockRequest:
        import msgpack

        from advisor.cache.codec import from_plain, to_plain

        if self._pipe is None:
            return BlockRequest(config=Config())
        try:
            self._send({what: to_plain(message)})
            if not self._pipe.poll(self._patience_s):
                raise TimeoutError
            return from_plain(
                BlockRequest, msgpack.unpackb(self._pipe.recv_bytes(MAX_MESSAGE_BYTES))
            )
        except (OSError, EOFError):
            # If one process of a job goes on alone, the others must hear of it.
            self._pipe.close()
            self._pipe = None
            return BlockRequest(config=Config())

    def _send(self, message: dict[str, Any]) -> None:
        import msgpack

        assert self._pipe is not None
        self._pipe.send_bytes(msgpack.packb(message))

    def _note(self, said: str) -> None:
        with contextlib.suppress(OSError):
            _note(self._address).write_text(said)


def from_environment() -> PilotClient | None:
    """A client of the tuning process that started this one, if any."""
    address = os.environ.get(ADDRESS)
    return PilotClient(address, bytes.fromhex(os.environ[SECRET])) if address else None
