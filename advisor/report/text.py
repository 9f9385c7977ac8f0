"""Numbers and outcomes as text."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from advisor.cache.config import Config
from advisor.cache.record import Choice, Measurement, Trial
from advisor.cache.shown import speedup

WRONG = "wrong result"
AGES = {"years": 31_557_600, "months": 2_629_800, "d": 86_400, "h": 3600, "min": 60}
"""Seconds of each unit that an age is shown in."""
LISTED = 80  # characters of a command or a reason in a list


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
    """'3 min', '5 h', '12 d', '3 years'."""
    seconds = max(0.0, (time.time() if now is None else now) - created)
    for unit, length in AGES.items():
        # Months and years begin at two of them.
        if seconds >= length * (1 + unit.endswith("s")):
            return f"{int(seconds // length)} {unit}"
    return "now"


def ago(created: float | None) -> str:
    """'5 h ago', 'just now'; 'never' for no time."""
    if created is None:
        return "never"
    text = age(created)
    return "just now" if text == "now" else f"{text} ago"


def cut(text: str) -> str:
    """The start of a text, for a list."""
    return text if len(text) <= LISTED else f"{text[: LISTED - 4]} ..."


def outcome(measured: Measurement) -> str:
    """How a trial failed, such as 'out of memory'; '' if it ran."""
    words = {"ok": "", "wrong": WRONG}
    return words.get(measured.outcome, measured.outcome.replace("_", " "))


def spread(choice: Choice) -> str:
    """'1.38x (1.36-1.41)'."""
    return speedup(choice.speedup, choice.speedup_low, choice.speedup_high)


def ratios(trials: Iterable[Trial], baseline: Config) -> Mapping[int, float]:
    """By trial number: the speed-up over the baseline's last trial before it; 0 if unknown."""
    found: dict[int, float] = {}
    latest = 0.0
    for trial in sorted(trials, key=lambda one: one.number):
        speed = trial.measurement.samples_per_s if trial.measurement.ok else 0.0
        if trial.config == baseline:
            latest = speed
        found[trial.number] = speed / latest if latest else 0.0
    return found
