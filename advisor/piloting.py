"""The pilot in a process: guided by `advisor tune`, or by what was found for its run."""

from __future__ import annotations

import json
import os
from pathlib import Path

INJECTED = Path(__file__).with_name("injected")
"""What Python looks into first in a command that advisor starts."""


def attach() -> None:
    """Attach a pilot, as the environment asks for; called once torch is loaded."""
    from advisor.tuners.act.pilot import line
    from advisor.tuners.act.pilot.in_charge import IN_CHARGE

    guide = line.from_environment()
    if guide is not None:
        from advisor.tuners.measure.run import traced

        IN_CHARGE.bring(guide, traced.from_environment())
    elif os.environ.get(line.RUN):
        from advisor.finding.conducted import Conducted
        from advisor.finding.piloted import Found

        told = json.loads(os.environ[line.RUN])
        command, tune_s = told["command"], told["tune_s"]
        IN_CHARGE.bring(Conducted(command, tune_s=tune_s) if tune_s else Found(command))


def environment(command: list[str], tune_s: float) -> dict[str, str]:
    """What `advisor run` adds to its command's environment; `tune_s`: 0 for no tuning."""
    from advisor.tuners.act.pilot.line import RUN

    path = [str(INJECTED), *filter(None, [os.environ.get("PYTHONPATH")])]
    told = json.dumps({"command": command, "tune_s": tune_s})
    return {RUN: told, "PYTHONPATH": os.pathsep.join(path)}
