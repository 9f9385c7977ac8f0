"""Messages between the pilot and its guide, and the local socket to a guide in another process.

Modules that only training processes need are imported late: every process of a command that loads
torch imports this module, and the process that starts a command needs no PyTorch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from advisor.cache.config import Config
from advisor.cache.domain import Amount, Bytes, Count, Seconds
from advisor.cache.limit import Limit

if TYPE_CHECKING:
    from advisor.tuners.act.pilot.script_facts import ScriptFacts

# Where the tuning process listens, and the secret that it shares with its children.
ADDRESS, SECRET = "ADVISOR_PILOT", "ADVISOR_PILOT_KEY"
RUN = "ADVISOR_RUN"  # the command of `advisor run`, and seconds for its tuning, as JSON
LEAST_MEMORY = "ADVISOR_LEAST_MEMORY"  # knobs that save memory from the first step on
MAX_MEMORY = "ADVISOR_MAX_MEMORY"  # bytes of the device that a tuned run may use
KEEP_CHECKPOINTS = "ADVISOR_KEEP_CHECKPOINTS"  # if set, checkpoints of a tuned run stay in place
MAX_MESSAGE_BYTES = 64 * 2**20
MAX_REQUEST_BYTES = 2**20  # of an answer to a pilot
TRAINING_OVER = "over"  # outcome: no process trains any more, without a failure
UNCLEAR = "unclear"  # outcome: advisor cannot tell what trains


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest:
    """A candidate to compare with strict fp32, within `left_s` seconds. `tolerance`: the always
    allowed error, as part of fp32's loss. `checks`: the candidate is the unmodified script, so fp32
    is without its own autocast, and `BlockResult.faults` names what else is wrong. With `passes`,
    the candidate repeats one call with `batch` samples so many times instead."""

    fp32: Config
    candidate: Config
    tolerance: Seconds
    left_s: Seconds
    checks: bool = False
    batch: Count = 0
    passes: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRequest:
    """Train with a config. The pilot asks again after `steps` steps; 0: the last request."""

    config: Config
    steps: Count = 0
    warm: Count = 0  # untimed steps before the timed ones; in the last request as many are timed
    # The script's own config; empty: leave the script alone.
    own: Config = Config()  # noqa: RUF009 # immutable
    needs_room: bool = False  # set the config only if memory is free for it
    compare: CompareRequest | None = None  # compare first, on unmodified steps
    forget: Config | None = None  # a config whose compiled code is freed first
    found: str = ""  # text: the result of the tuning, in the last request
    saves: str = ""  # a file to save compiled code to
    losses: bool = False  # report the losses of all steps
    limits: bool = False  # report what slows the unmodified script down
    ranks: bool = False  # report what the timed steps wait for


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """A step of one rank. `waits_s`: in exchanges while nothing is computed: for the data to
    arrive, and before that for ranks that come later. `loads_s`: for the loader."""

    step_s: Seconds
    waits_s: Seconds
    loads_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSteps:
    """Some steps in a row with one config, of one process or of a job's processes together."""

    steps: Count = 0  # that were timed
    samples: Count = 0  # in these steps
    seconds: Seconds = 0.0  # wall clock, the device synchronized at both ends
    first_s: Seconds = 0.0  # of building and untimed steps, if they switched to another config
    waited_s: Seconds = 0.0  # of `seconds`, waiting for data
    extra_s: Seconds = 0.0  # of `seconds`, recomputing and copying activations to save memory
    peak_bytes: Bytes = 0  # of device memory since the switch to the config
    compiled: Count = 0  # graphs that torch.compile made within the timed steps
    loader_load: Amount = 0.0  # batches taken, over those that workers can make in `seconds`
    prefetched: Count = 0  # batches that the loader's workers have ready or are loading
    joules: Amount = 0.0  # of the GPUs; 0 if one has no counter
    counted: Config = Config()  # noqa: RUF009 # immutable; as of `StepFlops.end`, and `epoch`
    losses: tuple[float, ...] = ()  # of each step, untimed ones too: the sum over its backwards


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockResult(TimedSteps):
    """The timed steps of one request, in one process."""

    outcome: str = "ok"  # or how the config failed; the script then went on without it
    reason: str = ""
    blames: str = ""  # as in `Compared`, like outcome and reason after a comparison
    faults: tuple[str, ...] = ()  # of the unmodified script, as sentences, once it is checked
    watches: bool = False  # whether later steps may show another fault
    limits: tuple[Limit, ...] = ()  # over all such requests
    ranks: tuple[RankStep, ...] = ()  # of this process, if asked for


class Guide(Protocol):
    """Decides which config is next; the same one in all processes of a job."""

    def saves_memory(self, device: str) -> Collection[str]:
        """The knobs by which steps on a device save memory until the first request."""

    def takes_over(self) -> bool:
        """Whether to tune a script that may use an Advice itself. Resets the Advice's flags."""

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        """The first request."""

    def next(self, result: BlockResult) -> BlockRequest:
        """The next request, once the steps of the last are over."""

    def failed(self, exc: BaseException) -> None:
        """Note the exception with which the script, or the pilot, ends."""

    def script_failed(self, exc: BaseException, request: BlockRequest) -> None:
        """Note the exception, already printed, that ended the script under a request's config."""

    def config_dropped(self, exc: BaseException) -> None:
        """Note an exception of the last request's config; the script goes on without the config."""

    def backward_failed(self, exc: Exception, request: BlockRequest) -> None:
        """Note an exception of backward under a request's config; it may end the script."""


def send(pipe: Connection, message: dict[str, Any]) -> None:
    import msgpack

    pipe.send_bytes(msgpack.packb(message))


def receive(pipe: Connection, most: int = MAX_MESSAGE_BYTES) -> dict[str, Any]:
    """The next message. Raises EOFError or OSError without another side, ValueError if invalid."""
    import msgpack

    message = msgpack.unpackb(pipe.recv_bytes(most))
    if not isinstance(message, dict):
        raise ValueError(f"expected a map, got {type(message).__name__}")
    return message


def checkpoints() -> Path | None:
    """The scratch folder for checkpoints of a run that is tuned; None if they stay in place."""
    address = os.environ.get(ADDRESS)
    if not address or os.environ.get(KEEP_CHECKPOINTS):
        return None
    return Path(address).with_name("checkpoints")


def startup_failure(address: str) -> str | None:
    """Why a process failed before its first steps; '' if none did, None if none loaded torch,
    UNSTEPPED if one trained without an optimizer."""
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
    `secret`: known to both sides; None if only this user can open the socket's folder.
    `patience_s`: seconds that an answer may take; None: any time."""

    def __init__(
        self, address: str, secret: bytes | None, *, patience_s: float | None = None
    ) -> None:
        self._address, self._secret = address, secret
        self._patience_s = patience_s
        self._pipe: Connection | None = None
        self._note("")

    def saves_memory(self, device: str) -> Collection[str]:
        return os.environ.get(LEAST_MEMORY, "").split()

    def takes_over(self) -> bool:
        """As `Guide.takes_over`, but an Advice that the script uses is part of it and stays."""
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
        from advisor.tuners import faults
        from advisor.tuners.act import ranks

        why = faults.stopped(exc)
        if why == "brief" or type(exc).__name__ == "ChildFailedError":  # torchrun's: names no cause
            return
        own = not (why or faults.lost_rank(exc) or faults.may_be_config_error(exc))
        outcome, said = faults.failure(exc)
        if not why:
            said = ranks.named() + said
        if why in (TRAINING_OVER, UNCLEAR):
            outcome = why
        if why in (UNCLEAR, "broken"):
            self._connect()
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                told = {"outcome": outcome, "reason": said, "own": own}
                send(self._pipe, {"failed": told | {"follows": bool(faults.lost_rank(exc))}})
        # It may be a helper process, whose failure need not end the run. The first note stays: a
        # parent process that fails because of its child says less.
        elif startup_failure(self._address) in (None, "", faults.UNSTEPPED):
            self._note(said)

    def script_failed(self, *_: object, **_named: object) -> None:
        """Do nothing: the tuning process learns this from `failed`, or from the result."""

    config_dropped = backward_failed = script_failed

    def _connect(self) -> None:
        """Connect, unless all processes of the job are connected: then nobody listens."""
        with contextlib.suppress(OSError, EOFError, AuthenticationError):
            self._pipe = Client(self._address, authkey=self._secret)

    def _ask(self, what: str, message: ScriptFacts | BlockResult) -> BlockRequest:
        from advisor.cache.codec import from_plain, to_plain

        if self._pipe is None:
            return BlockRequest(config=Config())
        try:
            send(self._pipe, {what: to_plain(message)})
            if not self._pipe.poll(self._patience_s):
                raise TimeoutError
            return from_plain(BlockRequest, receive(self._pipe, MAX_REQUEST_BYTES))
        except (OSError, EOFError):
            # Closing tells the other processes of a job that this one goes on alone.
            self._pipe.close()
            self._pipe = None
            return BlockRequest(config=Config())

    def _note(self, said: str) -> None:
        with contextlib.suppress(OSError):
            _note(self._address).write_text(said)


def from_environment() -> PilotClient | None:
    """A client of the tuning process that started this one, if any."""
    address = os.environ.get(ADDRESS)
    return PilotClient(address, bytes.fromhex(os.environ[SECRET])) if address else None
