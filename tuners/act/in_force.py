"""What of an advice is in force: the pieces that a script has used, and what that leaves out."""

from __future__ import annotations

import atexit
import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from advisor.cache.config import Config, Value
from advisor.cache.record import USES
from advisor.tuners.knobs import Knob, described

_log = logging.getLogger("advisor")

SET_FLAGS, PREPARE, OPTIMIZER, LOADER, BATCHES, AUTOCAST, STEP, CAPTURE = PIECES = (
    *("set_flags", "prepare", "optimizer", "loader", "batches", "autocast", "step", "capture"),
)
"""Of `Advice`, in the order in which a script uses them."""


def needs(knob: Knob, value: Value) -> Iterator[str]:
    """The pieces without which a value has no effect, by the columns that it acts through."""
    if knob.flags is not None:
        yield SET_FLAGS
    if knob.model is not None:
        yield PREPARE
    if knob.optimizer is not None and knob.optimizer(value):
        yield OPTIMIZER
    if knob.loader is not None and knob.loader(value):
        yield LOADER
    if knob.layout is not None or (knob.non_blocking is not None and knob.non_blocking(value)):
        yield BATCHES
    if knob.autocast is not None and knob.autocast(value) is not None:
        yield AUTOCAST
    if knob.scaled is not None and knob.scaled(value):
        yield STEP
    if knob.captured is not None and knob.captured(value):
        yield CAPTURE


@dataclass(slots=True, eq=False)
class InForce:
    """What was advised, and the pieces that have been used so far.

    Attributes:
        advised: rows that differ from torch's own, with their values.
        served: what the advice says of itself.
        use: for which `served` holds.
        gains: speed-up over torch's default by use, as far as they are known.
        used: pieces; a script that uses one adds it, at every step.
        kept: knobs whose value the user has set, with that value.
        put: flags of the process that were set, with their values.
        failed: why a captured step is not replayed.
        another: what another model than the tuned one was prepared, or ''.
    """

    advised: tuple[tuple[Knob, Value], ...]
    served: str
    use: str
    gains: Mapping[str, float]
    used: set[str] = field(default_factory=set)
    kept: dict[str, Value] = field(default_factory=dict)
    put: dict[str, Value] = field(default_factory=dict)
    failed: str = ""
    another: str = ""
    process: int = field(default_factory=os.getpid)

    def missing(self, knob: Knob, value: Value) -> list[str]:
        """The pieces that a knob's value waits for."""
        found = [one for one in needs(knob, value) if one not in self.used]
        alone = SET_FLAGS in self.used and PREPARE not in self.used
        if knob.flags is not None and alone and self.put.get(knob.name) != value:
            found.append(PREPARE)  # the flags that are best on their own leave it out
        return found if knob.name not in self.kept else []

    def waiting(self) -> list[str]:
        """All the pieces that something advised waits for."""
        missed = {piece for one in self.advised for piece in self.missing(*one)}
        return [piece for piece in PIECES if piece in missed]

    def reason(self) -> str:
        """What is in force, and what would be; no speed-up that is not is claimed."""
        if self.another:
            return f"no speed-up is known: {self.another}; {self.served}"
        waiting = self.waiting()
        if self.failed:
            return f"{self.served}; but the step is not replayed: {self.failed}"
        if not waiting:
            own = ", ".join(f"{name}={value}" for name, value in self.kept.items())
            return f"{self.served}; but {own} stays, as it was set" if own else self.served
        once = f"once the {'script' if waiting == [SET_FLAGS] else 'loop'} also calls"
        whole = self.gains.get(self.use)
        if whole is None:
            return f"{self.served}; {once} {', '.join(waiting)}"
        flags = self.gains.get(USES[0]) if self.put and not self.kept else None
        now = f"{flags:.2f}x in force ({USES[0]})" if flags else "not in force yet"
        return f"{now}; {whole:.2f}x {once} {', '.join(waiting)}"

    def further(self) -> str:
        """What the next use would give, of those that give more."""
        mine = self.gains.get(self.use, 1.0)
        for use in USES[USES.index(self.use) + 1 :]:
            if self.gains.get(use, 0.0) > mine:
                return f"{use} would give {self.gains[use]:.2f}x instead of {mine:.2f}x"
        return ""

    def lines(self) -> list[str]:
        """All of it, for a person."""
        found = [self.reason()]
        for knob, value in self.advised:
            said = described(Config({knob.name: value}), Config())
            missing = self.missing(knob, value)
            if knob.name in self.kept:
                own = self.kept[knob.name]
                found.append(f"kept: {knob.name}={own}, as it was set; advised is {value}")
            elif missing:
                calls = ", ".join(f"advice.{one}" for one in missing)
                found.append(f"not in effect: {said}: {calls} not used")
            else:
                found.append(f"in effect: {said}")
        if self.failed:
            found.append(f"not replayed: {self.failed}")
        if further := self.further():
            found.append(f"next: {further}")
        return found

    def tell(self) -> None:
        """One line in the log: a warning where something advised never took effect."""
        if self.process != os.getpid() or not self.advised or not self.used:
            return  # a forked child, nothing to tell, or a lookup that was only looked at
        idle = [knob.name for knob, value in self.advised if self.missing(knob, value)]
        said = f"advice at the end: {self.reason()}"
        if idle or self.failed:
            never = f"; without effect: {', '.join(idle)}" if idle else ""
            _log.warning("%s%s", said, never)
        else:
            _log.info("%s", said)


_last: deque[InForce] = deque(maxlen=8)


def tell_at_exit(one: InForce) -> None:
    """Once in this process, when it ends."""
    if not _last:
        atexit.register(_tell_all)
    _last.append(one)


def _tell_all() -> None:
    for one in _last:
        one.tell()
