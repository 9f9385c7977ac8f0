"""Checks a record's claims against its own measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from advisor.cache.domain import FIRST, is_moment
from advisor.cache.record import Record

ROUNDING = 1e-6  # relative difference that is allowed between a claim and its measurements
TRIMMED = 1 / 6
"""Fraction of the turns that a mean leaves out at each end (Yuen, Biometrika 61, 1974). A load that
starts or stops during a turn makes its ratio up to 5 times too large or too small."""


def inner(logs: Sequence[float]) -> list[float]:
    ordered = sorted(logs)
    out = int(TRIMMED * len(ordered))
    return ordered[out : len(ordered) - out]


def contradictions(record: Record) -> Iterator[str]:
    """Yields the claims of a record that differ from its own measurements."""
    made = {"provenance.created": record.provenance.created, "revised": record.revised or FIRST}
    for name, seconds in made.items():
        if not is_moment(seconds):
            yield f"{name} {seconds:g}: expected a time from 2020 until now"
    for trial in record.trials:
        measured = trial.measurement
        if measured.ok and trial.stage != "numerics" and not measured.samples_per_s:
            yield f"trial {trial.number} counts as measured, but has no speed"
    winners = [one.choice for one in record.winners]
    for choice in dict.fromkeys([record.baseline, *winners, *record.raced]):
        turns, default = choice.rounds, record.baseline.rounds
        if not turns or not default:
            yield "a choice has no turn of its race"
        if not choice.speedup_low <= choice.speedup <= choice.speedup_high:
            yield f"the speed-up {choice.speedup:g} is not in its own interval"
        logs = [math.log(a / b) for a, b in zip(turns, default, strict=False)]
        claims = {
            "samples/s": (choice.samples_per_s, statistics.median(turns)),
            "slowest turn": (choice.low, min(turns)),
            "fastest turn": (choice.high, max(turns)),
            "speed-up": (choice.speedup, math.exp(statistics.fmean(inner(logs)))),
        }
        for what, (claimed, found) in claims.items():
            if not math.isclose(claimed, found, rel_tol=ROUNDING):
                yield f"{what} is {claimed:g}, but its turns give {found:g}"
