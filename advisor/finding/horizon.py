"""From how many steps on which config pays: a record's answers by the length of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from advisor.cache.config import Config
from advisor.cache.record import CAPTURE, Choice, Record, Trial
from advisor.tuners.length import Length, Pace, break_even, first_step_seen

ONCE = 1.03
"""What was measured once counts as this much slower than the low end of its interval."""

SHORTEST_S, LONGEST_S = 1e-12, 1e9
"""Seconds of a step that a record may say and no clock has measured: there is no reckoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A config that may be served, and how it trains. `raced`: measured in turn with the default,
    not once; `fresh`: its first step was measured, not taken to be the slowest one seen."""

    config: Config
    pace: Pace
    peak_bytes: int
    raced: bool
    fresh: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """From `steps` on, this candidate takes the least time; `seconds` is when that is reached."""

    steps: int
    seconds: float
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class _Seen:
    """How fast a config is taken to train in the steady state."""

    config: Config
    samples_per_s: float
    peak_bytes: int
    raced: bool


class _Starts:
    """What the first step of each config costs a process that starts with it."""

    def __init__(self, record: Record) -> None:
        from advisor.tuners.knobs import FIRST_STEP_COSTS

        self._trials = record.trials
        # In a script that runs already every change pays for itself, and the baseline for nothing.
        self._paying = (
            tuple(record.baseline.config) if record.key.task.command else FIRST_STEP_COSTS
        )
        self._fresh = {c.config: c.first_step_s for c in _choices(record) if c.first_step_s > 0}
        default = record.baseline.config
        # What every fresh process pays, and what the trials of one process paid only once.
        self._loading = max(0.0, self._fresh.get(default, 0.0) - self._slowest(default))

    def _slowest(self, config: Config) -> float:
        return first_step_seen(self._trials, config, self._paying)

    def candidate(self, seen: _Seen, batch: int) -> Candidate | None:
        """None where its first step, or its rate, is not known."""
        slowest = self._slowest(seen.config)
        first_step_s = self._fresh.get(seen.config) or (slowest and slowest + self._loading)
        if not first_step_s or seen.samples_per_s <= 0:
            return None
        pace = Pace(batch=batch, first_step_s=first_step_s, step_s=batch / seen.samples_per_s)
        if not all(SHORTEST_S < seconds < LONGEST_S for seconds in (pace.step_s, first_step_s)):
            return None
        return Candidate(
            config=seen.config,
            pace=pace,
            peak_bytes=seen.peak_bytes,
            raced=seen.raced,
            fresh=seen.config in self._fresh,
        )


def candidates(record: Record, batch: int, sound: Callable[[Config], bool]) -> list[Candidate]:
    """What a record knows at one batch size, torch's default first; empty without the default."""
    starts = _Starts(record)
    found = [starts.candidate(one, batch) for one in _steady(record, batch, sound)]
    if not found or found[0] is None:
        return []
    return [one for one in found if one is not None]


def _steady(record: Record, batch: int, sound: Callable[[Config], bool]) -> list[_Seen]:
    """Beside the default and the advice only what trains faster than the default.

    Raced ones where the race was sure of it, those measured once by the low end of their interval.
    """
    raced = {c.config: c for c in _choices(record) if c.batch == batch}
    once = {
        t.config: t.measurement
        for t in record.trials
        if _ran(t, batch) and t.config not in raced and sound(t.config)
    }
    default = record.baseline.config.at(batch)
    base = raced.get(default) or once.get(default)
    if base is None:
        return []
    # In the steady state the advice is the best: what seems faster was not sure to be.
    best = record.winner(CAPTURE)
    most = best.samples_per_s if best.batch == batch and not _for_a_job(record) else float("inf")
    found = [_Seen(default, base.samples_per_s, base.peak_bytes, default in raced)]
    for config, choice in raced.items():
        if config != default and _sure(record, choice) and sound(config):
            rate = min(most, choice.samples_per_s)
            found.append(_Seen(config, rate, choice.peak_bytes, True))
    for config, measured in once.items():
        rate = min(most, measured.low / ONCE)
        if config != default and rate > base.samples_per_s:
            found.append(_Seen(config, rate, measured.peak_bytes, False))
    return found


def _ran(trial: Trial, batch: int) -> bool:
    return (
        trial.stage == "compute"
        and trial.measurement.ok
        and trial.origin != "reference"
        and trial.config.batch == batch
    )


def _sure(record: Record, choice: Choice) -> bool:
    """Whether a race was sure that a config is faster than the default, or it is the advice."""
    advised = {one.choice.config for one in record.winners}
    return choice.batch != record.batch or choice.speedup_low > 1 or choice.config in advised


def table(record: Record, sound: Callable[[Config], bool]) -> list[Row]:
    """Which config is the best from how many steps on, at the user's batch."""
    known = candidates(record, record.batch, sound)
    return [
        Row(steps=steps, seconds=known[i].pace.time_s(steps), candidate=known[i])
        for steps, i in break_even([one.pace for one in known])
    ]


def length_of(record: Record) -> Length | None:
    """The job that a record's advice was chosen for; None for the steady state."""
    made = record.provenance
    if not _for_a_job(record):
        return None
    return Length(batch=record.batch, steps=made.steps, seconds=made.duration_s)


def _for_a_job(record: Record) -> bool:
    return bool(record.provenance.steps or record.provenance.duration_s)


def _choices(record: Record) -> list[Choice]:
    return [record.baseline, *(one.choice for one in record.winners), *record.raced]
