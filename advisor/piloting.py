"""The pilot in a process: guided by `advisor tune`, or by what was found for its run."""

from __future__ import annotations

import json
import os
from pathlib import Path

RUN = "ADVISOR_RUN"
"""Environment variable: the words of the command that `advisor run` started, as JSON."""
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
    elif os.environ.get(RUN):
        from advisor.finding.piloted import Found

        IN_CHARGE.bring(Found(json.loads(os.environ[RUN])))


def environment(command: list[str]) -> dict[str, str]:
    """What `advisor run` adds to its command's environment."""
    path = [str(INJECTED), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {RUN: json.dumps(command), "PYTHONPATH": os.pathsep.join(path)}
