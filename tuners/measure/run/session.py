"""One start of a command: tells its pilots which steps to make, and hears how they went."""

from __future__ import annotations

import dataclasses
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import msgpack

from advisor.cache.codec import from_plain, to_plain
from advisor.cache.config import Config
from advisor.errors import RecordDamaged
from advisor.tuners.act.pilot.line import OVER
from advisor.tuners.act.pilot.orders import Lap, Order
from advisor.tuners.act.pilot.seen import Seen
from advisor.tuners.decisions import LEAST_STEPS
from advisor.tuners.measure.place import Block, ConfigFailed
from advisor.tuners.measure.run.command import AttachedScript, Command
from advisor.tuners.measure.run.guarded import how

LOOK_S = 0.2  # between two looks at a silent command
TOGETHER_S = 60.0  # between the first steps of a job's first process and those of its last
END_S = 15.0  # for a command to end once one of its processes has
GONE_OF_SEVERAL = "one of its processes is gone, others are not"
GONE = (
    "the process that trained is gone, and the command goes on without it; of a command that "
    "starts several in turn give the one that trains"
)
LONGER = "give a command that trains for longer"
SOONER = "give a larger --budget, or a command that comes to its steps sooner"
MEND = "mend that first"
T = TypeVar("T")


class Ended(Exception):
    """The command is over, makes no more steps, or answers nonsense."""

    def __init__(
        self, outcome: str, reason: str, code: int = 1, said: str = "", *, own: bool = False
    ) -> None:
        super().__init__(reason)
        self.outcome = outcome  # as in `Measurement`
        self.code = code  # 0 where it ended well
        self.said = said  # how it ended before its first steps
        self.own = own  # a script more likely ends so by itself than because of a config


class Flight:
    """The pilots in a command that runs: its processes wait for orders between two blocks.

    Every method, the start too, may raise Ended; `until` is by time.monotonic().

    Args:
        start_s: until its first steps, at most.
        log: where its output goes; None where that was shown.
        real: it is the user's real run, which nothing may end and whose memory is scarce.
    """

    def __init__(
        self, command: Command | AttachedScript, start_s: float, log: Path | None, real: bool
    ) -> None:
        self._command, self._log, self._real = command, log, real
        self._pipes: list[Connection] = []
        self.forgotten: list[Config] = []  # each next order frees the code of one
        self.made = 0  # steps that it was told to make, also those that it did not reach
        try:
            self.seen = self._all_seen(start_s)  # by the first process
            command.whole()
        except BaseException:
            self.end()
            raise

    @property
    def over(self) -> bool:
        """The command is over by itself."""
        return self._command.ended

    def block(self, order: Order, until: float) -> Block:
        """Have every process make the order's steps; raises ConfigFailed where its config fails and
        the command goes on."""
        laps = self.laps(order, until)
        if lap := next((lap for lap in laps if lap.outcome != "ok"), None):
            raise ConfigFailed(lap.outcome, lap.reason)
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
            ahead=max(lap.ahead for lap in laps),
        )

    def laps(self, order: Order, until: float) -> list[Lap]:
        """What each process answers to an order."""
        forget = self.forgotten.pop(0) if self.forgotten else None
        self.made += order.warm + order.steps
        self.tell(dataclasses.replace(order, needs_room=self._real, forget=forget))
        return [self._heard(pipe, "lap", Lap, until) for pipe in self._pipes]

    def tell(self, order: Order) -> None:
        """Give an order to every process; to one of no steps there is no answer."""
        message = msgpack.packb(to_plain(order))
        try:
            for pipe in self._pipes:
                pipe.send_bytes(message)
        except OSError:
            raise self._why() from None

    def end(self) -> None:
        """End the command, and everything it started."""
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()
        self._command.end()

    def _all_seen(self, start_s: float) -> Seen:
        seen: list[Seen] = []
        until = time.monotonic() + start_s
        while not seen or len(seen) < seen[0].processes:
            while (pipe := self._command.accepted(LOOK_S)) is None:
                if self._command.ended:
                    raise self._why()
                if time.monotonic() > until:
                    reason = f"{len(seen)} of its processes came to their first steps, not all"
                    if not seen:
                        reason = self._never(f"it has run for {start_s:.0f} s", SOONER)
                    raise Ended("timed_out", reason)
            seen.append(self._heard(pipe, "seen", Seen, until))
            self._pipes.append(pipe)
            until = min(until, time.monotonic() + TOGETHER_S)
        return min(seen, key=lambda one: one.rank)

    def _heard(self, pipe: Connection, what: str, cls: type[T], until: float) -> T:
        try:
            while not pipe.poll(LOOK_S):
                if self._command.ended and not pipe.poll(0):
                    raise self._why()
                if time.monotonic() > until:
                    raise Ended("timed_out", "the budget was over before it was measured")
            message = msgpack.unpackb(pipe.recv_bytes())
            if failed := message.get("failed"):
                if failed["outcome"] == OVER:
                    raise Ended("failed", failed["reason"], 0)
                raise Ended(failed["outcome"], failed["reason"], own=bool(failed.get("own")))
            return from_plain(cls, message[what])
        except (EOFError, OSError):
            raise self._why() from None
        except (AttributeError, KeyError, TypeError, ValueError, RecordDamaged) as exc:
            raise Ended("crashed", f"the pilot's answer made no sense: {exc}") from exc

    def _why(self) -> Ended:
        """Why the command is over, or one of its processes is."""
        until = time.monotonic() + END_S
        while not self._command.ended and time.monotonic() < until:
            time.sleep(0.05)
        if not self._command.ended:
            return Ended("crashed", GONE if len(self._pipes) == 1 else GONE_OF_SEVERAL)
        code, last = self._command.obituary()
        ended, note = f"ended with {how(code)}", self._command.note
        printed = f": {last}" if last else ""
        if self._pipes:
            return Ended("crashed", f"the command {ended}{printed}", code, own=code > 0)
        never = self._never(f"it {ended}{'' if note else printed}", MEND if code else LONGER)
        return Ended("failed", never, code or 1, f"it {ended}{f': {note}' if note else printed}")

    def _never(self, so_far: str, mend: str) -> str:
        """What to say of a command that made no steps; `mend`: what to do about it."""
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
    return min(lent, taken - 1) / taken if lent > 1 and taken else 0.0
