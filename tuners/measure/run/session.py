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
from advisor.tuners.act.pilot.orders import OVER, Comparison, Lap, Order
from advisor.tuners.act.pilot.seen import Seen
from advisor.tuners.decisions import LEAST_STEPS
from advisor.tuners.measure.place import Block, Compared, ConfigFailed
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

    Every method, the start too, may raise Ended. `own` is the script's own config; `until` is when
    to give up, by time.monotonic().

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
        self._forget: Config | None = None
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

    def block(self, config: Config, own: Config, steps: int, warm: int, until: float) -> Block:
        """Have every process make these steps with a config; raises ConfigFailed where it fails and
        the command goes on."""
        laps = self._laps(Order(config=config, steps=steps, warm=warm, own=own), until)
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
            borrowed=max(lap.borrowed for lap in laps),
            ahead=max(lap.ahead for lap in laps),
        )

    def compare(self, asked: Comparison, own: Config, until: float) -> Compared:
        """Have every process compare a config; the first that objects decides."""
        laps = self._laps(Order(config=own, steps=1, own=own, compare=asked), until)
        worst = next((lap for lap in laps if lap.outcome != "ok"), laps[0])
        return Compared(worst.outcome, worst.reason, worst.blames)

    def forget(self, config: Config) -> None:
        """Free a config's compiled code, with the next order."""
        self._forget = config

    def save(self, file: Path, own: Config, until: float) -> None:
        """Have the first process save what it has compiled."""
        self._laps(Order(config=own, steps=1, own=own, saves=str(file)), until)

    def leave(self, config: Config, own: Config, found: str) -> None:
        """Have it train on with a config; no order comes after this one. `found`: see `Order`."""
        self._tell(Order(config=config, own=own, found=found))

    def end(self) -> None:
        """End the command, and everything it started."""
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()
        self._command.end()

    def _laps(self, order: Order, until: float) -> list[Lap]:
        forget, self._forget = self._forget, None
        order = dataclasses.replace(order, needs_room=self._real, forget=forget)
        self.made += order.warm + order.steps
        self._tell(order)
        return [self._heard(pipe, "lap", Lap, until) for pipe in self._pipes]

    def _tell(self, order: Order) -> None:
        message = msgpack.packb(to_plain(order))
        try:
            for pipe in self._pipes:
                pipe.send_bytes(message)
        except OSError:
            raise self._why() from None

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
        ended = f"ended with {how(code)}"
        if self._pipes:
            reason = f"the command {ended}{_after_colon(last)}"
            return Ended("crashed", reason, code, own=code > 0)
        note = self._command.note
        so_far = f"it {ended}{'' if note else _after_colon(last)}"
        never = self._never(so_far, MEND if code else LONGER)
        return Ended("failed", never, code or 1, f"it {ended}{_after_colon(note or last)}")

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


def _after_colon(said: str) -> str:
    return f": {said}" if said else ""
