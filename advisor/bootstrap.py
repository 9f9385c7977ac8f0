"""The pilot that a command brings into its processes: for `advisor tune`, or `advisor run`."""

from __future__ import annotations

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
    from advisor.resolve.command_overrides import CommandOverrides
    from advisor.tuners.act.pilot.protocol import BlockRequest, BlockResult, Guide
    from advisor.tuners.act.pilot.script_facts import ScriptFacts

INJECTED = Path(__file__).with_name("injected")
"""The folder that Python looks into first in a command that advisor starts."""


def attach() -> None:
    """Attach the pilot that the environment asks for, if any. Called once torch is loaded, which
    may be in the middle of importing advisor."""
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
    elif (text := os.environ.get(RUN)) and not settings.disabled():
        run = json.loads(text)
        comparer = None
        if run["tune_s"]:
            from advisor.tuners.measure.run.recorded_steps import RecordedSteps

            comparer = RecordedSteps(careful=True)
        ACTIVE_PILOT.attach(LazyGuide(run), comparer)


class LazyGuide:
    """The guide of `advisor run`, made at its first use: a process that does not train never
    imports the lookup. Its methods are those of `Guide`."""

    def __init__(self, run: dict[str, Any]) -> None:
        self._run = run
        self._made: Guide | None = None

    @property
    def _guide(self) -> Guide:
        if self._made is None:
            self._made = _guide_of(self._run)
        return self._made

    def takes_over(self) -> bool:
        return self._guide.takes_over()

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        return self._guide.begin(seen)

    def next(self, result: BlockResult) -> BlockRequest:
        return self._guide.next(result)

    def failed(self, exc: BaseException) -> None:
        """If nothing trained yet, only what the user should know is reported."""
        from advisor.tuners.faults import stopped

        why = stopped(exc)
        matters = why in ("unclear", "untrained") or (why == "brief" and self._run["tune_s"])
        if self._made is not None or matters:
            self._guide.failed(exc)

    def script_failed(self, exc: BaseException, request: BlockRequest) -> None:
        self._guide.script_failed(exc, request)

    def config_dropped(self, exc: BaseException) -> None:
        self._guide.config_dropped(exc)

    def backward_failed(self, exc: Exception, request: BlockRequest) -> None:
        self._guide.backward_failed(exc, request)


def _guide_of(run: dict[str, Any]) -> Guide:
    from advisor.resolve.record_guide import RecordGuide, RunPolicy

    policy = RunPolicy(folder=Path(run["folder"]) if run["folder"] else None)
    if run["tune_s"]:
        from advisor.resolve.online import OnlineTuner

        return OnlineTuner(run["command"], policy, tune_s=run["tune_s"])
    from advisor.resolve.command_overrides import CommandOverrides

    overrides = CommandOverrides(**run["options"]) if run["options"] else None
    return RecordGuide(run["command"], policy, overrides)


def environment(
    command: list[str], tune_s: float, overrides: CommandOverrides | None = None
) -> dict[str, str]:
    """What `advisor run` adds to its command's environment.

    Args:
        command: as it was typed; `overrides`: options of it that a record has set.
        tune_s: 0 for no tuning.
    """
    try:
        folder = str(Path.cwd())
    except OSError:  # it is gone
        folder = ""
    run = {
        "command": command,
        "tune_s": tune_s,
        "folder": folder,
        "options": dataclasses.asdict(overrides) if overrides is not None else None,
    }
    return {RUN: json.dumps(run), **injection_environment(INJECTED)}
