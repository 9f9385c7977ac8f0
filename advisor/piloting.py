"""The pilot in a process: guided by `advisor tune`, or by what was found for its run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

RUN = "ADVISOR_RUN"
"""Environment variable: the words of the command that `advisor run` started, as JSON."""
INJECTED = Path(__file__).with_name("injected")
"""What Python looks into first in a command that advisor starts."""


def attach() -> None:
    """Attach a pilot, as the environment asks for; called once torch is loaded."""
    from advisor.tuners.act.pilot import line
    from advisor.tuners.act.pilot.pilot import Pilot

    guide = line.from_environment()
    if guide is not None:
        from advisor.tuners.measure.run import traced

        Pilot(guide, traced.from_environment())
    elif os.environ.get(RUN):
        from advisor.finding.piloted import Found

        Pilot(Found(json.loads(os.environ[RUN])))


def environment(command: list[str]) -> dict[str, str]:
    """What `advisor run` adds to its command's environment."""
    path = [str(INJECTED), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {RUN: json.dumps(command), "PYTHONPATH": os.pathsep.join(path)}


def own_command() -> list[str]:
    """How this process was started, as a person would type it."""
    return ["python", *sys.orig_argv[1:]]
