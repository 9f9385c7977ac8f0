"""How far a script follows its advice: the pieces that it has used, and what that leaves out."""

from __future__ import annotations

import atexit
import logging
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from advisor.cache.config import Config, Value
from advisor.cache.record import USES
from advisor.cache.seal import UNSIGNED
from advisor.cache.shown import times
from advisor.tuners.act.in_force import IN_FORCE
from advisor.tuners.act.served import STALE, Served
from advisor.tuners.knobs import Knob, caveats, described

_log = logging.getLogger("advisor")

SET_FLAGS, PREPARE, OPTIMIZER, LOADER, BATCHES, AUTOCAST, STEP, CAPTURE = PIECES = (
    *("set_flags", "prepare", "optimizer", "loader", "batches", "autocast", "step", "capture"),
)
"""Of `Advice`, in the order in which a script uses them."""


def needs(knob: Knob, value: Value) -> Iterator[str]:
    """The pieces without which a value has no effect, by the columns that it acts through."""
    if knob.flag is not None:
        yield SET_FLAGS
    if knob.model is not None or (knob.layers is not None and knob.layers(value) is not None):
        yield PREPARE
    if knob.optimizer is not None and knob.optimizer(value):
        yield OPTIMIZER
    if knob.loader is not None and knob.loader(value):
        yield LOADER
    if knob.layout is not None or (knob.non_blocking is not None and knob.non_blocking(value)):
        yield BATCHES
    if value in knob.autocast:
        yield AUTOCAST
    if knob.scaled is not None and knob.scaled(value):
        yield STEP
    if knob.captured is not None and knob.captured(value):
        yield CAPTURE


@dataclass(slots=True, eq=False)
class Following:
    """How far a script follows its advice.

    Attributes:
        advised: rows that differ from torch's own, with their values.
        served: what the lookup says of it.
        used: pieces; a script that uses one adds it, at every step.
        put: flags of the process that this advice has set.
        kept: flags that it left alone, as the user's own.
        failed: why a captured step is not replayed.
        compiled: what became of the artifacts that were kept, or ''.
        another: what another model than the tuned one was prepared or trains, or ''.
        piloted: what a pilot has put in force in its place, or ''.
    """

    advised: tuple[tuple[Knob, Value], ...]
    served: Served
    used: set[str] = field(default_factory=set)
    put: Config = field(default_factory=Config)
    kept: set[str] = field(default_factory=set)
    failed: str = ""
    compiled: str = ""
    another: str = ""
    piloted: str = ""
    process: int = field(default_factory=os.getpid)

    def missing(self, knob: Knob, value: Value) -> list[str]:
        """The pieces that a knob's value waits for."""
        if knob.name in self.kept:
            return []
        found = [one for one in needs(knob, value) if one not in self.used]
        alone = SET_FLAGS in self.used and PREPARE not in self.used
        if knob.flag is not None and alone and self.put.get(knob.name) != value:
            found.append(PREPARE)  # the flags that are best on their own leave it out
        return found

    def waiting(self) -> list[str]:
        """All the pieces that something advised waits for."""
        missed = {piece for one in self.advised for piece in self.missing(*one)}
        return [piece for piece in PIECES if piece in missed]

    def others(self) -> list[str]:
        """The flags that this advice has not set, or that are not as it set them any more."""
        return [said for one in self.advised if (said := self._by_others(*one))]

    def _by_others(self, knob: Knob, advised: Value) -> str:
        """Who has set a flag, if not this advice: 'threads=3 stays, as it was set'; else ''."""
        if knob.flag is None:
            return ""
        name, now = knob.name, knob.flag.now()
        shown = f"{name}={now}" if isinstance(now, int) else f"{name} ({now})"
        if name in self.kept:
            who = "the environment sets it" if knob.chosen and knob.chosen() else "as it was set"
            return f"{shown} was so already: {who}" if now == advised else f"{shown} stays, {who}"
        if name not in self.put or IN_FORCE.config.get(name) == self.put[name]:
            return ""
        who = "as it was set" if name in IN_FORCE.changed else "as other advice set it"
        return f"{shown} now, {who} since"

    def reason(self) -> str:
        """What is in force, and what would be; no speed-up that is not is claimed."""
        if self.piloted:
            return self.piloted
        said = self.served.reason
        if self.another:
            return f"no speed-up is known: {self.another}; {said}"
        others = self.others()
        if self.failed:
            said += f"; but the step is not replayed: {self.failed}"
        elif waiting := self.waiting():
            said = self._once(waiting, claimed=bool(self.put) and not others)
        return said + (f"; but {'; '.join(others)}" if others else "")

    def _once(self, waiting: list[str], *, claimed: bool) -> str:
        once = f"once the {'script' if waiting == [SET_FLAGS] else 'loop'} also calls"
        served = self.served
        whole = served.gains.get(served.use)
        if whole is None:
            return f"{served.reason}; {once} {', '.join(waiting)}"
        flags = served.gains.get(USES[0]) if claimed else None
        now = f"{times(flags)} in force ({USES[0]})" if flags else "not in force yet"
        stale = f" ({served.status})" if served.status == STALE else ""
        unsigned = "" if served.signed else f"; {UNSIGNED}"
        return f"{now}; {times(whole)}{stale} {once} {', '.join(waiting)}{served.doubt}{unsigned}"

    def further(self) -> str:
        """What the next use would give, of those that give more."""
        gains, use = self.served.gains, self.served.use
        mine = gains.get(use, 1.0)
        for more in USES[USES.index(use) + 1 :]:
            if gains.get(more, 0.0) > mine:
                return f"{more} would give {times(gains[more])} instead of {times(mine)}"
        return ""

    def lines(self) -> list[str]:
        """All of it, for a person."""
        found = [self.reason()]
        if self.piloted:
            return found
        if self.served.status == STALE and self.served.reason not in found[0]:
            found.append(f"stale: {self.served.reason}")
        found += [self._line(knob, value) for knob, value in self.advised]
        found += caveats(Config({knob.name: value for knob, value in self.advised}))
        if self.failed:
            found.append(f"not replayed: {self.failed}")
        if self.compiled:
            found.append(self.compiled)
        if further := self.further():
            found.append(f"next: {further}")
        return found

    def _line(self, knob: Knob, value: Value) -> str:
        said = described(Config({knob.name: value}), Config())
        if by_others := self._by_others(knob, value):
            return f"not by this advice: {by_others}; advised is {said}"
        if missing := self.missing(knob, value):
            calls = ", ".join(f"advice.{one}" for one in missing)
            return f"not in effect: {said}: {calls} not used"
        return f"in effect: {said}"

    def tell(self) -> None:
        """One line in the log: a warning where something advised never took effect."""
        if self.process != os.getpid() or not self.advised or not self.used or self.piloted:
            return  # a forked child, nothing to tell, only looked at, or not what acts
        idle = [knob.name for knob, value in self.advised if self.missing(knob, value)]
        said = f"advice at the end: {self.reason()}"
        if idle or self.failed:
            never = f"; without effect: {', '.join(idle)}" if idle else ""
            _log.warning("%s%s", said, never)
        else:
            _log.info("%s", said)


_last: deque[Following] = deque(maxlen=8)


def followed() -> bool:
    """Whether the script follows an advice beyond its flags, so that no pilot is to act."""
    return any(one.advised and one.used - {SET_FLAGS} for one in _last)


def give_way(line: str) -> None:
    """Have every advice whose flags the script has set say what a pilot does in its place."""
    for one in _last:
        if SET_FLAGS in one.used:
            one.piloted = line


def claim_for(model: str) -> None:
    """Have no advice whose flags the script has set claim what was measured of another model than
    the one that trains, of which this is the fingerprint."""
    for one in _last:
        tuned = one.served.record
        if SET_FLAGS in one.used and tuned is not None and tuned.key.model != model:
            one.another = one.another or f"what trains is not what was tuned as {tuned.target.name}"


def tell_at_exit(one: Following) -> None:
    """Once in this process, when it ends."""
    if not _last:
        atexit.register(_tell_all)
    _last.append(one)


def _tell_all() -> None:
    for one in _last:
        one.tell()
