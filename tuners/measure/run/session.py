"""One start of a command, and the pilots in it: they are told which steps to make, and answer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import msgpack

from advisor.cache.codec import from_plain, to_plain
from advisor.cache.config import Config
from advisor.errors import RecordDamaged
from advisor.tuners.act.pilot.line import OVER
from advisor.tuners.act.pilot.orders import Comparison, Lap, Order
from advisor.tuners.act.pilot.seen import Seen
from advisor.tuners.decisions import LEAST_STEPS
from advisor.tuners.measure.place import Block, Compared, ConfigFailed
from advisor.tuners.measure.run.command import Command
from advisor.tuners.measure.run.guarded import how

LOOK_S = 0.2
"""Between two looks whether a command that says nothing still runs."""
TOGETHER_S = 60.0
"""Between the processes of a job that come to their first steps."""
END_S = 15.0
"""For a command one of whose processes is gone to be over."""
GONE_OF_SEVERAL = "one of its processes is gone, others are not"
GONE = (
    "the process that trained is gone, and the command goes on without it; of a command that "
    "starts several in turn give the one that trains"
)
LONGER = "give a command that trains for longer"
SOONER = "give a larger --budget, or a command that comes to its steps sooner"
MEND = "mend that first"


class Ended(Exception):
    """The command is over, makes no steps any more, or answers nonsense.

    Attributes:
        outcome: as in `Measurement`.
        code: 0 where it ended well.
        said: how it ended before its first steps.
        own: whether it ended as a script does rather by itself.
    """

    def __init__(
        self, outcome: str, reason: str, code: int = 1, said: str = "", *, own: bool = False
    ) -> None:
        super().__init__(reason)
        self.outcome, self.code, self.said, self.own = outcome, code, said, own


class Running(Protocol):
    """What runs with pilots inside; a Command is one."""

    @property
    def ended(self) -> bool:
        """Whether it is over by itself."""

    def accepted(self, seconds: float) -> Connection | None:
        """The line to a pilot, if one comes within so long."""

    @property
    def note(self) -> str | None:
        """As `Command.note`."""

    def whole(self) -> None:
        """All processes of the job are there."""

    def obituary(self) -> tuple[int, str]:
        """(Exit code, the last line that it printed), once it is over."""

    def end(self) -> None:
        """Have no more to do with it."""


class Flight:
    """The pilots in what runs: its processes wait for orders between two blocks.

    Args:
        start_s: until its first steps, at most.
        log: what it prints goes to that; None where it was shown as it came.
        real: it is the user's real run, which nothing may end and whose memory is scarce.

    Attributes:
        made: steps that it was told to make, those included that it did not come to.

    Raises:
        Ended: it was over before its first steps, or none came in time.
    """

    def __init__(
        self, command: Running, *, start_s: float, log: Path | None, real: bool = False
    ) -> None:
        self._log, self._real = log, real
        self._failed: dict[str, Any] = {}
        self.made = 0
        self._pipes: list[Connection] = []
        self._command = command
        self._forget: Config | None = None
        try:
            self.seen = self._all_seen(time.monotonic() + start_s, start_s)
            self._command.whole()
        except BaseException:
            self.end()
            raise

    @property
    def over(self) -> bool:
        """Whether it is over by itself."""
        return self._command.ended

    def block(self, config: Config, own: Config, steps: int, warm: int, until: float) -> Block:
        """Have every process make these steps with a config.

        Args:
            own: what the script does itself.
            until: by time.monotonic(), when it is given up.

        Raises:
            Ended: it is over. ConfigFailed: the config failed, and the command goes on.
        """
        laps = self._laps(Order(config=config, steps=steps, warm=warm, own=own), until)
        slowest = max(laps, key=lambda lap: lap.seconds)
        return Block(
            steps=slowest.steps,
            samples=sum(lap.samples for lap in laps),
            seconds=slowest.seconds,
            first_s=max(lap.first_s for lap in laps),
            waited_s=max(lap.waited_s for lap in laps),
            peak_bytes=max(lap.peak_bytes for lap in laps),
            compiled=max(lap.compiled for lap in laps),
            borrowed=max(borrowed(lap.taken, lap.lent) for lap in laps),
        )

    def compare(self, asked: Comparison, own: Config, until: float) -> Compared:
        """Have every process compare a config; the first that objects decides.

        Raises:
            Ended: it is over.
        """
        order = Order(config=own, steps=1, own=own, compare=asked)
        try:
            laps = self._laps(order, until, strict=False)
        except ConfigFailed as exc:
            return Compared(exc.outcome, str(exc))
        worst = next((lap for lap in laps if lap.outcome != "ok"), laps[0])
        return Compared(worst.outcome, worst.reason, worst.blames)

    def forget(self, config: Config) -> None:
        """Free what a config has compiled, with the next order."""
        self._forget = config

    def save(self, file: Path, own: Config, until: float) -> None:
        """Have the first process save what it has compiled.

        Raises:
            Ended: it is over.
        """
        self._laps(Order(config=own, steps=1, own=own, saves=str(file)), until)

    def leave(self, config: Config, own: Config, found: str) -> None:
        """Have it train on with a config; no order comes after this one. `found`: see `Order`."""
        self._tell(Order(config=config, own=own, found=found))

    def end(self) -> None:
        """End it, and everything it started."""
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()
        self._command.end()

    def _laps(self, order: Order, until: float, *, strict: bool = True) -> list[Lap]:
        forget, self._forget = self._forget, None
        order = dataclasses.replace(order, needs_room=self._real, forget=forget)
        self.made += order.warm + order.steps
        self._tell(order)
        laps = [self._heard(pipe, "lap", Lap, until) for pipe in self._pipes]
        for lap in laps if strict else ():
            if lap.outcome != "ok":
                raise ConfigFailed(lap.outcome, lap.reason, graphs=lap.graphs)
        return laps

    def _tell(self, order: Order) -> None:
        message = msgpack.packb(to_plain(order))
        try:
            for pipe in self._pipes:
                pipe.send_bytes(message)
        except OSError:
            raise self._why() from None

    def _all_seen(self, until: float, start_s: float) -> Seen:
        seen: list[Seen] = []
        while not seen or len(seen) < seen[0].processes:
            pipe = self._accepted(until, start_s)
            seen.append(self._heard(pipe, "seen", Seen, until))
            self._pipes.append(pipe)
            until = min(until, time.monotonic() + TOGETHER_S)
        return min(seen, key=lambda one: one.rank)

    def _accepted(self, until: float, start_s: float) -> Connection:
        while (pipe := self._command.accepted(LOOK_S)) is None:
            if self._command.ended:
                raise self._why()
            if time.monotonic() > until and self._pipes:
                came = f"{len(self._pipes)} of its processes came to their first steps, not all"
                raise Ended("timed_out", came)
            if time.monotonic() > until:
                raise Ended("timed_out", self._never(f"it has run for {start_s:.0f} s", SOONER))
        return pipe

    def _heard(self, pipe: Connection, what: str, cls: type[Any], until: float) -> Any:
        try:
            while not pipe.poll(LOOK_S):
                if self._command.ended and not pipe.poll(0):
                    raise self._why()
                if time.monotonic() > until:
                    raise Ended("timed_out", "the budget was over before it was measured")
            message = msgpack.unpackb(pipe.recv_bytes())
            if "failed" in message:
                self._failed = message["failed"]
                raise self._why()
            return from_plain(cls, message[what])
        except (EOFError, OSError):
            raise self._why() from None
        except (KeyError, ValueError, RecordDamaged) as exc:
            raise Ended("crashed", f"the pilot's answer made no sense: {exc}") from exc

    def _why(self) -> Ended:
        """Why the command is over, or one of its processes is."""
        if self._failed:
            outcome, reason = self._failed["outcome"], self._failed["reason"]
            if outcome == OVER:
                return Ended("failed", reason, 0)
            return Ended(outcome, reason, own=bool(self._failed.get("own")))
        until = time.monotonic() + END_S
        while not self._command.ended and time.monotonic() < until:
            time.sleep(0.05)
        if not self._command.ended:
            return Ended("crashed", GONE if len(self._pipes) == 1 else GONE_OF_SEVERAL)
        code, last = self._command.obituary()
        ended = f"ended with {how(code)}"
        if self._pipes:
            reason = f"the command {ended}{_after_colon(last)}"
            return Ended("crashed", reason, code, own=code > 0)
        note = self._command.note
        so_far = f"it {ended}{'' if note else _after_colon(last)}"
        never = self._never(so_far, MEND if code else LONGER)
        return Ended("failed", never, code or 1, f"it {ended}{_after_colon(note or last)}")

    def _never(self, so_far: str, mend: str) -> str:
        """What to say of a command in which no steps were seen; `mend`: what to do about it."""
        note = self._command.note
        if note:
            seen, mend = f"it failed before a step could be measured: {note}", MEND
        elif note is not None:
            seen = f"torch was imported, but no {LEAST_STEPS} steps of a torch.optim optimizer came"
        else:
            seen = "no process of the command has imported torch"
            mend = mend if mend == MEND else "give the command that trains, as you would type it"
        where = "See what it printed" if self._log is None else f"What it printed is in {self._log}"
        return f"{seen}; {so_far}. {where}; {mend}"


def borrowed(taken: int, lent: int) -> float:
    """Share of the batches taken from a loader whose workers were all busy and did not refill its
    queue meanwhile. A single batch may be chance."""
    if lent <= 1 or not taken:
        return 0.0
    return min(lent, taken - 1) / taken


def _after_colon(said: str) -> str:
    return f": {said}" if said else ""


class Session(Flight):
    """A command that is started here, and runs until `end`.

    Args:
        words: of the command; `log` for what it prints, which is `shown` as it comes or not.
        injected: the folder with the sitecustomize that brings the pilot.
        start_s: until its first steps, at most.

    Raises:
        UsageError: there is no such program.
        Ended: it was over before its first steps, or none came in time.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        injected: Path,
        log: Path,
        start_s: float,
        shown: bool = False,
    ) -> None:
        command = Command(words, injected=injected, log=log)
        super().__init__(command, start_s=start_s, log=None if shown else log)
