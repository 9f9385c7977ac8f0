"""The pilot in a process: guided by `advisor tune`, or by what was found for its run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.tuners.act.pilot.protocol import (
    ADDRESS,
    RUN,
    checkpoints,
    from_environment,
    injection_environment,
)

if TYPE_CHECKING:
    from advisor.finding.in_command import InCommand
    from advisor.tuners.act.pilot.pilot import StepComparer
    from advisor.tuners.act.pilot.protocol import BlockRequest, BlockResult, Guide
    from advisor.tuners.act.pilot.script_facts import ScriptFacts

INJECTED = Path(__file__).with_name("injected")
"""What Python looks into first in a command that advisor starts."""


def attach() -> None:
    """Attach a pilot, as the environment asks for; called once torch is loaded, which may be in the
    middle of a module of advisor's where no pilot is asked for."""
    if not (os.environ.get(ADDRESS) or os.environ.get(RUN)):
        return
    from advisor.cache import settings
    from advisor.tuners.act.pilot.pilot import ACTIVE_PILOT

    guide = from_environment()
    if guide is not None:
        from advisor.tuners.measure.run.recorded_steps import RecordedSteps

        if (folder := checkpoints()) is not None:
            from advisor.tuners.act.pilot.checkpoints import Redirection

            Redirection(folder).install()
        ACTIVE_PILOT.attach(guide, RecordedSteps())
    elif (said := os.environ.get(RUN)) and not settings.disabled():
        told = json.loads(said)
        ACTIVE_PILOT.attach(_Later(told), _watch(told["tune_s"]))


def _watch(tune_s: float) -> StepComparer | None:
    """What compares configs in a run that is tuned within itself."""
    if not tune_s:
        return None
    from advisor.tuners.measure.run.recorded_steps import RecordedSteps

    return RecordedSteps(careful=True)


class _Later:
    """The guide of `advisor run`, made when it is first asked: a process that does not train never
    imports what looks things up."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told
        self._made: Guide | None = None

    @property
    def _guide(self) -> Guide:
        if self._made is None:
            self._made = _made(self._told)
        return self._made

    def takes_over(self) -> bool:
        """As `Guide.takes_over`."""
        return self._guide.takes_over()

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        """As `Guide.begin`."""
        return self._guide.begin(seen)

    def next(self, result: BlockResult) -> BlockRequest:
        """As `Guide.next`."""
        return self._guide.next(result)

    def failed(self, exc: BaseException) -> None:
        """As `Guide.failed`: where nobody asked yet, it is only told why nobody will."""
        from advisor.tuners.faults import stopped

        why = stopped(exc)
        said = why in ("unclear", "untrained") or (why == "brief" and self._told["tune_s"])
        if self._made is not None or said:
            self._guide.failed(exc)

    def script_failed(self, exc: BaseException, order: BlockRequest) -> None:
        """As `Guide.script_failed`."""
        self._guide.script_failed(exc, order)

    def config_dropped(self, exc: BaseException) -> None:
        """As `Guide.config_dropped`."""
        self._guide.config_dropped(exc)

    def backward_failed(self, exc: Exception, order: BlockRequest) -> None:
        """As `Guide.backward_failed`."""
        self._guide.backward_failed(exc, order)


def _made(told: dict[str, Any]) -> Guide:
    from advisor.finding.piloted import Found, Terms

    terms = Terms(folder=Path(told["folder"]) if told["folder"] else None)
    if told["tune_s"]:
        from advisor.finding.conducted import Conducted

        return Conducted(told["command"], terms, tune_s=told["tune_s"])
    from advisor.finding.in_command import InCommand

    options = InCommand(**told["options"]) if told["options"] else None
    return Found(told["command"], terms, options)


def environment(
    command: list[str], tune_s: float, options: InCommand | None = None
) -> dict[str, str]:
    """What `advisor run` adds to its command's environment.

    Args:
        command: as it was typed.
        tune_s: 0 for no tuning.
        options: of it, that are set otherwise.
    """
    folder = ""
    with contextlib.suppress(OSError):  # it is gone
        folder = str(Path.cwd())
    told = {
        "command": command,
        "tune_s": tune_s,
        "folder": folder,
        "options": dataclasses.asdict(options) if options is not None else None,
    }
    return {RUN: json.dumps(told), **injection_environment(INJECTED)}
