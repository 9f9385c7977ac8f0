"""Attach the pilot in the processes of a command, for `advisor tune` and `advisor run`."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.tuners.act.pilot import protocol

if TYPE_CHECKING:
    from advisor.resolve.commands import CommandOverrides

OTHER_TREE = "ADVISOR_PILOT_OTHER_TREE"  # variable: the folder that a WorktreeClient refuses
INJECTED = Path(__file__).with_name("injected")
"""The first folder of a command's PYTHONPATH; its sitecustomize calls `attach`."""


def attach() -> None:
    """Attach a pilot if environment variables ask for one. Called as soon as torch is loaded, which
    may be while advisor itself is being imported."""
    if not (os.environ.get(protocol.ADDRESS) or os.environ.get(protocol.RUN)):
        return
    from advisor.cache import settings
    from advisor.tuners.act.pilot.pilot import ACTIVE_PILOT

    guide, run = protocol.from_environment(), json.loads(os.environ.get(protocol.RUN) or "{}")
    if guide is None and (not run or settings.disabled()):
        return
    comparer = None
    if guide is not None or run["tune_s"]:
        from advisor.tuners.measure.run.recorded_steps import RecordedSteps

        comparer = RecordedSteps(careful=guide is None)
    if guide is not None and (folder := protocol.checkpoints()) is not None:
        from advisor.tuners.act.pilot.checkpoints import Redirection

        Redirection(folder).install()
    if guide is not None and OTHER_TREE in os.environ:
        guide.__class__ = WorktreeClient
    if guide is not None and run:
        from advisor.tuners.faults import Stopped

        guide.failed(Stopped("unclear", "advisor run has no effect here; give its command itself"))
    ACTIVE_PILOT.attach(guide or LazyGuide(run), comparer)


class WorktreeClient(protocol.PilotClient):
    """Of a command in a worktree: refuses one with code from the current tree."""

    def takes_over(self) -> bool:
        from advisor.tuners.faults import Stopped
        from advisor.tuners.fingerprint import is_library

        files = {name: str(getattr(one, "__file__", "")) for name, one in sys.modules.items()}
        for name, file in files.items():
            inside = file.startswith(os.environ[OTHER_TREE]) and not name.startswith("advisor")
            if inside and not is_library(file):
                mend = "give its path, or its folder in PYTHONPATH, relative to this folder"
                said = f"{name} is {file}, and not the file in the worktree; {mend}"
                self.failed(Stopped("unclear", said))
                return False
        return super().takes_over()


class LazyGuide:
    """A Guide for `advisor run` that creates its RecordGuide or OnlineTuner at the first use. So a
    process that does not train never imports the lookup."""

    def __init__(self, run: dict[str, Any]) -> None:
        self._run = run

    @functools.cached_property
    def _guide(self) -> protocol.Guide:
        from advisor.resolve.commands import CommandOverrides
        from advisor.resolve.record_guide import RecordGuide
        from advisor.resolve.request import Request

        run = self._run
        if run.get("log"):
            from advisor.resolve import tracking

            tracking.expect(run["log"])
        asked = Request()
        if run["tune_s"]:
            from advisor.resolve.online import OnlineTuner

            return OnlineTuner(run["command"], asked, tune_s=run["tune_s"])
        overrides = CommandOverrides(**run["options"]) if run["options"] else None
        return RecordGuide(run["command"], asked, overrides)

    def _forward(self, name: str, *given: Any) -> Any:
        """Call a method of the guide."""
        return getattr(self._guide, name)(*given)

    saves_memory = functools.partialmethod(_forward, "saves_memory")
    takes_over = functools.partialmethod(_forward, "takes_over")
    begin = functools.partialmethod(_forward, "begin")
    next = functools.partialmethod(_forward, "next")
    script_failed = functools.partialmethod(_forward, "script_failed")
    config_dropped = functools.partialmethod(_forward, "config_dropped")
    backward_failed = functools.partialmethod(_forward, "backward_failed")

    def failed(self, exc: BaseException) -> None:
        """Pass an error on. If nothing trained yet, only errors that the user must know."""
        from advisor.tuners.faults import stopped

        why = stopped(exc)
        matters = why in ("unclear", "untrained") or (why == "brief" and self._run["tune_s"])
        if "_guide" in vars(self) or matters:
            self._guide.failed(exc)


def environment(
    command: list[str], tune_s: float, overrides: CommandOverrides | None = None, log: str = ""
) -> dict[str, str]:
    """The environment variables that `advisor run` sets for its command.

    Args:
        command: as typed; `overrides`: options of the command that a record has set.
        tune_s: seconds of tuning within the run; 0 for none.
        log: the tracker that gets the run's figures; '' for none.
    """
    options = dataclasses.asdict(overrides) if overrides is not None else None
    run = {"command": command, "tune_s": tune_s, "options": options, "log": log}
    return {protocol.RUN: json.dumps(run), **protocol.injection_environment(INJECTED)}
