"""What slows a script down; in a module of its own, because scripts import it in their runs."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.cache import domain


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """At most by the factor `gain`, and its line; '' and 0 if unknown. `seconds`: of a step; of
    loading, of a sample; of evaluation and checkpoints, each time."""

    what: str
    file: str
    line: domain.Count
    seconds: domain.Seconds
    gain: domain.PositiveRatio
