"""The pilot in a process: guided by `advisor tune`, or by what was found for its run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from advisor.tuners.act.pilot.variables import RUN, bringing

if TYPE_CHECKING:
    from advisor.tuners.act.pilot.orders import Guide, Lap, Order
    from advisor.tuners.act.pilot.pilot import Watch
    from advisor.tuners.act.pilot.seen import Seen

INJECTED = Path(__file__).with_name("injected")
"""What Python looks into first in a command that advisor starts."""


def attach() -> None:
    """Attach a pilot, as the environment asks for; called once torch is loaded."""
    from advisor.cache import settings
    from advisor.tuners.act.pilot import line
    from advisor.tuners.act.pilot.in_charge import IN_CHARGE

    guide = line.from_environment()
    if guide is not None:
        from advisor.tuners.measure.run.repeated import Repeats

        IN_CHARGE.bring(guide, Repeats())
    elif (said := os.environ.get(RUN)) and not settings.disabled():
        told = json.loads(said)
        IN_CHARGE.bring(_Later(told["command"], told["tune_s"]), _watch(told["tune_s"]))


def _watch(tune_s: float) -> Watch | None:
    """What compares configs in a run that is tuned within itself."""
    if not tune_s:
        return None
    from advisor.tuners.measure.run.repeated import Repeats

    return Repeats(careful=True)


class _Later:
    """The guide of `advisor run`, made when it is first asked: a process that does not train never
    imports what looks things up."""

    def __init__(self, command: list[str], tune_s: float) -> None:
        self._command, self._tune_s = command, tune_s
        self._made: Guide | None = None

    @property
    def _guide(self) -> Guide:
        if self._made is None:
            self._made = _made(self._command, self._tune_s)
        return self._made

    def takes_over(self) -> bool:
        """As `Guide.takes_over`."""
        return self._guide.takes_over()

    def begin(self, seen: Seen) -> Order:
        """As `Guide.begin`."""
        return self._guide.begin(seen)

    def next(self, lap: Lap) -> Order:
        """As `Guide.next`."""
        return self._guide.next(lap)

    def failed(self, exc: BaseException) -> None:
        """As `Guide.failed`: where nobody asked yet, it is only told why nobody will."""
        from advisor.tuners.act.pilot.crew import Unclear

        if self._made is not None or isinstance(exc, Unclear):
            self._guide.failed(exc)

    def ended(self, exc: BaseException, order: Order) -> None:
        """As `Guide.ended`."""
        self._guide.ended(exc, order)

    def gave_up(self, exc: BaseException) -> None:
        """As `Guide.gave_up`."""
        self._guide.gave_up(exc)

    def lost(self, exc: Exception, order: Order) -> None:
        """As `Guide.lost`."""
        self._guide.lost(exc, order)


def _made(command: list[str], tune_s: float) -> Guide:
    if tune_s:
        from advisor.finding.conducted import Conducted

        return Conducted(command, tune_s=tune_s)
    from advisor.finding.piloted import Found

    return Found(command)


def environment(command: list[str], tune_s: float) -> dict[str, str]:
    """What `advisor run` adds to its command's environment; `tune_s`: 0 for no tuning."""
    return {RUN: json.dumps({"command": command, "tune_s": tune_s}), **bringing(INJECTED)}
