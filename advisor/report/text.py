"""What records say, as text."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from advisor.cache.config import Config
from advisor.cache.record import Choice, Measurement, Trial
from advisor.cache.shown import speedup, tells, times

OUTCOMES = {
    "out_of_memory": "out of memory",
    "timed_out": "timed out",
    "crashed": "crashed",
    "failed": "failed",
    "wrong": "wrong result",
}


LISTED = 80
"""Characters of a command or a reason in a list."""


def rate(samples_per_s: float) -> str:
    """'12,764' or '3.27': samples per second, three digits at least."""
    return f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:.3g}"


def duration(seconds: float) -> str:
    """'4.2 ms', '12 s', '3m 20s'."""
    if seconds <= 0:
        return "0 s"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    return f"{int(seconds // 60)}m {int(seconds % 60):02d}s"


def age(created: float, now: float | None = None) -> str:
    """'3 min', '5 h', '12 d'."""
    seconds = max(0.0, (time.time() if now is None else now) - created)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return "now"


def cut(text: str) -> str:
    """What a list has of a text: its first LISTED characters."""
    return text if len(text) <= LISTED else f"{text[: LISTED - 4]} ..."


def outcome(measured: Measurement) -> str:
    """'out of memory'; '' where it ran."""
    return "" if measured.ok else OUTCOMES[measured.outcome]


def ratio(choice: Choice) -> str:
    """'1.38x'; '?' where the race could not tell."""
    told = tells(choice.speedup_low, choice.speedup_high)
    return times(choice.speedup) if told else "?"


def spread(choice: Choice) -> str:
    """'1.38x (1.36-1.41)'."""
    return speedup(choice.speedup, choice.speedup_low, choice.speedup_high)


def over(measured: Measurement, baseline: Measurement | None) -> float:
    """How many times the samples/s of the baseline's own trial a trial has; 0 where that is not
    known."""
    if not measured.ok or baseline is None or not baseline.ok:
        return 0.0
    return measured.samples_per_s / baseline.samples_per_s


def ratios(trials: Iterable[Trial], baseline: Config) -> Mapping[int, float]:
    """By a trial's number, what was said of it when it ended: over the baseline's latest trial."""
    found: dict[int, float] = {}
    latest: Measurement | None = None
    for trial in sorted(trials, key=lambda one: one.number):
        if trial.config == baseline:
            latest = trial.measurement
        found[trial.number] = over(trial.measurement, latest)
    return found
