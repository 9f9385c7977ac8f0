"""The pilot in a process that advisor started: guided by `advisor tune`, or by what was found."""

from __future__ import annotations


def attach() -> None:
    """Attach a pilot, as the environment asks for."""
    from advisor.tuners.act.pilot import line
    from advisor.tuners.act.pilot.pilot import Pilot
    from advisor.tuners.measure.run import traced

    guide = line.from_environment()
    if guide is not None:
        Pilot(guide, traced.from_environment())
