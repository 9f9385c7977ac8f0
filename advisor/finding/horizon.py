"""From how many steps on which config pays: a record's answers by the length of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from advisor.cache.config import Config
from advisor.cache.record import CAPTURE, Choice, Record
from advisor.tuners.length import Length, Pace, break_even, first_step_seen

ONCE = 1.03
"""What was measured once counts as this much slower than the low end of its interval."""

SHORTEST_S, LONGEST_S = 1e-12, 1e9
"""Seconds of a step that a record may say and no clock has measured: there is no reckoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A config that may be served, and how it trains. `raced`: measured in turn with the default,
    not once; `fresh`: its first step was measured in a fresh process, not the slowest one seen."""

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


def candidates(record: Record, batch: int, sound: Callable[[Config], bool]) -> list[Candidate]:
    """What a record knows at one batch size, torch's default first; empty without the default.

    Beside the default and the advice only what trains faster than the default: raced ones where
    the race was sure of it, those measured once by the low end of their interval.
    """
    from advisor.tuners.knobs import PAYING

    started = {c.config: c.first_step_s for c in _raced(record) if c.first_step_s > 0}

    def seen(config: Config) -> float:
        return first_step_seen(record.trials, config, PAYING)

    # What every fresh process pays, and what the trials of one process paid only once.
    default = record.baseline.config
    loading = max(0.0, started.get(default, 0.0) - seen(default))

    def candidate(config: Config, rate: float, peak_bytes: int, raced: bool) -> Candidate | None:
        first_step_s = started.get(config) or (seen(config) and seen(config) + loading)
        if not first_step_s or rate <= 0:
            return None
        pace = Pace(batch=batch, first_step_s=first_step_s, step_s=batch / rate)
        if not all(SHORTEST_S < seconds < LONGEST_S for seconds in (pace.step_s, first_step_s)):
            return None
        return Candidate(
            config=config, pace=pace, peak_bytes=peak_bytes, raced=raced, fresh=config in started
        )

    default = default.at(batch)
    raced = {c.config: c for c in _raced(record) if c.batch == batch}
    once = {
        t.config: t.measurement
        for t in record.trials
        if t.stage == "compute"
        and t.measurement.ok
        and t.origin != "reference"
        and t.config.batch == batch
        and t.config not in raced
        and sound(t.config)
    }
    if default in raced:
        floor = raced[default].samples_per_s
        found = [candidate(default, floor, raced[default].peak_bytes, True)]
    elif default in once:
        floor = once[default].samples_per_s
        found = [candidate(default, floor, once[default].peak_bytes, False)]
    else:
        return []
    if found == [None]:
        return []
    # In the steady state the advice is the best: what seems faster was not sure to be.
    best = record.winner(CAPTURE)
    most = best.samples_per_s if best.batch == batch and not _for_a_job(record) else float("inf")
    advised = {one.choice.config for one in record.winners}
    for config, choice in raced.items():
        sure = choice.batch != record.batch or choice.speedup_low > 1 or config in advised
        if config != default and sure and sound(config):
            rate = min(most, choice.samples_per_s)
            found.append(candidate(config, rate, choice.peak_bytes, True))
    for config, measured in once.items():
        rate = min(most, measured.low / ONCE)
        if config != default and rate > floor:
            found.append(candidate(config, rate, measured.peak_bytes, False))
    return [one for one in found if one is not None]


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


def _raced(record: Record) -> list[Choice]:
    return [record.baseline, *(one.choice for one in record.winners), *record.raced]
