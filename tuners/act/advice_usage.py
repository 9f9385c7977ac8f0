"""The advice that a script was given, and which pieces of it the script has used."""

from __future__ import annotations

import atexit
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

from advisor.cache.config import Config, Value
from advisor.cache.record import LOOP, USES, Record
from advisor.cache.shown import times
from advisor.cache.signing import UNSIGNED
from advisor.tuners.act.process_flags import PROCESS_FLAGS
from advisor.tuners.knobs import Knob, caveats, described

if TYPE_CHECKING:
    from advisor.cache.asking import Explanation

_log = logging.getLogger("advisor")

EXACT, STALE = "exact", "stale"

Piece = Literal[
    "set_flags", "prepare", "optimizer", "loader", "batches", "autocast", "step", "capture"
]
PIECES: tuple[Piece, ...] = get_args(Piece)
"""Methods and properties of `Advice`, in the order in which a script uses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A config, its origin and its measurements. The defaults fit a config without any."""

    config: Config = field(default_factory=Config)
    status: str = EXACT  # or STALE, 'miss', 'disabled'
    reason: str = ""  # one line: which advice was served, or why none was
    notice: str = ""  # what to tell the user, if anything
    doubt: str = ""  # part of the reason, '; not verified ...', if not compared with strict fp32
    signed: bool = True  # whether the reader or their team signed the record
    record: Record | None = None
    explanation: Explanation | None = None  # None if this process made no lookup
    use: str = LOOP  # the one of USES that the config was measured for
    default: Config = field(default_factory=Config)  # torch's default values, which are not set
    flags: Config | None = None  # to set before `prepare`; None: those of `config`
    gains: Mapping[str, float] = field(default_factory=dict)  # speed-up over torch, by use


def _needs(knob: Knob, value: Value) -> set[Piece]:
    """The pieces that a script must use for a knob's value to take effect."""
    acts: dict[Piece, object] = {
        "set_flags": knob.flag,
        "prepare": knob.model or knob.blocks or value in knob.layers,
        "optimizer": knob.optimizer and value,
        "loader": knob.loader,
        "batches": knob.layout or value in knob.non_blocking,
        "autocast": value in knob.autocast,
        "step": value in knob.scaled,
        "capture": value in knob.captured,
    }
    return {piece for piece, applied in acts.items() if applied}


@dataclass(slots=True, eq=False)
class AdviceUsage:
    advised: tuple[tuple[Knob, Value], ...]  # values that differ from torch's default
    served: Served
    used: set[Piece] = field(default_factory=set)  # pieces that the script has used so far
    put: Config = field(default_factory=Config)  # flags that this advice has set
    kept: set[str] = field(default_factory=set)  # flags that the user has set, which stay
    # Each of these is one line of text, or '':
    failed: str = ""  # why a captured step is not replayed
    compiled: str = ""  # whether stored compiled code was loaded
    another: str = ""  # that the model is not the tuned one
    piloted: str = ""  # the config that a pilot has set in place of this advice

    def missing(self, knob: Knob, value: Value) -> list[Piece]:
        if knob.name in self.kept:
            return []
        needs = _needs(knob, value)
        if knob.flag is not None and "set_flags" in self.used and self.put.get(knob.name) != value:
            needs.add("prepare")  # not among the flags that are best on their own
        return [piece for piece in PIECES if piece in needs - self.used]

    def _set_by_others(self, knob: Knob, advised: Value) -> str:
        """Who has set a flag, as 'threads=3 stays: it was set before'; '' if this advice has."""
        if knob.flag is None:
            return ""
        name, now = knob.name, knob.flag.now()
        shown = f"{name}={now}" if isinstance(now, int) else f"{name} ({now})"
        if name in self.kept:
            by = "the environment sets it" if knob.chosen and knob.chosen() else "it was set before"
            return f"{shown} already: {by}" if now == advised else f"{shown} stays: {by}"
        if name not in self.put or PROCESS_FLAGS.config.get(name) == self.put[name]:
            return ""
        who = "it was set" if name in PROCESS_FLAGS.changed else "other advice set it"
        return f"{shown} now: {who} since"

    def reason(self) -> str:
        if self.piloted:
            return self.piloted
        said = self.served.reason
        if self.another:
            return f"no speed-up is known: {self.another}; {said}"
        others = [one for row in self.advised if (one := self._set_by_others(*row))]
        missed = {piece for row in self.advised for piece in self.missing(*row)}
        if self.failed:
            said += f"; but the step is not replayed: {self.failed}"
        elif missed:
            said = self._once(missed, claimed=bool(self.put) and not others)
        return said + (f"; but {'; '.join(others)}" if others else "")

    def _once(self, missed: set[Piece], *, claimed: bool) -> str:
        served = self.served
        calls = ", ".join(piece for piece in PIECES if piece in missed)
        once = f"once the {'script' if missed == {'set_flags'} else 'loop'} also calls {calls}"
        whole = served.gains.get(served.use)
        if whole is None:
            return f"{served.reason}; {once}"
        flags = served.gains.get(USES[0]) if claimed else None
        now = f"{times(flags)} in force ({USES[0]})" if flags else "not in force yet"
        stale = f" ({served.status})" if served.status == STALE else ""
        unsigned = "" if served.signed else f"; {UNSIGNED}"
        return f"{now}; {times(whole)}{stale} {once}{served.doubt}{unsigned}"

    def lines(self) -> list[str]:
        found = [self.reason()]
        if self.piloted:
            return found
        served = self.served
        if served.status == STALE and served.reason not in found[0]:
            found.append(f"stale: {served.reason}")
        found += [self._line(knob, value) for knob, value in self.advised]
        found += caveats(Config({knob.name: value for knob, value in self.advised}))
        found += [f"not replayed: {self.failed}"] if self.failed else []
        found += [self.compiled] if self.compiled else []
        mine = served.gains.get(served.use, 1.0)
        for use in USES[USES.index(served.use) + 1 :]:
            if (gain := served.gains.get(use, 0.0)) > mine:
                return [*found, f"next: {use} would give {times(gain)} instead of {times(mine)}"]
        return found

    def _line(self, knob: Knob, value: Value) -> str:
        said = described(Config({knob.name: value}), Config())
        if by_others := self._set_by_others(knob, value):
            return f"not by this advice: {by_others}; advised is {said}"
        if missing := self.missing(knob, value):
            calls = ", ".join(f"advice.{one}" for one in missing)
            return f"not in effect: {said}: {calls} not used"
        return f"in effect: {said}"

    def log(self) -> None:
        """Log one line: a warning if an advised value never took effect."""
        if not self.advised or not self.used or self.piloted:
            return  # no advice, no piece used, or a pilot's config instead
        idle = [knob.name for knob, value in self.advised if self.missing(knob, value)]
        never = f"; without effect: {', '.join(idle)}" if idle else ""
        level = logging.WARNING if idle or self.failed else logging.INFO
        _log.log(level, "advice at the end: %s%s", self.reason(), never)


_last: deque[AdviceUsage] = deque(maxlen=8)


def is_followed() -> bool:
    return any(one.advised and one.used - {"set_flags"} for one in _last)


def defer_to_pilot(line: str, status: str) -> None:
    """Have every advice that has set flags report a pilot's config, in one line, and the status of
    its record in place of its own."""
    for one in _last:
        if "set_flags" in one.used:
            one.piloted, one.served = line, replace(one.served, status=status or EXACT)


def disclaim_other_models(model: str) -> None:
    """Have advice for other models than this fingerprint's claim no speed-up."""
    for one in _last:
        tuned = one.served.record
        if "set_flags" in one.used and tuned is not None and tuned.key.model != model:
            one.another = one.another or f"this model is not the one tuned as {tuned.target.name}"


def log_at_exit(one: AdviceUsage) -> None:
    """Log the use of an advice once, when the process ends."""
    if not _last:
        atexit.register(_log_all)
    _last.append(one)


def _log_all() -> None:
    for one in _last:
        one.log()
